"""Products of few rows in Triton: tall tiles through TMA, splits along D, the matrix asked for before its turn.

`y = x W^T` with W `[N, D]`. A program has some rows of W as the tall operand of tensor cores (they take 64 of them at
a time, but as few as 8 rows of x), all rows of x, and a share of D. Shares are summed by the program that is the last
to come, always in the same order; or by a kernel of their own; or by whoever reads them.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks._few_rows import Call
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from lapkernels._triton import may_begin_early
from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import sigmoid, take_turn

WHOLE, LAST, SHARES = 0, 1, 2
"""What a program writes: the result; its share, and the last of a tile the result too; its share alone."""


@triton.jit
def ask_for(w_ptr, n0, outputs, width, start, stop, N: tl.constexpr, THREADS: tl.constexpr):
    """Bring columns start .. stop of N rows of W, from row n0 on, into L2; each thread asks for a piece of a row."""
    PIECES: tl.constexpr = max(1, THREADS // N)
    lane = tl.arange(0, N * PIECES)
    row, piece = n0 + lane // PIECES, lane % PIECES
    columns = (stop - start) // PIECES // 8 * 8
    begin = start + piece * columns
    number = tl.where(piece == PIECES - 1, stop - begin, columns) // 8 * 8
    number = tl.where(row < outputs, tl.maximum(number, 0), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [w_ptr + row.to(tl.int64) * width + begin, number * 2], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _tall(x, w, w_ptr, out_ptr, shares_ptr, counter_ptr, rows, outputs, width, splits,
          R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WRITES: tl.constexpr,
          ASK: tl.constexpr, EARLY: tl.constexpr, HASTE: tl.constexpr, THREADS: tl.constexpr):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    steps = tl.cdiv(width, BK)
    first, stop, n0 = part * steps // splits, (part + 1) * steps // splits, tile * BN
    if EARLY:
        if HASTE:
            gdc_launch_dependents()
        if ASK > 0:
            begin = first * BK
            ask_for(
                w_ptr, n0, outputs, width, begin, tl.minimum(tl.minimum(stop * BK, width), begin + ASK), BN, THREADS
            )
        gdc_wait()
        if not HASTE:
            gdc_launch_dependents()
    sums = tl.zeros((BN, R), tl.float32)
    for step in tl.range(first, stop, num_stages=STAGES):
        sums = tl.dot(w.load([n0, step * BK]), tl.trans(x.load([0, step * BK])), sums)
    n, r = n0 + tl.arange(0, BN), tl.arange(0, R)
    there = (n < outputs)[:, None] & (r < rows)[None, :]
    at = r[None, :] * outputs + n[:, None]
    if WRITES != 0:
        tl.store(shares_ptr + part * rows * outputs + at, sums, mask=there)
    if WRITES == 1:
        # All of this program's numbers are written before its arrival counts.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter_ptr + tile, 0)
            sums = tl.zeros((BN, R), tl.float32)
            for share in range(splits):
                sums += tl.load(shares_ptr + share * rows * outputs + at, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=there)
    elif WRITES == 0:
        tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _sum(shares_ptr, out_ptr, numbers, splits, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    take_turn(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < numbers
    sums = tl.zeros((BLOCK,), tl.float32)
    for share in range(splits):
        sums += tl.load(shares_ptr + share * numbers + at, mask=there, other=0.0)
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _norm(shares_ptr, stream_ptr, weight_ptr, out_ptr, rows, splits, eps, D: tl.constexpr, EARLY: tl.constexpr):
    """A row of the stream and what shares add to it, written in place, and normed."""
    d, row = tl.arange(0, D), tl.program_id(0)
    weight = tl.load(weight_ptr + d).to(tl.float32)
    take_turn(EARLY)
    sums = tl.zeros((D,), tl.float32)
    for share in range(splits):
        sums += tl.load(shares_ptr + (share * rows + row) * D + d)
    total = (tl.load(stream_ptr + row * D + d).to(tl.float32) + sums).to(stream_ptr.dtype.element_ty)
    tl.store(stream_ptr + row * D + d, total)
    x = total.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight
    tl.store(out_ptr + row * D + d, x.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate(x_ptr, out_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    take_turn(EARLY)
    row, at = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate * sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=at < width)


def tall(call: Call, x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T`; shares `[splits, B, N]`, fp32, where the plan leaves them.

    Args:
        call: the plan for this shape, and where its programs meet.
        x: `[B, D]`, rows a multiple of 16 bytes apart.
        weight: `[N, D]`, contiguous.
    """
    plan, rows, (outputs, width) = call.plan, len(x), weight.shape
    writes, result, shares = results(call, x, outputs)
    early, together = may_begin_early(x.device), call.rows
    kernel: Any = _tall
    kernel[(-(-outputs // plan.columns), call.splits)](
        TensorDescriptor(x, [rows, width], [x.stride(0), 1], [together, plan.depth]),
        TensorDescriptor.from_tensor(weight, [plan.columns, plan.depth]),
        weight, result, shares, call.counters, rows, outputs, width, call.splits,
        R=together, BN=plan.columns, BK=plan.depth, STAGES=plan.stages(together), WRITES=writes, ASK=plan.ask,
        EARLY=early, HASTE=plan.haste, THREADS=32 * plan.warps, num_warps=plan.warps, launch_pdl=early,
    )  # fmt: skip
    return finished(call, result, shares)


def results(call: Call, x: Tensor, outputs: int) -> tuple[int, Tensor, Tensor]:
    """What programs write, the result, and the shares; the one that is not written is the other."""
    result = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    if call.splits == 1 and call.plan.sums != "reader":
        return WHOLE, result, result
    numbers = call.splits * len(x) * outputs
    shares = call.scratch[:numbers].view(call.splits, len(x), outputs)
    return (LAST if call.plan.sums == "last" else SHARES), result, shares


def finished(call: Call, result: Tensor, shares: Tensor) -> Tensor:
    """The result, or the shares where they are left."""
    if call.plan.sums == "reader":
        return shares
    return add_shares(shares, result.dtype) if call.plan.sums == "kernel" and call.splits > 1 else result


def add_shares(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of `[splits, B, N]` over the first axis."""
    result = torch.empty(shares.shape[1:], dtype=dtype, device=shares.device)
    early = may_begin_early(shares.device)
    launch: Any = _sum[(-(-result.numel() // 1024),)]
    launch(shares, result, result.numel(), len(shares), BLOCK=1024, EARLY=early, launch_pdl=early)
    return result


def norm_shares(shares: Tensor, stream: Tensor, weight: Tensor) -> Tensor:
    """Add shares `[splits, B, D]` to the stream `[B, D]`, in place; its norm."""
    (splits, rows, width), out = shares.shape, torch.empty_like(stream)
    early = may_begin_early(stream.device)
    launch: Any = _norm[(rows,)]
    launch(shares, stream, weight, out, rows, splits, 1e-6, D=width, EARLY=early, num_warps=8, launch_pdl=early)
    return out


def gated(x: Tensor) -> Tensor:
    """SwiGLU of `[B, 2 F]`."""
    rows, width = len(x), x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    early = may_begin_early(x.device)
    block = min(1024, power_of_two(width))
    launch: Any = _gate[(-(-width // block), rows)]
    launch(x, out, width, BLOCK=block, EARLY=early, launch_pdl=early)
    return out
