"""The definition, in fp32 (fp64 for fp64 inputs) inside."""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv_reference(x: Tensor, weight: Tensor, state: Tensor | None, silu: bool) -> Tensor:
    """Arguments as `short_conv` has checked them."""
    wide, width = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    past = x.new_zeros(len(x), width - 1, x.shape[2]) if state is None else state.to(x.dtype)
    joined = torch.cat((past, x), dim=1).to(wide)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for tap in range(width):
        y += joined[:, tap : tap + x.shape[1]] * weight[:, tap].to(wide)
    return (F.silu(y) if silu else y).to(x.dtype)
