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
         GATED: gl.constexpr, BIAS: gl.constexpr, READY: gl.constexpr, EARLY: gl.constexpr,
         WARPS: gl.constexpr):  # fmt: skip
    """W is `[outputs, width]`; with GATED `[2, outputs, width]`, of which a program has the same rows of both."""
    R: gl.constexpr = x.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    OUTPUTS: gl.constexpr = w.block_type.shape[1] if GATED else w.block_type.shape[0]
    BN: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    BYTES: gl.constexpr = 2 * BK * (BN + R)
    # As results lie in tensor cores' registers.
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
    if EARLY and not READY:
        _signal("griddepcontrol.wait; // $0")
    part, n0 = gl.program_id(1), gl.program_id(0) * OUTPUTS
    steps = (width + BK - 1) // BK
    first = part * steps // splits
    count = (part + 1) * steps // splits - first

    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, 2, OUTPUTS, BK] if GATED else [STAGES, BN, BK], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, R, BK], x.layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        some = stage < count
        mbarrier.expect(there.index(stage), BYTES, pred=some)
        _ask(w, n0, (first + stage) * BK, there.index(stage), w_ring.index(stage), some, GATED)
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
        tile = w_ring.index(slot).reshape([BN, BK]) if GATED else w_ring.index(slot)
        sums = warpgroup_mma(tile, x_ring.index(slot).permute((1, 0)), sums, is_async=True)
        # The product before this one has ended in all warps: what it read may be written over.
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        _meet()
        ahead = step + STAGES - 1
        more, free = (step > 0) & (ahead < count), ahead % STAGES
        mbarrier.expect(there.index(free), BYTES, pred=more)
        _ask(w, n0, (first + ahead) * BK, there.index(free), w_ring.index(free), more, GATED)
        tma.async_copy_global_to_shared(x, [0, (first + ahead) * BK], there.index(free), x_ring.index(free), pred=more)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))

    if BIAS:
        row = gl.arange(0, BN, gl.SliceLayout(1, ACCUMULATOR))
        n = n0 + row % OUTPUTS
        bias = gl.load(bias_ptr + row // OUTPUTS * outputs + n, mask=n < outputs, other=0.0).to(gl.float32)
        sums += gl.where(part == 0, bias, 0.0)[:, None]
    sums = sums * scale
    if APART:
        # Eight threads write neighbouring outputs: whole sectors.
        _store(out_ptr + part * rows * outputs, sums, n0, rows, outputs, ACCUMULATOR)
    else:
        result = sums.to(out_ptr.dtype.element_ty)
        if GATED:
            result = _activated(result, OUTPUTS)
        # Neighbouring threads write longer pieces.
        PIECES: gl.constexpr = gl.BlockedLayout([min(8, OUTPUTS // 8), 1], [8, 4], [1, WARPS], [0, 1])
        _store(out_ptr, gl.convert_layout(result, PIECES), n0, rows, outputs, PIECES)


@gluon.jit
def _activated(both, OUTPUTS: gl.constexpr):
    """SwiGLU of gates and the ups below them, rounded as where they are written and read again."""
    both = both.reshape([2, OUTPUTS, both.shape[1]]).permute((1, 2, 0))
    if OUTPUTS < 64:
        # Only of tiles of 64 rows a thread has the same places of both.
        both = gl.convert_layout(
            both, gl.BlockedLayout([OUTPUTS // 8, 1, 2], [8, 4, 1], [1, gl.num_warps(), 1], [2, 0, 1])
        )
    gate, up = gl.split(both)
    gate = gate.to(gl.float32)
    # As `sigmoid` of the kernels in Triton.
    e = gl.exp(-gl.abs(gate))
    result = gate * (gl.where(gate >= 0, 1.0, e) / (1.0 + e)) * up.to(gl.float32)
    return result.to(both.dtype)


@gluon.jit
def _ask(w, n0, at, there, room, some, GATED: gl.constexpr):
    """Ask for a step's part of W."""
    if GATED:
        tma.async_copy_global_to_shared(w, [0, n0, at], there, room, pred=some)
    else:
        tma.async_copy_global_to_shared(w, [n0, at], there, room, pred=some)


@gluon.jit
def _store(out_ptr, tile, n0, rows, outputs, LAYOUT: gl.constexpr):
    """Write a tile `[outputs, rows]` into `[B, N]`."""
    n = n0 + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (n < outputs)[:, None] & (r < rows)[None, :]
    gl.store(out_ptr + r[None, :] * outputs + n[:, None], tile, mask=inside)


@cache
def _layout(*block: int) -> Any:
    """Of a step's operand in shared memory, as TMA writes and tensor cores read it: the same for all 16 bits."""
    return gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16)


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
    config = choose("gluon", *weight.shape, apart) if config is None else config
    (outputs, width), block = weight.shape, [config.outputs, config.depth]
    matrix = [outputs, width], [weight.stride(0), 1], block
    return _launch(x, weight, matrix, bias, empty_result(x, outputs, config, apart), config, scale, apart, ready)


def few_swiglu_gluon(
    x: Tensor, weight: Tensor, bias: Tensor | None, ready: bool = False, config: FewConfig | None = None
) -> Tensor:
    """Arguments as `few_swiglu` has checked them."""
    config = choose("gluon", *weight.shape, gated=True) if config is None else config
    (both, width), stride, block = weight.shape, weight.stride(0), [2, config.outputs // 2, config.depth]
    # In one step's copy the rows of both: those behind the gate's last are none, not the first of up.
    matrix = [2, both // 2, width], [both // 2 * stride, stride, 1], block
    return _launch(x, weight, matrix, bias, empty_result(x, both // 2, config), config, 1.0, False, ready)


def _launch(
    x: Tensor,
    weight: Tensor,
    matrix: tuple[list[int], list[int], list[int]],
    bias: Tensor | None,
    result: Tensor,
    config: FewConfig,
    scale: float,
    apart: bool,
    ready: bool,
) -> Tensor:
    """`matrix` is what W is read as: shape, strides and a step's block."""
    if not result.numel():
        return result
    (rows, width), (shape, strides, block) = x.shape, matrix
    together, early, outputs = rows_in_registers(rows), may_begin_early(x.device), shape[-2]
    own = [together, config.depth]
    kernel: Any = _few
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        kernel[(triton.cdiv(outputs, block[-2]), config.splits)](
            TensorDescriptor(x, [rows, width], [x.stride(0), 1], own, _layout(*own)),
            TensorDescriptor(weight, shape, strides, block, _layout(*block)),
            bias, result, rows, outputs, width, config.splits, scale, STAGES=config.stages(together), APART=apart,
            GATED=len(shape) == 3, BIAS=bias is not None, READY=ready, EARLY=early, WARPS=WARPS, num_warps=WARPS,
            launch_pdl=early,
        )  # fmt: skip
    return result
