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
def _short_conv_kernel(
    x_ptr, weight_ptr, state_ptr, out_ptr, time, channels, x_row, x_step, state_row, state_step, weight_channel,
    weight_tap,
    W: tl.constexpr, STATE: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = part * BC + tl.arange(0, BC)
    there = (t < time)[:, None] & (c < channels)[None, :]
    x_ptr += row * x_row
    state_ptr += row * state_row
    y = tl.zeros((BT, BC), tl.float32)
    for lag in tl.static_range(W):
        tap = tl.load(weight_ptr + c * weight_channel + (W - 1 - lag) * weight_tap, mask=c < channels, other=0.0)
        at = t - lag
        x = tl.load(x_ptr + at[:, None].to(tl.int64) * x_step + c[None, :], mask=there & (at >= 0)[:, None], other=0.0)
        x = x.to(tl.float32)
        if STATE and lag > 0:
            before = state_ptr + (at + (W - 1))[:, None] * state_step + c[None, :]
            x += tl.load(before, mask=there & (at < 0)[:, None], other=0.0).to(tl.float32)
        y += x * tap.to(tl.float32)[None, :]
    if SILU:
        y = y * sigmoid(y)
    out = out_ptr + (row * time + t[:, None]) * channels + c[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=there)


def short_conv_triton(x: Tensor, weight: Tensor, state: Tensor | None, silu: bool) -> Tensor:
    """Arguments as `short_conv` has checked them."""
    rows, time, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(_CHANNELS, power_of_two(channels))
    steps = min(_STEPS, power_of_two(time))
    launch: Any = _short_conv_kernel[(-(-time // steps), -(-channels // block), rows)]
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        launch(
            x, weight, x if state is None else state, out, time, channels, x.stride(0), x.stride(1),
            *((0, 0) if state is None else state.stride()[:2]), *weight.stride(),
            W=weight.shape[1], STATE=state is not None, SILU=silu, BT=steps, BC=block, num_warps=4,
        )  # fmt: skip
    return out
