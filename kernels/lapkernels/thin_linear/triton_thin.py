"""The layer as one kernel: a program takes some rows of the matrix, and all of the few rows of the input."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels.decoding.configs import power_of_two

_OUTPUTS = 8
"""Rows of the matrix that a program takes."""
_PRODUCTS = 8192
"""That a program holds at a time: 64 sums for each of 128 threads."""


@triton.jit
def _thin(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, output_ptr,
    x_row, weight_row, residual_row, rows, outputs, eps, offset, scale,
    D: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    b, d = tl.arange(0, BB), tl.arange(0, BD)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    x_rows = x_ptr + b[:, None] * x_row
    unit = tl.zeros((BB,), tl.float32) + 1.0
    if NORM:
        squares = tl.zeros((BB, BD), tl.float32)
        for start in range(0, D, BD):
            there = (b < rows)[:, None] & (start + d < D)[None, :]
            x = tl.load(x_rows + (start + d)[None, :], mask=there, other=0.0).to(tl.float32)
            squares += x * x
        unit = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)
    sums = tl.zeros((BB, BN, BD), tl.float32)
    for start in range(0, D, BD):
        at = start + d
        there = (b < rows)[:, None] & (at < D)[None, :]
        weight = tl.load(
            weight_ptr + n[:, None] * weight_row + at[None, :],
            mask=(n < outputs)[:, None] & (at < D)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )  # [BN, BD]
        x = tl.load(x_rows + at[None, :], mask=there, other=0.0).to(tl.float32)  # [BB, BD]
        if GATED:
            up = tl.load(x_rows + D + at[None, :], mask=there, other=0.0).to(tl.float32)
            x = x / (1.0 + tl.exp(-x)) * up
        if NORM:
            by = tl.load(norm_ptr + at, mask=at < D, other=0.0).to(tl.float32) + offset
            x = x * unit[:, None] * by[None, :]
        x = x.to(weight.dtype).to(tl.float32)
        sums += weight.to(tl.float32)[None, :, :] * x[:, None, :]
    y = tl.sum(sums, axis=2)  # [BB, BN]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    y = y * scale
    there = (b < rows)[:, None] & (n < outputs)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + b[:, None] * residual_row + n[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(output_ptr + b[:, None] * outputs + n[None, :], y.to(output_ptr.dtype.element_ty), mask=there)


def thin_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    offset: float,
    gated: bool,
    residual: Tensor | None,
    scale: float,
) -> Tensor:
    """Arguments as `thin_linear` has checked them."""
    (rows, _), (outputs, width) = x.shape, weight.shape
    output = torch.empty(rows, outputs, dtype=weight.dtype if residual is None else residual.dtype, device=x.device)
    if not rows:
        return output
    together = power_of_two(rows)
    thin: Any = _thin
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        thin[(triton.cdiv(outputs, _OUTPUTS),)](
            x, weight, bias, norm, residual, output,
            x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), rows, outputs,
            eps, offset, scale,
            D=width, BB=together, BN=_OUTPUTS,
            BD=min(_PRODUCTS // (_OUTPUTS * together), power_of_two(width)),
            NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None, num_warps=4,
        )  # fmt: skip
    return output
