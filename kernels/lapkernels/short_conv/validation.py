"""The contract of the arguments, checked in the same way for every implementation."""

from torch import Tensor

from lapkernels.decoding.rows import check_last_axis, check_tensor
from lapkernels.errors import InvalidInput


def check_arguments(x: Tensor, weight: Tensor, state: Tensor | None) -> None:
    """Check the arguments of `short_conv`. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if x.ndim != 3 or not x.numel():
        raise InvalidInput(f"x has shape {list(x.shape)}; it should be [B, T, C] with something in it")
    rows, _, channels = x.shape
    if weight.ndim != 2 or weight.shape[1] < 1:
        raise InvalidInput(f"weight has shape {list(weight.shape)}; it should be [{channels}, W]")
    check_tensor("x", x, tuple(x.shape), x.device)
    check_tensor("weight", weight, (channels, weight.shape[1]), x.device)
    check_last_axis("x", x)
    if state is not None:
        check_tensor("state", state, (rows, weight.shape[1] - 1, channels), x.device)
        check_last_axis("state", state)
