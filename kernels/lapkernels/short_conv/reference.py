"""The definition, in fp32 (fp64 for fp64 inputs) inside."""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv_reference(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    """Arguments as `short_conv` has checked them."""
    wide, past, time = torch.promote_types(x.dtype, torch.float32), weight.shape[1] - 1, x.shape[1]
    t = torch.arange(time, device=x.device)
    bounds = torch.tensor([0, time], device=x.device) if cu_seqlens is None else cu_seqlens.long()
    number = torch.bucketize(t, bounds[1:], right=True)
    first = bounds[number]
    # By sequence of each row, `[B, sequences, W - 1, C]`.
    states = x.new_zeros(len(x), len(bounds) - 1, past, x.shape[2])
    states = states if state is None else state.to(x.dtype).view(states.shape)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for lag in range(past + 1):
        at = t - lag
        seen = x[:, at.clamp(min=0)]
        if lag:
            before = states[:, number, (at - first + past).clamp(max=past - 1)]
            seen = torch.where((at < first).unsqueeze(1), before, seen)
        y = y + seen.to(wide) * weight[:, past - lag].to(wide)
    return (F.silu(y) if silu else y).to(x.dtype)
