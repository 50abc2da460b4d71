"""The contract of a Mamba-2 step's arguments, checked in the same way for every implementation."""

from typing import NamedTuple

from torch import Tensor

from lapkernels.decoding.rows import (
    ConvState,
    check_contiguous,
    check_last_axis,
    check_pool,
    check_rows,
    check_seed,
    check_tensor,
)
from lapkernels.errors import InvalidInput


class StepSizes(NamedTuple):
    """The axes of one step."""

    batch: int
    time: int
    groups: int
    heads: int
    state_width: int
    head_width: int

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C side by side."""
        return self.heads * self.head_width + 2 * self.groups * self.state_width


def check_arguments(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    state: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] | None,
    conv: ConvState | None,
    position: Tensor | None,
    slots: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_groups: int,
    commit: Tensor | None,
    rounding_seed: Tensor | None,
) -> StepSizes:
    """Check the arguments of `ssd_step` and return their sizes. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        if tensor.ndim != 4:
            raise InvalidInput(
                f"{name} has shape {list(tensor.shape)}; it should have four axes, [batch, T, .., width]"
            )
    batch, time, heads, head_width = x.shape
    groups, state_width = B.shape[2:]
    if min(batch, time, heads, head_width, groups, state_width) < 1:
        raise InvalidInput(f"an axis is empty: x {list(x.shape)}, B {list(B.shape)}")
    if heads % groups:
        raise InvalidInput(f"x has {heads} heads, which is no multiple of the {groups} groups of B and C")
    sizes = StepSizes(batch, time, groups, heads, state_width, head_width)
    device = x.device
    check_tensor("x", x, (batch, time, heads, head_width), device)
    check_tensor("B", B, (batch, time, groups, state_width), device)
    check_tensor("C", C, (batch, time, groups, state_width), device)
    check_tensor("dt", dt, (batch, time, heads), device)
    if not x.dtype == B.dtype == C.dtype:
        raise InvalidInput(f"x, B and C should share a dtype, and have {x.dtype}, {B.dtype}, {C.dtype}")
    check_pool(state, (heads, head_width, state_width), device)
    for name, tensor, wanted in (
        ("A_log", A_log, (heads,)),
        ("D", D, (heads,)),
        ("dt_bias", dt_bias, (heads,)),
        ("gate", gate, (batch, time, heads, head_width)),
        ("norm_weight", norm_weight, (heads * head_width,)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, wanted, device)
    for name, tensor in (("x", x), ("B", B), ("C", C), ("dt", dt), ("gate", gate)):
        if tensor is not None:
            check_last_axis(name, tensor)
    for name, tensor in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias), ("norm_weight", norm_weight)):
        if tensor is not None:
            check_contiguous(name, tensor)
    if dt_limit is not None and not dt_limit[0] <= dt_limit[1]:
        raise InvalidInput(f"dt_limit is {dt_limit}; it should be (lowest, highest)")
    if norm_groups < 1 or heads % norm_groups:
        raise InvalidInput(f"norm_groups is {norm_groups}; it should divide the {heads} heads")
    check_seed(rounding_seed, state, device)
    check_rows(batch, time, device, state, position, slots, commit, conv, sizes.channels, x.dtype)
    return sizes
