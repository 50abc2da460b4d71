"""The definition of the step, on any device; captured in a CUDA graph, it reads all that a row has room for."""

import torch
from torch import Tensor

from lapkernels.attend_step.pages import read_tokens, write_tokens


def attend_step_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    position: Tensor,
    slots: Tensor,
    scale: float,
    window: int | None,
    longest: int | None,
) -> Tensor:
    """Run the step. Arguments as `attend_step` has checked and completed them; returns `[B, HQ, V]`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads = key.shape[:2]
    live = slots >= 0
    write_tokens((keys, values), (key, value), pages, position, slots)
    room = pages.shape[1] * keys.shape[2]
    length = room if longest is None else min(longest, room)
    at = torch.arange(length, device=query.device)
    there = (at <= position.unsqueeze(1)) & live.unsqueeze(1)
    if window is not None:
        there &= at > position.unsqueeze(1) - window
    held, read = (
        torch.where(there[:, None, :, None], read_tokens(pool, pages, slots, length).to(dtype), 0.0)
        for pool in (keys, values)
    )
    grouped = query.to(dtype).unflatten(1, (heads, -1))
    scores = (grouped @ held.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~there[:, None, None], -torch.inf).softmax(dim=-1)
    found = (torch.where(live[:, None, None, None], weights, 0.0) @ read).flatten(1, 2)
    return found.to(query.dtype).view(batch, -1, values.shape[-1])
