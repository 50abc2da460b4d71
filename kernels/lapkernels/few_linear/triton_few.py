"""The product as one kernel in Triton: tall tiles through TMA, splits along D.

A program has some rows of W as the tall operand of tensor cores (they take 64 of them at a time, but as few as 8 rows
of x), all rows of x, and a share of D.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lapkernels._triton import may_begin_early
from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid, take_turn
from lapkernels.few_linear.configs import WARPS, FewConfig, choose


@triton.jit(do_not_specialize=["splits"])
def _few(x, w, bias_ptr, out_ptr, rows, outputs, width, splits, scale, R: tl.constexpr, BN: tl.constexpr,
         BK: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    take_turn(EARLY)
    part, n0 = tl.program_id(1), tl.program_id(0) * BN
    steps = tl.cdiv(width, BK)
    first, stop = part * steps // splits, (part + 1) * steps // splits
    sums = tl.zeros((BN, R), tl.float32)
    for step in tl.range(first, stop, num_stages=STAGES):
        sums = tl.dot(w.load([n0, step * BK]), tl.trans(x.load([0, step * BK])), sums)
    n, r = n0 + tl.arange(0, BN), tl.arange(0, R)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
        sums += tl.where(part == 0, bias, 0.0)[:, None]
    at = part * rows * outputs + r[None, :] * outputs + n[:, None]
    tl.store(
        out_ptr + at, (sums * scale).to(out_ptr.dtype.element_ty), mask=(n < outputs)[:, None] & (r < rows)[None, :]
    )


@triton.jit
def _few_swiglu(x, w, bias_ptr, out_ptr, rows, outputs, width, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                STAGES: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """BN rows of gate and the same BN of up."""
    take_turn(EARLY)
    n0 = tl.program_id(0) * BN
    gate = tl.zeros((BN, R), tl.float32)
    up = tl.zeros((BN, R), tl.float32)
    for step in tl.range(0, tl.cdiv(width, BK), num_stages=STAGES):
        # Behind the gate's last rows come the first of up, which nothing reads.
        xs = tl.trans(x.load([0, step * BK]))
        gate = tl.dot(w.load([n0, step * BK]), xs, gate)
        up = tl.dot(w.load([outputs + n0, step * BK]), xs, up)
    n, r = n0 + tl.arange(0, BN), tl.arange(0, R)
    if BIAS:
        gate += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    # Rounded as where they are written and read again.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    result = gate * sigmoid(gate) * up.to(dtype).to(tl.float32)
    mask = (n < outputs)[:, None] & (r < rows)[None, :]
    tl.store(out_ptr + r[None, :] * outputs + n[:, None], result.to(dtype), mask=mask)


def few_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, apart: bool, config: FewConfig | None = None
) -> Tensor:
    """Arguments as `few_linear` has checked them."""
    (rows, width), outputs = x.shape, len(weight)
    config = choose("triton", outputs, width, apart) if config is None else config
    result = empty_result(x, outputs, config, apart)
    if not result.numel():
        return result
    together, early = rows_in_registers(rows), may_begin_early(x.device)
    kernel: Any = _few
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        kernel[(triton.cdiv(outputs, config.outputs), config.splits)](
            TensorDescriptor(x, [rows, width], [x.stride(0), 1], [together, config.depth]),
            TensorDescriptor(weight, [outputs, width], [weight.stride(0), 1], [config.outputs, config.depth]),
            bias, result, rows, outputs, width, config.splits, scale, R=together, BN=config.outputs, BK=config.depth,
            STAGES=config.stages(together), BIAS=bias is not None, EARLY=early, num_warps=WARPS, launch_pdl=early,
        )  # fmt: skip
    return result


def few_swiglu_triton(x: Tensor, weight: Tensor, bias: Tensor | None, config: FewConfig | None = None) -> Tensor:
    """Arguments as `few_swiglu` has checked them."""
    (rows, width), both = x.shape, len(weight)
    config = choose("triton", both, width, gated=True) if config is None else config
    result, half = empty_result(x, both // 2, config), config.outputs // 2
    if not result.numel():
        return result
    together, early = rows_in_registers(rows), may_begin_early(x.device)
    kernel: Any = _few_swiglu
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        kernel[(triton.cdiv(both // 2, half),)](
            TensorDescriptor(x, [rows, width], [x.stride(0), 1], [together, config.depth]),
            TensorDescriptor(weight, [both, width], [weight.stride(0), 1], [half, config.depth]),
            bias, result, rows, both // 2, width, R=together, BN=half, BK=config.depth, STAGES=config.stages(together),
            BIAS=bias is not None, EARLY=early, num_warps=WARPS, launch_pdl=early,
        )  # fmt: skip
    return result


def rows_in_registers(rows: int) -> int:
    """A power of two that tensor cores take."""
    return max(16, power_of_two(rows))


def empty_result(x: Tensor, outputs: int, config: FewConfig, apart: bool = False) -> Tensor:
    """What the kernels write."""
    if apart:
        return torch.empty(config.splits, len(x), outputs, dtype=torch.float32, device=x.device)
    return torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
