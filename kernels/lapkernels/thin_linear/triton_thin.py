"""The layer as one kernel for a few rows: a program takes some rows of the matrix, and all of the rows of the input."""

# pyright: reportGeneralTypeIssues=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels._triton import may_begin_early
from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import take_turn


class ThinConfig(NamedTuple):
    """How a thin layer is cut into programs.

    Attributes:
        outputs: rows of the matrix that a program takes.
        products: that a program holds at a time, over all rows of the input.
        warps: of a program.
        ahead: whether a program that goes along D in pieces asks for the next piece before it uses the last one.
    """

    outputs: int
    products: int
    warps: int
    ahead: bool = True


def choose_thin(rows: int, width: int) -> ThinConfig:
    """The configuration for a layer: whole rows of the matrix at once where they fit.

    Args:
        rows: of the input.
        width: D.
    """
    if rows == 1 and width <= 2048:
        return ThinConfig(4, 8192, 4)
    return ThinConfig(4, 4096, 2) if rows == 1 and width <= 4096 else ThinConfig(8, 8192, 8)


@triton.jit
def _thin(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, output_ptr,
    x_row, weight_row, residual_row, rows, outputs, eps, offset, scale,
    D: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, READY: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b, d = tl.arange(0, BB), tl.arange(0, BD)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    row_mask, weight_rows = (n < outputs)[:, None], weight_ptr + n[:, None] * weight_row
    if not READY:
        take_turn(EARLY)
    # The matrix first: it is long on its way, and most of it is what the layer takes.
    weight = tl.load(weight_rows + d[None, :], mask=row_mask & (d < D)[None, :], other=0.0,
                     eviction_policy="evict_first")  # fmt: skip
    # What is needed last is asked for here too: behind the sums each program would wait for it once more.
    WHOLE: tl.constexpr = BD >= D
    if NORM and WHOLE:
        gain = tl.load(norm_ptr + d, mask=d < D, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    if READY:
        take_turn(EARLY)
    x_rows = x_ptr + b[:, None] * x_row
    ASK: tl.constexpr = AHEAD and BD < D
    there = (b < rows)[:, None] & (d < D)[None, :]
    raw = tl.load(x_rows + d[None, :], mask=there, other=0.0)  # [BB, BD]
    up = raw
    if GATED:
        up = tl.load(x_rows + D + d[None, :], mask=there, other=0.0)
    written = (b < rows)[:, None] & (n < outputs)[None, :]
    if RESIDUAL:
        residual = tl.load(residual_ptr + b[:, None] * residual_row + n[None, :], mask=written, other=0.0)
    unit = tl.zeros((BB,), tl.float32) + 1.0
    if NORM:
        squares = tl.zeros((BB, BD), tl.float32)
        if WHOLE:
            squares = raw.to(tl.float32) * raw.to(tl.float32)
        else:
            for start in range(0, D, BD):
                there = (b < rows)[:, None] & (start + d < D)[None, :]
                x = tl.load(x_rows + (start + d)[None, :], mask=there, other=0.0).to(tl.float32)
                squares += x * x
        unit = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)
    sums = tl.zeros((BB, BN, BD), tl.float32)
    for start in range(0, D, BD):
        at = start + d
        following, following_raw, following_up = weight, raw, up
        if ASK:
            ahead = at + BD
            following = tl.load(weight_rows + ahead[None, :], mask=row_mask & (ahead < D)[None, :], other=0.0,
                                eviction_policy="evict_first")  # fmt: skip
            there = (b < rows)[:, None] & (ahead < D)[None, :]
            following_raw = tl.load(x_rows + ahead[None, :], mask=there, other=0.0)
            if GATED:
                following_up = tl.load(x_rows + D + ahead[None, :], mask=there, other=0.0)
        elif start > 0:
            weight = tl.load(weight_rows + at[None, :], mask=row_mask & (at < D)[None, :], other=0.0,
                             eviction_policy="evict_first")  # fmt: skip
            there = (b < rows)[:, None] & (at < D)[None, :]
            raw = tl.load(x_rows + at[None, :], mask=there, other=0.0)
            if GATED:
                up = tl.load(x_rows + D + at[None, :], mask=there, other=0.0)
        x = raw.to(tl.float32)
        if GATED:
            x = x / (1.0 + tl.exp(-x)) * up.to(tl.float32)
        if NORM:
            if not WHOLE:
                gain = tl.load(norm_ptr + at, mask=at < D, other=0.0)
            by = gain.to(tl.float32) + offset
            x = x * unit[:, None] * by[None, :]
        x = x.to(weight.dtype).to(tl.float32)
        sums += weight.to(tl.float32)[None, :, :] * x[:, None, :]
        if ASK:
            weight, raw, up = following, following_raw, following_up
    y = tl.sum(sums, axis=2)  # [BB, BN]
    if BIAS:
        y += bias[None, :]
    y = y * scale
    if RESIDUAL:
        y += residual.to(tl.float32)
    tl.store(output_ptr + b[:, None] * outputs + n[None, :], y.to(output_ptr.dtype.element_ty), mask=written)


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
    ready: bool = False,
    config: ThinConfig | None = None,
) -> Tensor:
    """Arguments as `thin_linear` has checked them."""
    (rows, _), (outputs, width) = x.shape, weight.shape
    output = torch.empty(rows, outputs, dtype=weight.dtype if residual is None else residual.dtype, device=x.device)
    if not rows:
        return output
    config = choose_thin(rows, width) if config is None else config
    together = power_of_two(rows)
    early = may_begin_early(x.device)
    thin: Any = _thin
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        thin[(triton.cdiv(outputs, config.outputs),)](
            x, weight, bias, norm, residual, output,
            x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), rows, outputs,
            eps, offset, scale,
            D=width, BB=together, BN=config.outputs,
            BD=min(max(16, config.products // (config.outputs * together)), power_of_two(width)),
            NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None, READY=ready,
            AHEAD=config.ahead, EARLY=early, num_warps=config.warps, launch_pdl=early,
        )  # fmt: skip
    return output
