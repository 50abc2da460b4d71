"""The definitions, in fp32 (fp64 for fp64 inputs) inside."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `rms_norm` has checked them; returns the output and the sum."""
    total = x if residual is None else residual + x.to(residual.dtype)
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * (weight.to(wide.dtype) + offset)).to(x.dtype), total


def swiglu_reference(x: Tensor) -> Tensor:
    """Arguments as `swiglu` has checked them."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
