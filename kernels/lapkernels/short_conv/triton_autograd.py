"""The convolution as one differentiable call: sums, and the slope of SiLU, are made again where they are needed."""

# pyright: reportGeneralTypeIssues=false
# As in `triton_conv`.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid
from lapkernels.short_conv.triton_conv import filtered, input_of, packed, sequence_of, short_conv_triton

_STEPS = 64
_LINE = 128
"""Bytes of a step that a program reads: a line of memory."""


@triton.jit
def _sum_gradient(x_ptr, state_ptr, weight_ptr, d_ptr, t, number, first, c, there, channels, x_step, state_row,
                  state_step, weight_channel, weight_tap, d_step, W: tl.constexpr, STATE: tl.constexpr,
                  SILU: tl.constexpr):  # fmt: skip
    """The gradient of the sums of tokens t [BT], [BT, BC]; zeros for what is not `there`."""
    d = tl.load(d_ptr + t[:, None].to(tl.int64) * d_step + c[None, :], mask=there, other=0.0).to(tl.float32)
    if SILU:
        y = filtered(x_ptr, state_ptr, weight_ptr, t, number, first, c, there, channels, x_step, state_row, state_step,
                     weight_channel, weight_tap, W, STATE)  # fmt: skip
        opened = sigmoid(y)
        d *= opened * (1.0 + y * (1.0 - opened))
    return d


@triton.jit
def _conv_back(
    x_ptr, weight_ptr, state_ptr, bounds_ptr, d_ptr, d_x_ptr, d_weight_ptr, time, channels, sequences, depth, x_row,
    x_step, state_row, state_step, weight_channel, weight_tap, d_row, d_step,
    W: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr, WEIGHT: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs of some steps, and what these steps add to the weight's, `[blocks, C, W]`."""
    # As in `triton_conv`.
    blocks = (time + BT - 1) // BT
    row = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    held = c < channels
    x_ptr += row * x_row
    d_ptr += row * d_row
    number, first, stop = sequence_of(t, row, time, bounds_ptr, sequences, depth, PACKED)
    there = (t < stop)[:, None] & held[None, :]
    d = _sum_gradient(x_ptr, state_ptr, weight_ptr, d_ptr, t, number, first, c, there, channels, x_step, state_row,
                      state_step, weight_channel, weight_tap, d_step, W, STATE, SILU)  # fmt: skip
    if WEIGHT:
        block = tl.program_id(0).to(tl.int64)
        for age in tl.static_range(W):
            x = input_of(x_ptr, state_ptr, t - age, number, first, c, there, x_step, state_row, state_step, W,
                         STATE and age > 0)  # fmt: skip
            tl.store(d_weight_ptr + (block * channels + c) * W + (W - 1 - age), tl.sum(d * x, 0), mask=held)
    tap = tl.load(weight_ptr + c * weight_channel + (W - 1) * weight_tap, mask=held, other=0.0)
    d_x = d * tap.to(tl.float32)[None, :]
    # Not unrolled: the loads of all turns at once would take all registers.
    for lag in range(1, W):
        there = (t + lag < stop)[:, None] & held[None, :]
        d = _sum_gradient(x_ptr, state_ptr, weight_ptr, d_ptr, t + lag, number, first, c, there, channels, x_step,
                          state_row, state_step, weight_channel, weight_tap, d_step, W, STATE, SILU)  # fmt: skip
        tap = tl.load(weight_ptr + c * weight_channel + (W - 1 - lag) * weight_tap, mask=held, other=0.0)
        d_x += d * tap.to(tl.float32)[None, :]
    d_x_ptr += (row * time + t[:, None]) * channels + c[None, :]
    tl.store(d_x_ptr, d_x.to(d_x_ptr.dtype.element_ty), mask=(t < time)[:, None] & held[None, :])


@triton.jit
def _state_back(
    x_ptr, weight_ptr, state_ptr, bounds_ptr, d_ptr, d_state_ptr, time, channels, x_row, x_step, state_row, state_step,
    weight_channel, weight_tap, d_row, d_step,
    W: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of what a row, or a packed sequence, began with: its first W - 1 tokens meet it."""
    number = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    held = c < channels
    place = tl.arange(0, BT)
    first = tl.full((BT,), 0, tl.int32)
    stop = first + time
    if PACKED:
        first += tl.maximum(tl.load(bounds_ptr + number).to(tl.int32), 0)
        stop = tl.minimum(tl.load(bounds_ptr + number + 1).to(tl.int32), stop)
    else:
        x_ptr += number * x_row
        d_ptr += number * d_row
    numbers = tl.zeros_like(first).to(tl.int64) + number
    d_state = tl.zeros((BT, BC), tl.float32)
    for lag in range(1, W):
        later = first + place - (W - 1) + lag
        there = ((later >= first) & (later < stop) & (place < W - 1))[:, None] & held[None, :]
        d = _sum_gradient(x_ptr, state_ptr, weight_ptr, d_ptr, later, numbers, first, c, there, channels, x_step,
                          state_row, state_step, weight_channel, weight_tap, d_step, W, True, SILU)  # fmt: skip
        tap = tl.load(weight_ptr + c * weight_channel + (W - 1 - lag) * weight_tap, mask=held, other=0.0)
        d_state += d * tap.to(tl.float32)[None, :]
    out = d_state_ptr + (number * (W - 1) + place[:, None]) * channels + c[None, :]
    tl.store(out, d_state.to(d_state_ptr.dtype.element_ty), mask=(place < W - 1)[:, None] & held[None, :])


def short_conv_with_gradients(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    """As `short_conv_triton`, with gradients to x, the weight and the state."""
    return _ShortConv.apply(x, weight, state, cu_seqlens, silu)  # pyright: ignore[reportReturnType]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, state, cu_seqlens)
        ctx.silu = silu
        return short_conv_triton(x, weight, state, cu_seqlens, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state, cu_seqlens = ctx.saved_tensors
        _, of_weight, of_state, *_ = ctx.needs_input_grad
        rows, time, channels = x.shape
        taps = weight.shape[1]
        d = d if d.stride(-1) == 1 or channels == 1 else d.contiguous()
        block = min(_LINE // x.element_size(), power_of_two(channels))
        steps = min(_STEPS, power_of_two(time))
        blocks, parts = -(-time // steps), -(-channels // block)
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = d_state = None
        given = (x, weight, x if state is None else state, x if cu_seqlens is None else cu_seqlens, d)
        strides = (
            *x.stride()[:2], *((0, 0) if state is None else state.stride()[:2]), *weight.stride(), *d.stride()[:2],
        )  # fmt: skip
        constants = {"W": taps, "PACKED": cu_seqlens is not None, "SILU": ctx.silu, "BC": block}
        with torch.cuda.device(x.device.index if x.is_cuda else -1):
            if of_weight:
                sums = torch.empty(rows * blocks, channels, taps, dtype=torch.float32, device=x.device)
            launch: Any = _conv_back[(rows * blocks, parts)]
            launch(
                *given, d_x, d_x if sums is None else sums, time, channels, *packed(cu_seqlens), *strides, **constants,
                STATE=state is not None, WEIGHT=of_weight, BT=steps, num_warps=8,
            )  # fmt: skip
            if state is not None and of_state:
                d_state = torch.empty(state.shape, dtype=state.dtype, device=x.device)
                if taps > 1:
                    launch = _state_back[(len(state), parts)]
                    launch(
                        *given, d_state, time, channels, *strides, **constants, BT=power_of_two(taps - 1), num_warps=1
                    )
        return d_x, None if sums is None else sums.sum(0).to(weight.dtype), d_state, None, None
