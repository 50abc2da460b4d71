"""Cross entropy of the next token, over the positions that have one."""

import torch.nn.functional as F
from torch import Tensor

from lapcli.models.precision import widened
from lapcli.models.tokens import Packing, Padding

IGNORED = -100
"""A label that does not count, as in transformers."""


def next_token_labels(labels: Tensor, padding: Padding | None = None, packing: Packing | None = None) -> Tensor:
    """Labels shifted to the position that predicts them.

    A position is ignored when its label is, when there is no next token, when it or its next token is padding, and
    when the next token begins another packed sequence.

    Args:
        labels: `[B, T]`, the tokens themselves, or `IGNORED`.
        padding: the rows' padding, in the same layout.
        packing: the sequences, counted over all rows laid one behind the other.

    Returns:
        `[B, T]`, int64.
    """
    labels = labels.long()
    if padding is not None:
        labels = padding.keep(labels, IGNORED)
    if packing is not None:
        starts = packing.first_tokens(labels.device)
        labels = labels.flatten().index_fill(0, starts, IGNORED).view_as(labels)
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return shifted if padding is None else padding.keep(shifted, IGNORED)


def cross_entropy(logits: Tensor, targets: Tensor, items: int | Tensor | None = None) -> Tensor:
    """Mean cross entropy in fp32 over the targets that are not ignored; 0, not NaN, when all are.

    Args:
        logits: `[..., vocabulary]`.
        targets: `[...]`, as `next_token_labels` gives them.
        items: divide the sum by this count instead (gradient accumulation).
    """
    total = F.cross_entropy(widened(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    if items is None:
        items = (targets != IGNORED).sum().clamp(min=1)
    elif isinstance(items, Tensor):
        items = items.to(total.device)
    return total / items
