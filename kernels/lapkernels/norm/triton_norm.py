"""One program a row for the norm, one a block for the activation."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid

_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, x_stride, residual_stride, width, eps, offset,
                     BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """A row: its sum with the residual is rounded as it is kept, and then normed."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        dtype = total_ptr.dtype.element_ty
        # The library rounds what is added first, then the sum.
        x = x.to(dtype).to(tl.float32)
        x += tl.load(residual_ptr + row * residual_stride + at, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + row * width + at, total, mask=mask)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / width + eps)
    x *= tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(out_ptr + row * width + at, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, x_stride, width, blocks, BLOCK: tl.constexpr):
    """A block of a row."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate * sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `rms_norm` has checked them; returns the output and the sum."""
    rows, width = _rows(x), x.shape[-1]
    held = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    block = power_of_two(width)
    launch: Any = _rms_norm_kernel[(len(rows),)]
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        launch(
            rows, held, weight, out, total, rows.stride(0), held.stride(0), width, eps, offset, BLOCK=block,
            RESIDUAL=residual is not None, num_warps=max(1, min(32, block // 512)),
        )  # fmt: skip
    return out, total


def swiglu_triton(x: Tensor) -> Tensor:
    """Arguments as `swiglu` has checked them."""
    rows, width = _rows(x), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, power_of_two(width))
    blocks = -(-width // block)
    launch: Any = _swiglu_kernel[(len(rows) * blocks,)]
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        launch(rows, out, rows.stride(0), width, blocks, BLOCK=block, num_warps=max(1, block // 256))
    return out


def _rows(x: Tensor) -> Tensor:
    """`[rows, D]`: a view where the strides allow one."""
    return x.reshape(-1, x.shape[-1])
