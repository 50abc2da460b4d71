"""The contract of a thin layer's arguments, checked in the same way for every implementation."""

from torch import Tensor

from lapkernels.decoding.rows import check_last_axis, check_tensor
from lapkernels.errors import InvalidInput


def check_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, gated: bool, residual: Tensor | None
) -> None:
    """Check the arguments of `thin_linear`. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if x.ndim != 2 or weight.ndim != 2:
        raise InvalidInput(f"x has shape {list(x.shape)}, weight {list(weight.shape)}; they should be [B, D], [N, D]")
    if norm is not None and gated:
        raise InvalidInput("a norm and SwiGLU; one of them may come before the layer")
    (rows, _), (outputs, width), device = x.shape, weight.shape, x.device
    check_tensor("x", x, (rows, 2 * width if gated else width), device)
    check_tensor("weight", weight, (outputs, width), device)
    for name, tensor, wanted in (
        ("bias", bias, (outputs,)),
        ("norm", norm, (width,)),
        ("residual", residual, (rows, outputs)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, wanted, device)
            check_last_axis(name, tensor)
    check_last_axis("x", x)
    check_last_axis("weight", weight)
