"""The definitions, in fp32 (fp64 for fp64 inputs) inside."""

import torch
from torch import Tensor

from lapkernels.norm.reference import swiglu_reference


def few_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, apart: bool) -> Tensor:
    """Arguments as `few_linear` has checked them."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide).t()
    y = y if bias is None else y + bias.to(wide)
    y = y * scale
    return y.unsqueeze(0) if apart else y.to(weight.dtype)


def few_swiglu_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Arguments as `few_swiglu` has checked them."""
    gate, up = few_linear_reference(x, weight, bias, 1.0, False).chunk(2, -1)
    return swiglu_reference(gate, up)
