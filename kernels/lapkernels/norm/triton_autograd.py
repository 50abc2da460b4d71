"""The norm and SwiGLU as differentiable calls: what is normed is kept, its length and the gate's slope made again."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid
from lapkernels.norm.triton_norm import rms_norm_triton, rows_of, swiglu_triton

_TILE = 1024
_AT_ONCE = 2**20
"""Numbers of what is normed that are under way at once: what programs of a Hopper hold in their registers, and few
enough that the weight's gradient by program is little beside x."""


@triton.jit
def _rms_norm_back(total_ptr, weight_ptr, gate_ptr, d_ptr, d_total_ptr, d_x_ptr, d_residual_ptr, d_gate_ptr,
                   d_weight_ptr, total_stride, gate_stride, d_stride, d_total_stride, rows, width, tiles, eps, offset,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, APART: tl.constexpr,
                   GATE: tl.constexpr, SIGMOID: tl.constexpr, WEIGHT: tl.constexpr):  # fmt: skip
    """Every so many tiles of ROWS rows: gradients of what was normed and of the gate, and a sum for the weight's.

    APART: whether the residual has another dtype than x, and so a gradient of its own.
    """
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32)[None, :] + offset
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(first, tiles, tl.num_programs(0)):
        row = (tl.zeros((ROWS, 1), tl.int64) + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (at < width)[None, :]
        unit = tl.load(total_ptr + row * total_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_ptr + row * d_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        over = tl.rsqrt(tl.sum(unit * unit, 1) / width + eps)[:, None]
        unit *= over
        own = row * width + at[None, :]
        if GATE:
            gate = tl.load(gate_ptr + row * gate_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
            opened = sigmoid(gate)
            # Not 1 - opened, of which nothing is left where the gate is wide open.
            closed = sigmoid(-gate)
            slope = opened * closed if SIGMOID else opened * (1.0 + gate * closed)
            d_gate = d * unit * weight * slope
            tl.store(d_gate_ptr + own, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
            d *= opened if SIGMOID else gate * opened
        if WEIGHT:
            sums += d * unit
        d *= weight
        d = over * (d - unit * (tl.sum(d * unit, 1) / width)[:, None])
        if RESIDUAL:
            d += tl.load(d_total_ptr + row * d_total_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + own, d.to(d_x_ptr.dtype.element_ty), mask=mask)
        if APART:
            tl.store(d_residual_ptr + own, d.to(d_residual_ptr.dtype.element_ty), mask=mask)
    if WEIGHT:
        tl.store(d_weight_ptr + first * width + at, tl.sum(sums, 0), mask=at < width)


@triton.jit
def _swiglu_back(gate_ptr, up_ptr, d_ptr, d_gate_ptr, d_up_ptr, gate_stride, up_stride, d_stride, width, blocks,
                 BLOCK: tl.constexpr):  # fmt: skip
    """A block of a row."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + row * d_stride + at, mask=mask, other=0.0).to(tl.float32)
    opened = sigmoid(gate)
    d_gate = d * up * opened * (1.0 + gate * (1.0 - opened))
    tl.store(d_gate_ptr + row * width + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + row * width + at, (d * gate * opened).to(d_up_ptr.dtype.element_ty), mask=mask)


def rms_norm_with_gradients(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    gate: Tensor | None,
    sigmoid: bool,
    shares: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """As `rms_norm_triton`, with gradients to x, the weight, the residual and the gate."""
    found: Any = _RMSNorm.apply(x, weight, residual, gate, eps, offset, sigmoid, shares, dtype)
    return (found, x) if residual is None else found


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        eps: float,
        offset: float,
        sigmoid: bool,
        shares: bool,
        dtype: torch.dtype | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, total = rms_norm_triton(x, weight, eps, residual, offset, gate, sigmoid, shares, dtype)
        ctx.save_for_backward(total, weight, gate)
        ctx.settings = (eps, offset, sigmoid)
        ctx.x = (x.dtype, x.shape)
        # x itself is no result of this function.
        return output if residual is None else (output, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor, d_total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, gate = ctx.saved_tensors
        eps, offset, sigmoid = ctx.settings
        dtype, shape = ctx.x
        _, of_weight, of_residual, of_gate, *_ = ctx.needs_input_grad
        width = total.shape[-1]
        totals, ds = rows_of(total), _dense_rows(d)
        number, block = len(totals), power_of_two(width)
        together = max(1, min(_TILE // block, power_of_two(number)))
        tiles = -(-number // together)
        programs = min(_AT_ONCE // (together * block), tiles)
        d_totals = ds if d_total is None else _dense_rows(d_total)
        gates = totals if gate is None else rows_of(gate)
        apart = d_total is not None and total.dtype != dtype
        d_x = torch.empty(total.shape, dtype=dtype, device=total.device)
        d_residual = torch.empty_like(d_x, dtype=total.dtype) if apart else d_x
        d_gate = d_x if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=total.device)
        sums = torch.empty(programs, width, dtype=torch.float32, device=total.device) if of_weight else None
        launch: Any = _rms_norm_back[(programs,)]
        with torch.cuda.device(total.device.index if total.is_cuda else -1):
            launch(
                totals, weight, gates, ds, d_totals, d_x, d_residual, d_gate, d_x if sums is None else sums,
                totals.stride(0), gates.stride(0), ds.stride(0), d_totals.stride(0), number, width, tiles, eps, offset,
                ROWS=together, BLOCK=block, RESIDUAL=d_total is not None, APART=apart, GATE=gate is not None,
                SIGMOID=sigmoid, WEIGHT=of_weight, num_warps=max(4, min(16, block // 512)),
            )  # fmt: skip
        return (
            # Shares of x, which were added up, have one gradient.
            d_x if total.shape == shape else d_x.expand(shape),
            None if sums is None else sums.sum(0).to(weight.dtype),
            d_residual if of_residual else None,
            d_gate if of_gate else None,
            *(None,) * 5,
        )


def swiglu_with_gradients(gate: Tensor, up: Tensor) -> Tensor:
    """As `swiglu_triton`, with gradients."""
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_triton(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gates, ups, ds, width = rows_of(gate), rows_of(up), _dense_rows(d), gate.shape[-1]
        d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        block = min(_TILE, power_of_two(width))
        blocks = -(-width // block)
        launch: Any = _swiglu_back[(len(gates) * blocks,)]
        with torch.cuda.device(gate.device.index if gate.is_cuda else -1):
            launch(
                gates, ups, ds, d_gate, d_up, gates.stride(0), ups.stride(0), ds.stride(0), width, blocks,
                BLOCK=block, num_warps=max(1, block // 256),
            )  # fmt: skip
        return d_gate, d_up


def _dense_rows(d: Tensor) -> Tensor:
    """`[rows, D]` of a gradient, which may be one number for all."""
    rows = rows_of(d)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
