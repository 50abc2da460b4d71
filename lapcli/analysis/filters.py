"""How large the taps of the short convolutions are, for channels that are kept and for those that are dropped."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lapcli.families.base import Family, StatefulLayer
from lapcli.families.source import ModelSource

SIDES = ("key", "query")


def filter_magnitudes(source: ModelSource, family: Family, layer: StatefulLayer) -> dict[str, Tensor]:
    """The absolute taps of a layer's key and query channels, read from disk.

    Args:
        source: the model.
        family: of the model.
        layer: one of its stateful layers.

    Returns:
        By side ("key", "query") fp64 `[H, K, W]`, the last tap on the current token; the mean over a head's copies.
        Nothing where the family has no such convolution.
    """
    from safetensors import safe_open

    shapes = {name: entry.shape for name, (_header, entry) in source.tensors.items()}
    members = family.members(layer, shapes)
    found: dict[str, Tensor] = {}
    for side in SIDES:
        total = count = torch.zeros(())
        for member in members:
            if member.role != f"{side} convolution":
                continue
            header, _entry = source.tensors[member.tensor]
            with safe_open(header.path, framework="pt") as handle:
                taps = handle.get_tensor(member.tensor).double().abs().flatten(1)
            rows = torch.tensor([list(head) for head in member.rows(layer.heads, layer.key_width)])
            # A part of a convolution that lies in several tensors holds some of the channels.
            inside = (rows >= 0) & (rows < len(taps))
            total = total + torch.where(inside.unsqueeze(-1), taps[rows.clamp(0, len(taps) - 1)], 0.0)
            count = count + inside
        if count.ndim:
            found[side] = total / count.unsqueeze(-1)
    return found


def kept_and_dropped(magnitudes: Mapping[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """Mean absolute taps of the kept and of the dropped channels.

    Args:
        magnitudes: by side, `[H, K, W]`.
        kept: `[H, K']`.

    Returns:
        By side fp64 `[2, H, W]`: kept, then dropped.
    """
    found: dict[str, Tensor] = {}
    for side, taps in magnitudes.items():
        mask = torch.zeros(taps.shape[:2], dtype=torch.float64).scatter_(1, kept, 1.0).unsqueeze(-1)
        means = [(taps * part).sum(1) / part.sum(1) for part in (mask, 1 - mask)]
        found[side] = torch.stack(means)
    return found
