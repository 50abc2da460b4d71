"""The contract of the arguments, checked in the same way for every implementation."""

from torch import Tensor

from lapkernels.decoding.rows import check_last_axis, check_tensor
from lapkernels.errors import InvalidInput


def check_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, gate: Tensor | None, activation: str, shares: bool = False
) -> None:
    """Check the arguments of `rms_norm`.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if x.ndim < 1 or not x.numel():
        raise InvalidInput(f"x has shape {list(x.shape)}; it should be [.., D] with something in it")
    if shares and (residual is None or x.ndim < 2):
        found = "no residual" if residual is None else f"x has shape {list(x.shape)}"
        raise InvalidInput(f"shares=True, and {found}; x should be [S, .., D], with a residual [.., D]")
    shape = tuple(x.shape[1:] if shares else x.shape)
    check_tensor("x", x, tuple(x.shape), x.device)
    check_tensor("weight", weight, (x.shape[-1],), x.device)
    check_last_axis("x", x)
    check_last_axis("weight", weight)
    if residual is not None:
        check_tensor("residual", residual, shape, x.device)
        check_last_axis("residual", residual)
    if gate is not None:
        check_tensor("gate", gate, shape, x.device)
        check_last_axis("gate", gate)
    if activation not in ("silu", "swish", "sigmoid"):
        raise InvalidInput(f"gate_activation is '{activation}'; it should be silu, swish (the same) or sigmoid")


def check_gated(x: Tensor, up: Tensor | None) -> None:
    """Check the arguments of `swiglu`.

    Raises:
        InvalidInput: saying what it is and what it should be.
    """
    if x.ndim < 1 or not x.numel() or (up is None and x.shape[-1] % 2):
        wanted = "[.., 2 F], gate and up side by side" if up is None else "[.., F] with something in it"
        raise InvalidInput(f"x has shape {list(x.shape)}; it should be {wanted}")
    check_tensor("x", x, tuple(x.shape), x.device)
    check_last_axis("x", x)
    if up is not None:
        check_tensor("up", up, tuple(x.shape), x.device)
        check_last_axis("up", up)
