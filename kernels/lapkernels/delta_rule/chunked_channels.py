"""Decays of single key channels within chunks, for the chunked form in PyTorch.

The derivation is in this folder's README ("A decay of each channel"). A chunk is cut in halves again and again. A pair
of steps lies in both halves of exactly one of these parts, and its decay is that from the later half's start to the
later step, times that from the earlier step to the earlier half's end. Both are products of factors up to 1, so
nothing overflows, and no two sums are subtracted, so nothing cancels: neither here nor in the gradient of the log
decay.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Level(NamedTuple):
    """All parts of one length before their halves are made one; P is the chunk's length, n the number of parts.

    Attributes:
        later: `[N, n, half, 2, K]`, read and erase directions in the later halves, decayed from the half's start on.
        earlier: `[N, n, half, K]`, write directions in the earlier halves, decayed to the half's end.
        kept: `[N, n, 2, K]`, the decays over the halves.
    """

    later: Tensor
    earlier: Tensor
    kept: Tensor

    def products(self) -> Tensor:
        """Of later steps with earlier ones, `[N, n, half, 2, half]`."""
        return (self.later.flatten(2, 3) @ self.earlier.mT).unflatten(2, (-1, 2))


def decayed_by_channel(g: Tensor, read: Tensor, erase: Tensor, write: Tensor) -> tuple[Tensor, ...]:
    """Directions and products of a chunk's steps, each channel with the decay between them.

    Args:
        g: `[N, C, K]`, log decay, never positive.
        read: `[N, C, K]`, read directions.
        erase: `[N, C, K]`, erase directions.
        write: `[N, C, K]`, write directions.

    Returns:
        Read and erase directions decayed from the start of the chunk, write directions decayed to its end, all
        `[N, C, K]`; the decay over the chunk `[N, K, 1]`; and the products of the later step's erase direction with the
        earlier one's write direction, and of its read direction with it, `[N, C, C]`, zero above the diagonal.
    """
    return _DecayedByChannel.apply(g, read, erase, write)  # pyright: ignore[reportReturnType]


class _DecayedByChannel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, read: Tensor, erase: Tensor, write: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, read, erase, write)
        length = g.shape[1]
        rows, columns, kept = _padded(g, read, erase, write)
        pairs = rows.new_zeros(*rows.shape[:3], rows.shape[1])
        # A step reads what it has written itself as it was written.
        pairs.diagonal(dim1=1, dim2=3)[..., :length] = (torch.stack((read, erase), 1) * write.unsqueeze(1)).sum(-1)
        for level in _levels(rows, columns, kept):
            _blocks(pairs, level.earlier.shape[2]).copy_(level.products().permute(0, 2, 3, 4, 1))
        # Not a view, nor what was changed in place: see the README ("Compiled") of results that are.
        own = {"memory_format": torch.contiguous_format}
        return (
            rows[:, :length, 0].clone(**own),
            rows[:, :length, 1].clone(**own),
            columns[:, :length].clone(**own),
            kept.prod(1).unsqueeze(-1),
            pairs[:, :length, 1, :length].clone(**own),
            pairs[:, :length, 0, :length].clone(**own),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        d_read, d_erase, d_write, d_kept, d_erased_pairs, d_read_pairs = gradients
        g, read, erase, write = ctx.saved_tensors
        length = g.shape[1]
        rows, columns, kept = _padded(g, read, erase, write)
        decay, undecayed = kept.clone(), torch.stack((read, erase), 2)
        # What the levels hold is made once more, and kept for this pass alone.
        levels = [_Level(x.later.clone(), x.earlier.clone(), x.kept) for x in _levels(rows, columns, kept)]
        missing = rows.shape[1] - length
        d_rows = F.pad(torch.stack((d_read, d_erase), 2), (0, 0, 0, 0, 0, missing))
        d_columns = F.pad(d_write, (0, 0, 0, missing))
        d_pairs = F.pad(torch.stack((d_read_pairs, d_erased_pairs), 2), (0, missing, 0, 0, 0, missing))
        # By the logarithm of the decay over each part: what that over the whole chunk is multiplied with, first.
        d_log = (d_kept.squeeze(-1) * kept.prod(1)).unsqueeze(1)
        for level in reversed(levels):
            half = level.earlier.shape[2]
            d_products = _blocks(d_pairs, half).permute(0, 4, 1, 2, 3).flatten(2, 3)
            d_later, d_earlier = _halves(d_rows, half)[:, :, 1], _halves(d_columns, half)[:, :, 0]
            before, after = level.kept[:, :, 0, None], level.kept[:, :, 1, None]
            by_later = d_later * before.unsqueeze(3)
            by_earlier = d_earlier * after
            logs = ((level.later * by_later).sum((2, 3)), (level.earlier * by_earlier).sum(2))
            d_log = d_log.unsqueeze(2).add(torch.stack(logs, 2)).flatten(1, 2)
            d_later.copy_(by_later).add_((d_products @ level.earlier).unflatten(2, (-1, 2)))
            d_earlier.copy_(by_earlier).add_(d_products.mT @ level.later.flatten(2, 3))
        d_rows, d_columns, d_log, decay = (x[:, :length] for x in (d_rows, d_columns, d_log, decay))
        d_rows = d_rows * decay.unsqueeze(2)
        d_g = (undecayed * d_rows).sum(2).add_(d_log)
        own = d_pairs.diagonal(dim1=1, dim2=3)[..., :length].movedim(-1, 1).unsqueeze(-1)
        d_rows = torch.addcmul(d_rows, own, write.unsqueeze(2))
        d_columns = d_columns + (own * undecayed).sum(2)
        return d_g, d_rows[:, :, 0], d_rows[:, :, 1], d_columns


def _padded(g: Tensor, read: Tensor, erase: Tensor, write: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[N, P, 2, K]` with their own decay, columns `[N, P, K]` and decays `[N, P, K]`, P a power of two."""
    missing = (1 << (g.shape[1] - 1).bit_length()) - g.shape[1]
    decay = F.pad(g, (0, 0, 0, missing)).exp()
    rows = F.pad(torch.stack((read, erase), 2), (0, 0, 0, 0, 0, missing)) * decay.unsqueeze(2)
    return rows, F.pad(write, (0, 0, 0, missing)).clone(), decay


def _levels(rows: Tensor, columns: Tensor, kept: Tensor) -> Iterator[_Level]:
    """From halves of one step on. In the end rows are decayed from the chunk's start on, columns to its end.

    What a level holds are views, which change when the next one is asked for.
    """
    half = 1
    while half < rows.shape[1]:
        parts = kept.unflatten(1, (-1, 2))
        later, earlier = _halves(rows, half)[:, :, 1], _halves(columns, half)[:, :, 0]
        yield _Level(later, earlier, parts)
        later.mul_(parts[:, :, 0, None, None])
        earlier.mul_(parts[:, :, 1, None])
        kept = parts[:, :, 0] * parts[:, :, 1]
        half *= 2


def _halves(x: Tensor, half: int) -> Tensor:
    """`[N, P, ...]` to `[N, n, 2, half, ...]`, a view."""
    return x.unflatten(1, (-1, 2, half))


def _blocks(pairs: Tensor, half: int) -> Tensor:
    """Of `[N, P, 2, P]` the pairs of later with earlier halves, `[N, half, 2, half, n]`, a view."""
    return _halves(pairs, half)[:, :, 1].unflatten(4, (-1, 2, half))[:, :, :, :, :, 0].diagonal(dim1=1, dim2=4)
