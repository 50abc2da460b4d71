"""How tokens are laid out in chunks: rows of one length, or sequences packed in one row.

All chunks lie along one axis `M`, ordered by their number within their sequence and then by sequence, longer sequences
first: step `n` of a loop over chunks is then one slice of `M`, for both kinds of rows alike.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Layout(NamedTuple):
    """How tokens are laid out in chunks; `take` and `put` are `None` where reshaping does it."""

    chunk: int
    counts: tuple[int, ...]
    """How many sequences still run at each step of the loop; never rises."""
    take: Tensor | None
    """`[M * C]`, the token in each place of each chunk; past the end of a sequence, its last token."""
    is_token: Tensor | None
    """bool `[M * C]`, whether a place has a token of its own."""
    put: Tensor | None
    """`[T]`, the place of each token among `[M * C]`."""
    order: Tensor | None
    """`[sequences]`, the sequences from the longest to the shortest."""


def rows_layout(batch: int, time: int, chunk_size: int) -> Layout:
    """Lay out rows of `time` tokens each."""
    chunk = min(chunk_size, time)
    return Layout(chunk, (batch,) * -(-time // chunk), None, None, None, None)


@lru_cache(maxsize=4)
def packed_layout(bounds: tuple[int, ...], chunk_size: int, device: torch.device) -> Layout:
    """Lay out packed sequences; remembered, since all layers of a model ask for the same."""
    # Remembered tensors have to serve calls with a gradient too, whichever asks first.
    with torch.inference_mode(False):
        starts = torch.tensor(bounds[:-1])
        lengths = torch.tensor(bounds[1:]) - starts
        chunk = min(chunk_size, int(lengths.max()))
        order = torch.argsort(lengths, descending=True, stable=True)
        chunks = (lengths[order] + chunk - 1) // chunk
        steps = torch.arange(int(chunks[0]))
        counts = (chunks > steps.unsqueeze(1)).sum(1)

        step = torch.repeat_interleave(steps, counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        sequence = order[torch.arange(len(step)) - first].unsqueeze(1)
        offset = step.unsqueeze(1) * chunk + torch.arange(chunk)
        is_token = (offset < lengths[sequence]).flatten()
        take = (starts[sequence] + torch.minimum(offset, lengths[sequence] - 1)).flatten()
        put = torch.empty(bounds[-1], dtype=torch.long)
        put[take[is_token]] = is_token.nonzero().squeeze(1)
        index = (x.to(device) for x in (take, is_token, put, order))
        return Layout(chunk, tuple(counts.tolist()), *index)


class _Take(torch.autograd.Function):
    """`x[take]`, where the gradient of a place without a token is zero: so the backward pass is `gradient[put]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, put: Tensor) -> Tensor:
        ctx.save_for_backward(put)
        return x.index_select(0, take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


def to_chunks(x: Tensor, layout: Layout) -> Tensor:
    """`[B, T, ...]` to `[steps, B, C, ...]`, or to `[M, C, ...]` where sequences are packed.

    Places without a token hold zeros, or the sequence's last token where sequences are packed. With a write strength
    of zero and no decay they change nothing, and have no gradient.
    """
    if layout.take is not None:
        return _Take.apply(x[0], layout.take, layout.put).unflatten(0, (-1, layout.chunk))
    steps = len(layout.counts)
    missing = steps * layout.chunk - x.shape[1]
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (steps, layout.chunk)).transpose(0, 1)


def from_chunks(x: Tensor, layout: Layout, batch: int, time: int) -> Tensor:
    """`[M, C, ...]` to `[B, T, ...]`."""
    if layout.put is not None:
        return x.flatten(0, 1).index_select(0, layout.put).unsqueeze(0)
    return x.unflatten(0, (len(layout.counts), batch)).transpose(0, 1).flatten(1, 2)[:, :time]
