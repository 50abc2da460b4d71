"""Where a row's tokens lie: pages of a pool by a table, in PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def write_tokens(
    pools: Sequence[Tensor], new: Sequence[Tensor], pages: Tensor, position: Tensor, slots: Tensor
) -> None:
    """Put one token of each row where it belongs; padding rows write nothing. Nothing waits for the host.

    Args:
        pools: `[pages, H, P, width]` each, written in place.
        new: `[B, H, width]`, for each of them.
        pages: `[slots, M]`, see `attend_step`.
        position: `[B]`, of the token in its row.
        slots: `[B]`, where each row lives; negative for padding.
    """
    live, size = slots >= 0, pools[0].shape[2]
    # A padding row does again what the first live one does, and all put back what is there where none lives.
    any_lives = live.any()
    row = torch.where(live, torch.arange(len(slots), device=slots.device), live.long().argmax())
    slot, at = slots[row].clamp(min=0).long(), position[row].long() * any_lives
    page, place = pages[slot, at // size].long(), at % size
    for pool, tokens in zip(pools, new, strict=True):
        pool[page, :, place] = torch.where(any_lives, tokens[row].to(pool.dtype), pool[page, :, place])


def read_tokens(pool: Tensor, pages: Tensor, slots: Tensor, length: int) -> Tensor:
    """What lies at the first `length` places of each row, whatever it is behind the row's last token.

    Args:
        pool: `[pages, H, P, width]`.
        pages: `[slots, M]`, see `attend_step`.
        slots: `[B]`, where each row lives; for padding, any.
        length: at most `M P`.

    Returns:
        `[B, H, length, width]`, a copy.
    """
    heads, size = pool.shape[1:3]
    held = pages[slots.clamp(min=0).long(), : -(-length // size)].long()
    return pool[held.unsqueeze(1), torch.arange(heads, device=pool.device).view(1, -1, 1)].flatten(2, 3)[:, :, :length]
