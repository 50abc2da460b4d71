"""Products of few rows in Gluon: as `_few_rows_triton`, but a program's first steps of W are under way before its turn.

The ring of steps in shared memory is written out: W's part of each is asked for as soon as the program begins, x's
once the kernel before has ended. Gluon is triton's language below its tensors, and not stable between versions.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

from functools import cache
from typing import Any

import triton
from benchmarks._few_rows import Call
from benchmarks._few_rows_triton import finished, results
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lapkernels._triton import may_begin_early

# Its name has changed.
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _signal(ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _ask_for(w_ptr, n0, outputs, width, start, stop, N: gl.constexpr, WARPS: gl.constexpr):
    """Bring columns start .. stop of N rows of W, from row n0 on, into L2; each thread asks for a piece of a row."""
    PIECES: gl.constexpr = max(1, 32 * WARPS // N)
    lane = gl.arange(0, N * PIECES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    row, piece = n0 + lane // PIECES, lane % PIECES
    columns = gl.maximum(stop - start, 0) // PIECES // 8 * 8
    begin = start + piece * columns
    number = gl.where(piece == PIECES - 1, stop - begin, columns) // 8 * 8
    number = gl.where(row < outputs, gl.maximum(number, 0), 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [w_ptr + row.to(gl.int64) * width + begin, number * 2], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _outputs_of(n0, outputs, rows, N: gl.constexpr, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the numbers of a tile lie in `[B, N]`, and which there are."""
    n = n0 + gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
    return r[None, :] * outputs + n[:, None], (n < outputs)[:, None] & (r < rows)[None, :]


@gluon.jit(do_not_specialize=["splits"])
def _pumped(x, w, w_ptr, out_ptr, shares_ptr, counter_ptr, rows, outputs, width, splits,
            STAGES: gl.constexpr, WRITES: gl.constexpr, ASK: gl.constexpr, EARLY: gl.constexpr,
            HASTE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    BN: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = w.block_type.shape[1]
    R: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = 2 * BK * (BN + R)
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
    if EARLY and HASTE:
        _signal("griddepcontrol.launch_dependents; // $0")
    tile, part = gl.program_id(0), gl.program_id(1)
    steps = (width + BK - 1) // BK
    first = part * steps // splits
    count, n0 = (part + 1) * steps // splits - first, tile * BN

    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, R, BK], x.layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        some = stage < count
        mbarrier.expect(there.index(stage), BYTES, pred=some)
        tma.async_copy_global_to_shared(
            w, [n0, (first + stage) * BK], there.index(stage), w_ring.index(stage), pred=some
        )
    if EARLY:
        if ASK > 0:
            begin = (first + STAGES) * BK
            stop = gl.minimum(gl.minimum((first + count) * BK, width), begin + ASK)
            _ask_for(w_ptr, n0, outputs, width, begin, stop, BN, WARPS)
        _signal("griddepcontrol.wait; // $0")
        if not HASTE:
            _signal("griddepcontrol.launch_dependents; // $0")
    for stage in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [0, (first + stage) * BK], there.index(stage), x_ring.index(stage), pred=stage < count
        )

    sums = gl.zeros([BN, R], gl.float32, ACCUMULATOR)
    for step in range(count):
        slot = step % STAGES
        mbarrier.wait(there.index(slot), step // STAGES & 1)
        sums = warpgroup_mma(w_ring.index(slot), x_ring.index(slot).permute((1, 0)), sums, is_async=True)
        # The product before this one has ended in all warps: what it read may be written over.
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        _meet()
        ahead = step + STAGES - 1
        more, free = (step > 0) & (ahead < count), ahead % STAGES
        mbarrier.expect(there.index(free), BYTES, pred=more)
        tma.async_copy_global_to_shared(w, [n0, (first + ahead) * BK], there.index(free), w_ring.index(free), pred=more)
        tma.async_copy_global_to_shared(x, [0, (first + ahead) * BK], there.index(free), x_ring.index(free), pred=more)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))

    # As it lies in tensor cores' registers, eight threads write neighbouring outputs: whole sectors of shares.
    # The result is written, and shares are read, by neighbouring threads in longer pieces.
    PIECES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    if WRITES != 0:
        at, inside = _outputs_of(n0, outputs, rows, BN, R, ACCUMULATOR)
        gl.store(shares_ptr + part * rows * outputs + at, sums, mask=inside)
    if WRITES == 0:
        result = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), PIECES)
        at, inside = _outputs_of(n0, outputs, rows, BN, R, PIECES)
        gl.store(out_ptr + at, result, mask=inside)
    if WRITES == 1:
        # All of this program's numbers are written before its arrival counts.
        _meet()
        if gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            gl.store(counter_ptr + tile, 0)
            places, held = _outputs_of(n0, outputs, rows, BN, R, PIECES)
            total = gl.zeros([BN, R], gl.float32, PIECES)
            for share in range(splits):
                total += gl.load(
                    shares_ptr + share * rows * outputs + places, mask=held, other=0.0, cache_modifier=".cg"
                )
            gl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=held)


@cache
def _layout(rows: int, depth: int) -> Any:
    """Of a step's operand in shared memory, as TMA writes and tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for([rows, depth], gl.bfloat16)


def pumped(call: Call, x: Tensor, weight: Tensor) -> Tensor:
    """As `_few_rows_triton.tall`, bf16 alone."""
    plan, rows, (outputs, width) = call.plan, len(x), weight.shape
    writes, result, shares = results(call, x, outputs)
    early, together = may_begin_early(x.device), call.rows
    kernel: Any = _pumped
    kernel[(triton.cdiv(outputs, plan.columns), call.splits)](
        TensorDescriptor(x, [rows, width], [x.stride(0), 1], [together, plan.depth], _layout(together, plan.depth)),
        TensorDescriptor.from_tensor(weight, [plan.columns, plan.depth], _layout(plan.columns, plan.depth)),
        weight, result, shares, call.counters, rows, outputs, width, call.splits,
        STAGES=plan.stages(together), WRITES=writes, ASK=plan.ask, EARLY=early, HASTE=plan.haste, WARPS=plan.warps,
        num_warps=plan.warps, launch_pdl=early,
    )  # fmt: skip
    return finished(call, result, shares)
