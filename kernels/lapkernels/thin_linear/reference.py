"""The definition, in fp32 (fp64 for fp64 inputs) inside."""

import torch
import torch.nn.functional as F
from torch import Tensor


def thin_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    offset: float,
    gated: bool,
    residual: Tensor | None,
    scale: float,
) -> Tensor:
    """Arguments as `thin_linear` has checked them."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (norm.to(wide) + offset)
    if gated:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    y = x.to(weight.dtype).to(wide) @ weight.to(wide).t()
    y = y if bias is None else y + bias.to(wide)
    y = y * scale
    return y.to(weight.dtype) if residual is None else (residual.to(wide) + y).to(residual.dtype)
