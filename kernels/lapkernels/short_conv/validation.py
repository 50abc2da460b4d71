"""The contract of the arguments, checked in the same way for every implementation."""

from torch import Tensor

from lapkernels.decoding.rows import check_contiguous, check_last_axis, check_tensor
from lapkernels.delta_rule.validation import check_boundaries, read_boundaries
from lapkernels.errors import InvalidInput


def check_arguments(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Check the arguments of `short_conv`. Reads no values of what lies on a device.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if x.ndim != 3 or not x.numel():
        raise InvalidInput(f"x has shape {list(x.shape)}; it should be [B, T, C] with something in it")
    rows, time, channels = x.shape
    if weight.ndim != 2 or weight.shape[1] < 1:
        raise InvalidInput(f"weight has shape {list(weight.shape)}; it should be [{channels}, W]")
    check_tensor("x", x, tuple(x.shape), x.device)
    check_tensor("weight", weight, (channels, weight.shape[1]), x.device)
    check_last_axis("x", x)
    if cu_seqlens is not None:
        rows = check_boundaries(cu_seqlens, rows)
        if cu_seqlens.device != x.device:
            raise InvalidInput(f"cu_seqlens is on {cu_seqlens.device}, x on {x.device}; they should be on one device")
        check_contiguous("cu_seqlens", cu_seqlens)
        if cu_seqlens.device.type == "cpu":
            read_boundaries(cu_seqlens, time)
    if state is not None:
        check_tensor("state", state, (rows, weight.shape[1] - 1, channels), x.device)
        check_last_axis("state", state)
