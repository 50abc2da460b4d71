"""The product in Gluon: as in Triton, but a program's first steps of W are under way before its turn.

The ring of steps in shared memory is written out: W's part of each is asked for as soon as the program begins, x's
once the kernel before has ended. Gluon is triton's language below its tensors, and not stable between versions.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lapkernels._triton import may_begin_early
from lapkernels.few_linear.configs import WARPS, FewConfig, choose
from lapkernels.few_linear.triton_few import empty_result, rows_in_registers

# Its name has changed.
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _signal(ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["splits"])
def _few(x, w, bias_ptr, out_ptr, rows, outputs, width, splits, scale, STAGES: gl.constexpr, APART: gl.constexpr,
         BIAS: gl.constexpr, READY: gl.constexpr, EARLY: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    BN: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = w.block_type.shape[1]
    R: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = 2 * BK * (BN + R)
    # As results lie in tensor cores' registers.
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
    if EARLY and not READY:
        _signal("griddepcontrol.wait; // $0")
    part, n0 = gl.program_id(1), gl.program_id(0) * BN
    steps = (width + BK - 1) // BK
    first = part * steps // splits
    count = (part + 1) * steps // splits - first

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
        # In this order no more than two kernels that follow one another run at once, see `take_turn`.
        if READY:
            _signal("griddepcontrol.wait; // $0")
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

    if BIAS:
        n = n0 + gl.arange(0, BN, gl.SliceLayout(1, ACCUMULATOR))
        bias = gl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(gl.float32)
        sums += gl.where(part == 0, bias, 0.0)[:, None]
    sums = sums * scale
    if APART:
        # Eight threads write neighbouring outputs: whole sectors.
        _store(out_ptr + part * rows * outputs, sums, n0, rows, outputs, ACCUMULATOR)
    else:
        # Neighbouring threads write longer pieces.
        PIECES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
        result = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), PIECES)
        _store(out_ptr, result, n0, rows, outputs, PIECES)


@gluon.jit
def _store(out_ptr, tile, n0, rows, outputs, LAYOUT: gl.constexpr):
    """Write a tile `[outputs, rows]` into `[B, N]`."""
    n = n0 + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (n < outputs)[:, None] & (r < rows)[None, :]
    gl.store(out_ptr + r[None, :] * outputs + n[:, None], tile, mask=inside)


@cache
def _layout(rows: int, depth: int) -> Any:
    """Of a step's operand in shared memory, as TMA writes and tensor cores read it: the same for all 16 bits."""
    return gl.NVMMASharedLayout.get_default_for([rows, depth], gl.bfloat16)


def few_linear_gluon(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    apart: bool,
    ready: bool = False,
    config: FewConfig | None = None,
) -> Tensor:
    """Arguments as `few_linear` has checked them."""
    (rows, width), outputs = x.shape, len(weight)
    config = choose("gluon", outputs, width, apart) if config is None else config
    result = empty_result(x, outputs, config, apart)
    if not result.numel():
        return result
    together, early = rows_in_registers(rows), may_begin_early(x.device)
    blocks = [together, config.depth], [config.outputs, config.depth]
    kernel: Any = _few
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        kernel[(triton.cdiv(outputs, config.outputs), config.splits)](
            TensorDescriptor(x, [rows, width], [x.stride(0), 1], blocks[0], _layout(*blocks[0])),
            TensorDescriptor(weight, [outputs, width], [weight.stride(0), 1], blocks[1], _layout(*blocks[1])),
            bias, result, rows, outputs, width, config.splits, scale, STAGES=config.stages(together), APART=apart,
            BIAS=bias is not None, READY=ready, EARLY=early, WARPS=WARPS, num_warps=WARPS, launch_pdl=early,
        )  # fmt: skip
    return result
