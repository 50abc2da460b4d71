"""The contract of a decode step's arguments, checked in the same way for every implementation."""

from typing import NamedTuple

import torch
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

ACTIVATIONS = ("silu", "swish", "sigmoid")


class StepSizes(NamedTuple):
    """The axes of one step."""

    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    b: Tensor | None,
    a: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    decay_lower_bound: float | None,
    conv: ConvState | None,
    position: Tensor | None,
    slots: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    gate_activation: str,
    lamb: Tensor | None,
    commit: Tensor | None,
    rounding_seed: Tensor | None,
) -> StepSizes:
    """Check the arguments of `delta_step` and return their sizes. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InvalidInput(f"{name} has shape {list(tensor.shape)}; it should have the axes [B, T, heads, width]")
    batch, time, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    if min(batch, time, key_heads, key_width, value_heads, value_width) < 1:
        raise InvalidInput(f"an axis is empty: q {list(q.shape)}, v {list(v.shape)}")
    if value_heads % key_heads:
        raise InvalidInput(
            f"v has HV = {value_heads} heads, which is no multiple of the H = {key_heads} heads of q and k"
        )
    sizes = StepSizes(batch, time, key_heads, value_heads, key_width, value_width)
    device = q.device
    per_head = (batch, time, value_heads)
    check_tensor("q", q, (batch, time, key_heads, key_width), device)
    check_tensor("k", k, (batch, time, key_heads, key_width), device)
    check_tensor("v", v, (batch, time, value_heads, value_width), device)
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidInput(f"q, k and v should share a dtype, and have {q.dtype}, {k.dtype}, {v.dtype}")
    check_pool(state, (value_heads, key_width, value_width), device)
    _check_decay(a, A_log, dt_bias, decay_lower_bound, sizes, device)
    for name, tensor, wanted in (
        ("b", b, per_head),
        ("lamb", lamb, per_head),
        ("gate", gate, (*per_head, value_width)),
        ("norm_weight", norm_weight, (value_width,)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, wanted, device)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("b", b), ("a", a), ("lamb", lamb), ("gate", gate)):
        if tensor is not None:
            check_last_axis(name, tensor)
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias), ("norm_weight", norm_weight)):
        if tensor is not None:
            check_contiguous(name, tensor)
    if gate_activation not in ACTIVATIONS:
        raise InvalidInput(f"gate_activation is '{gate_activation}'; it is one of {', '.join(ACTIVATIONS)}")
    check_seed(rounding_seed, state, device)
    check_rows(batch, time, device, state, position, slots, commit, conv, sizes.channels, q.dtype)
    return sizes


def _check_decay(
    a: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    decay_lower_bound: float | None,
    sizes: StepSizes,
    device: torch.device,
) -> None:
    heads, width = sizes.value_heads, sizes.key_width
    if a is None:
        if A_log is not None or dt_bias is not None or decay_lower_bound is not None:
            raise InvalidInput("A_log, dt_bias and decay_lower_bound say how `a` makes the decay; there is no `a`")
        return
    rows = (sizes.batch, sizes.time, heads)
    per_channel = a.ndim == 4
    check_tensor("a", a, (*rows, width) if per_channel else rows, device)
    if A_log is None:
        if dt_bias is not None or decay_lower_bound is not None:
            raise InvalidInput(
                "without A_log, `a` is the log decay itself; dt_bias and decay_lower_bound have no meaning"
            )
        return
    check_tensor("A_log", A_log, (heads,), device)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, (heads, width) if per_channel else (heads,), device)
