"""A program takes some steps of some channels; inputs that several taps meet come from the first cache."""

# pyright: reportGeneralTypeIssues=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid

_STEPS, _CHANNELS = 32, 128


@triton.jit
def sequence_of(t, row, time, bounds_ptr, sequences, depth, PACKED: tl.constexpr):
    """The sequence that each token t is of, its first token, and the one behind its last, each [BT].

    `depth` halvings find one of `sequences` packed ones; a row that is not packed is one.
    """
    number = tl.zeros_like(t).to(tl.int64) + row
    first = tl.zeros_like(t)
    stop = first + time
    if PACKED:
        number, high = tl.zeros_like(t), tl.zeros_like(t) + (sequences - 1)
        for _ in range(depth):
            middle = (number + high + 1) // 2
            begun = tl.load(bounds_ptr + middle) <= t
            number, high = tl.where(begun, middle, number), tl.where(begun, high, middle - 1)
        # Boundaries that do not rise from 0 to T may give wrong results, and reach for nothing outside of x.
        first = tl.minimum(tl.maximum(tl.load(bounds_ptr + number).to(tl.int32), 0), t)
        stop = tl.minimum(tl.load(bounds_ptr + number + 1).to(tl.int32), stop)
        number = number.to(tl.int64)
    return number, first, stop


@triton.jit
def input_of(x_ptr, state_ptr, at, number, first, c, there, x_step, state_row, state_step, W: tl.constexpr,
             STATE: tl.constexpr):  # fmt: skip
    """The inputs of tokens `at` [BT] in fp32, [BT, BC]: the row's, or what the state holds of those before `first`."""
    x = tl.load(x_ptr + at[:, None].to(tl.int64) * x_step + c[None, :], mask=there & (at >= first)[:, None], other=0.0)
    x = x.to(tl.float32)
    if STATE:
        before = state_ptr + (number * state_row + (at - first + (W - 1)) * state_step)[:, None] + c[None, :]
        x += tl.load(before, mask=there & (at < first)[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def filtered(x_ptr, state_ptr, weight_ptr, t, number, first, c, there, channels, x_step, state_row, state_step,
             weight_channel, weight_tap, W: tl.constexpr, STATE: tl.constexpr):  # fmt: skip
    """The sums over the taps for tokens t [BT], [BT, BC]; what is not `there` gets zeros."""
    y = tl.zeros(there.shape, tl.float32)
    for lag in tl.static_range(W):
        tap = tl.load(weight_ptr + c * weight_channel + (W - 1 - lag) * weight_tap, mask=c < channels, other=0.0)
        x = input_of(x_ptr, state_ptr, t - lag, number, first, c, there, x_step, state_row, state_step, W,
                     STATE and lag > 0)  # fmt: skip
        y += x * tap.to(tl.float32)[None, :]
    return y


@triton.jit
def _short_conv_kernel(
    x_ptr, weight_ptr, state_ptr, bounds_ptr, out_ptr, time, channels, sequences, depth, x_row, x_step, state_row,
    state_step, weight_channel, weight_tap,
    W: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # Rows and blocks share the first axis of the grid: the others end at 65535.
    blocks = (time + BT - 1) // BT
    row = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = (t < time)[:, None] & (c < channels)[None, :]
    number, first, _ = sequence_of(t, row, time, bounds_ptr, sequences, depth, PACKED)
    y = filtered(x_ptr + row * x_row, state_ptr, weight_ptr, t, number, first, c, there, channels, x_step, state_row,
                 state_step, weight_channel, weight_tap, W, STATE)  # fmt: skip
    if SILU:
        y = y * sigmoid(y)
    out = out_ptr + (row * time + t[:, None]) * channels + c[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=there)


def short_conv_triton(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool) -> Tensor:
    """Arguments as `short_conv` has checked them."""
    rows, time, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(_CHANNELS, power_of_two(channels))
    steps = min(_STEPS, power_of_two(time))
    launch: Any = _short_conv_kernel[(rows * -(-time // steps), -(-channels // block))]
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        launch(
            x, weight, x if state is None else state, x if cu_seqlens is None else cu_seqlens, out, time, channels,
            *packed(cu_seqlens), *x.stride()[:2], *((0, 0) if state is None else state.stride()[:2]), *weight.stride(),
            W=weight.shape[1], STATE=state is not None, PACKED=cu_seqlens is not None, SILU=silu, BT=steps, BC=block,
            num_warps=4,
        )  # fmt: skip
    return out


def packed(cu_seqlens: Tensor | None) -> tuple[int, int]:
    """How many sequences are packed, and how many halvings find one of them."""
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    return sequences, (sequences - 1).bit_length()
