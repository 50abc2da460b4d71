"""The definitions, in fp32 (fp64 for fp64 inputs) inside."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    gate: Tensor | None,
    sigmoid: bool,
    shares: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as `rms_norm` has checked them; returns the output and the sum."""
    total = x
    if shares:
        assert residual is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        total = (residual.to(wide) + x.to(wide).sum(0)).to(residual.dtype)
    elif residual is not None:
        total = residual + x.to(residual.dtype)
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = unit * (weight.to(wide.dtype) + offset)
    if gate is not None:
        normed = normed * (torch.sigmoid if sigmoid else F.silu)(gate.to(wide.dtype))
    return normed.to(dtype or x.dtype), total


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Arguments as `swiglu` has checked them, apart."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
