"""The contract of the arguments, checked in the same way for every implementation."""

from torch import Tensor

from lapkernels.decoding.rows import check_last_axis, check_tensor
from lapkernels.errors import InvalidInput


def check_arguments(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> None:
    """Check the arguments of `few_linear` or, `gated`, of `few_swiglu`. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if x.ndim != 2 or weight.ndim != 2:
        raise InvalidInput(f"x has shape {list(x.shape)}, weight {list(weight.shape)}; they should be [B, D], [N, D]")
    (rows, _), (outputs, width), device = x.shape, weight.shape, x.device
    if not width:
        raise InvalidInput(f"weight has shape {list(weight.shape)}; D should be 1 or more")
    if gated and outputs % 2:
        raise InvalidInput(f"weight has {outputs} rows; gate and up below each other should be an even number")
    check_tensor("x", x, (rows, width), device)
    check_tensor("weight", weight, (outputs, width), device)
    if x.dtype != weight.dtype:
        raise InvalidInput(f"x has dtype {x.dtype}, weight {weight.dtype}; they should share one")
    check_last_axis("x", x)
    check_last_axis("weight", weight)
    if bias is not None:
        check_tensor("bias", bias, (outputs,), device)
        check_last_axis("bias", bias)
