"""What a selection keeps: how well conditioned its columns are, and what it shares with another."""

from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import Artifact
from lapcli.errors import ArtifactError

_EPS = torch.finfo(torch.float64).eps


def kept_channels(selection: Artifact) -> dict[int, Tensor]:
    """The kept channels `[H, K']` by layer; the whole file is read, which checks it.

    Raises:
        ArtifactError: the file is damaged, or keeps no channels (a basis is no choice of channels).
    """
    tensors = selection.tensors()
    found = {int(name.split(".")[1]): kept for name, kept in tensors.items() if name.endswith(".kept")}
    if not found:
        raise ArtifactError(
            f"{selection.path} (method {selection.lineage.settings.get('method')}) keeps directions and no channels, "
            "so there is nothing to compare",
            "compare selections of methods that keep channels; without --compare it can be looked at",
        )
    return dict(sorted(found.items()))


def kept_directions(selection: Artifact) -> dict[int, Tensor]:
    """The kept directions T `[H, K', K]` by layer, of a selection that rotates; nothing of any other.

    Raises:
        ArtifactError: the file is damaged.
    """
    if not any(name.endswith(".basis") for name in selection.names):
        return {}
    tensors = selection.tensors()
    return {int(name.split(".")[1]): basis for name, basis in tensors.items() if name.endswith(".basis")}


def refuse_other_channels(path: Any, kept: dict[int, Tensor], sizes: dict[int, tuple[int, int]]) -> None:
    """Refuse kept channels or directions that are not of these layers.

    Args:
        path: the selection, for the message.
        kept: `[H, K']` or `[H, K', K]` by layer.
        sizes: H and K by layer.

    Raises:
        ArtifactError: other layers or heads, a channel beyond K, or directions in another width.
    """
    found = {index: rows.shape[0] for index, rows in kept.items()}
    wanted = {index: heads for index, (heads, _width) in sizes.items()}

    def within(rows: Tensor, width: int) -> bool:
        return rows.shape[2] == width if rows.ndim == 3 else int(rows.max()) < width

    if found != wanted or not all(within(rows, sizes[index][1]) for index, rows in kept.items()):
        raise ArtifactError(f"{path} keeps channels of other layers, heads or widths than the model has")


def joint_grams(calibration: Artifact) -> dict[int, Tensor]:
    """`M^T M` of the joint activations `M = [Kc; Qc]`, fp64 `[H, K, K]` by layer; the whole file is read.

    Raises:
        ArtifactError: the file is damaged.
    """
    tensors = calibration.tensors()
    indices = [layer["index"] for layer in calibration.lineage.record["layers"]]
    return {n: tensors[f"layers.{n}.gram_key"] + tensors[f"layers.{n}.gram_query"] for n in indices}


def conditioning(gram: Tensor, kept: Tensor | None = None) -> Tensor:
    """`sigma_min`, `sigma_max` and `kappa` of the kept columns of `M`, or of its rotated ones `M T^T`, per head.

    An fp64 Gram matrix resolves singular values down to `sqrt(K eps) sigma_1`; `kappa` is taken with no less than that.

    Args:
        gram: `M^T M`, fp64 `[H, K, K]`.
        kept: channels `[H, K']` or directions T `[H, K', K]`; `None` for all columns.

    Returns:
        fp64 `[H, 3]`.
    """
    if kept is not None and kept.ndim == 3:
        gram = kept @ gram @ kept.mT
    elif kept is not None:
        rows = gram.gather(1, kept.unsqueeze(-1).expand(-1, -1, gram.shape[-1]))
        gram = rows.gather(2, kept.unsqueeze(1).expand(-1, kept.shape[1], -1))
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    least, largest = values[:, 0], values[:, -1]
    floor = (gram.shape[-1] * _EPS) ** 0.5
    share = torch.where(largest > 0, least / largest, 0.0).clamp(min=floor)
    return torch.stack((least, largest, 1 / share), -1)


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Channels that both keep, and their share of those that either keeps (Jaccard), per head.

    Args:
        first: `[H, K']`.
        second: `[H, K'']`; of another width where budgets differ.

    Returns:
        fp64 `[H, 2]`.
    """
    shared = (first.unsqueeze(-1) == second.unsqueeze(1)).sum((1, 2)).double()
    return torch.stack((shared, shared / (first.shape[1] + second.shape[1] - shared)), -1)
