"""One program a row, or a few narrow ones, for the norm; one a block for the activation."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels._triton import may_begin_early
from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid, take_turn

_BLOCK = 1024
_MANY = 4096
"""Programs that are enough for any GPU: rows share one only where there are more."""


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, gate_ptr, out_ptr, total_ptr, x_stride, residual_stride,
                     gate_stride, rows, width, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                     RESIDUAL: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr, SHARES: tl.constexpr,
                     READY: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """ROWS rows: their sum with the residual is rounded as it is kept, and then normed, and then gated.

    SHARES of x, all rows of each one behind the other, are added up first; 0 where x is whole.
    """
    at = tl.arange(0, BLOCK)[None, :]
    if READY:
        weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32) + offset
    take_turn(EARLY)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (row < rows) & (at < width)
    if not READY:
        weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32) + offset
    if RESIDUAL:
        held = tl.load(residual_ptr + row * residual_stride + at, mask=mask, other=0.0).to(tl.float32)
    x_ptr += row * x_stride + at
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    apart = tl.full((1, 1), rows, tl.int64) * x_stride
    for share in tl.static_range(1, SHARES):
        x += tl.load(x_ptr + share * apart, mask=mask, other=0.0).to(tl.float32)
    if GATE:
        gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        dtype = total_ptr.dtype.element_ty
        if SHARES == 0:
            # The library rounds what is added first, then the sum.
            x = x.to(dtype).to(tl.float32)
        total = (x + held).to(dtype)
        tl.store(total_ptr + row * width + at, total, mask=mask)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    x *= weight
    if GATE:
        opened = sigmoid(gate)
        x *= opened if SIGMOID else gate * opened
    tl.store(out_ptr + row * width + at, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, blocks, BLOCK: tl.constexpr,
                   EARLY: tl.constexpr):  # fmt: skip
    """A block of a row."""
    take_turn(EARLY)
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate * sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    gate: Tensor | None,
    sigmoid: bool,
    shares: bool = False,
    dtype: torch.dtype | None = None,
    ready: bool = False,
) -> tuple[Tensor, Tensor]:
    """Arguments as `rms_norm` has checked them; returns the output and the sum."""
    shape = x.shape[1:] if shares else x.shape
    rows, width = rows_of(x), shape[-1]
    number = shape.numel() // width
    held = rows if residual is None else rows_of(residual)
    gates = rows if gate is None else rows_of(gate)
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    total = x if residual is None else torch.empty(shape, dtype=residual.dtype, device=x.device)
    block = power_of_two(width)
    # Narrow rows, such as heads, several to a program; few rows, as in a step, one each.
    together = min(max(1, _BLOCK // block), max(1, power_of_two(number) // _MANY))
    # Shares are all on their way at once: fewer numbers of each to a thread.
    of_a_warp = 256 if shares else 512
    warps = max(1, min(32, together * block // of_a_warp))
    # Few programs cannot hide each other's waiting: all that one reads should be on its way at once. But to let more of
    # them share a processor, the compiler spares registers, and asks for some only once others have come, unless it is
    # told how many there are.
    registers = min(255, 65536 // (32 * warps)) if number <= _MANY else None
    early = may_begin_early(x.device)
    launch: Any = _rms_norm_kernel[(-(-number // together),)]
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        launch(
            rows, held, weight, gates, out, total, rows.stride(0), held.stride(0), gates.stride(0), number, width,
            eps, offset, ROWS=together, BLOCK=block, RESIDUAL=residual is not None, GATE=gate is not None,
            SIGMOID=sigmoid, SHARES=len(x) if shares else 0, READY=ready,
            EARLY=early, num_warps=warps, maxnreg=registers, launch_pdl=early,
        )  # fmt: skip
    return out, total


def swiglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Arguments as `swiglu` has checked them, apart."""
    gates, ups, width = rows_of(gate), rows_of(up), gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(_BLOCK, power_of_two(width))
    blocks, early = -(-width // block), may_begin_early(gate.device)
    launch: Any = _swiglu_kernel[(len(gates) * blocks,)]
    with torch.cuda.device(gate.device.index if gate.is_cuda else -1):
        launch(
            gates, ups, out, gates.stride(0), ups.stride(0), width, blocks, BLOCK=block, EARLY=early,
            num_warps=max(1, block // 256), launch_pdl=early,
        )  # fmt: skip
    return out


def rows_of(x: Tensor) -> Tensor:
    """`[rows, D]`: a view where the strides allow one."""
    return x.reshape(-1, x.shape[-1])
