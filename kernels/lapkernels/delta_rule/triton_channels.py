"""Decays of single key channels in the chunked form, as Triton kernels: what comes before the walk.

The derivation is in this folder's README ("A decay of each channel"). A decay between two steps is the exponential of a
difference of running sums, the later step's less that of the middle of the part that both lie in, or the middle's less
the earlier step's: never above 1. The sums are fp64 where inputs are fp32. No gate counts for less than e^-104, the
least number in fp32, so that one of minus infinity subtracts nothing from itself.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOptionalOperand=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import sigmoid
from lapkernels.delta_rule.triton_chunked import BLOCK, store_inverse, whereabouts

FLOOR: tl.constexpr = tl.constexpr(-104.0)
"""A log decay that leaves nothing in fp32."""


@triton.jit
def decay_channels(q, k, x, g, beta, decayed, total, pairs, factors, kept, norms, table, bounds, scale, strength,
                   time, chunks, all_chunks,
                   q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head,
                   g_row, g_step, g_head, g_channel, beta_row, beta_step, beta_head,
                   H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                   ERASE: tl.constexpr, ERASE_R: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
                   KEEP: tl.constexpr, PACKED: tl.constexpr, RAW: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: directions with the decays from the chunk's start or to its end, and the diagonal.

    decayed: [3, M C, HV, K], read and erase directions from the start on, write directions to the end.  total:
    [M, HV, C, K], running sums of the log decay.  pairs: [M, HV, 2 or 3, C, C], of whose first the diagonal is written.
    factors: [M, HV, 4, C], by which rows of `X~ S`, of `Q~ S` and of U are multiplied, and beta.  kept: [M, HV, K].
    norms: as of `prepare`.
    """
    HV: tl.constexpr = H * R
    program = tl.program_id(0)
    chunk = program // HV
    value_head = program % HV
    head = value_head // R
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first, at = row.to(tl.int64), first.to(tl.int64), program.to(tl.int64)
    steps = tl.arange(0, C)
    q += row * q_row + first * q_step + head * q_head
    k += row * k_row + first * k_step + head * k_head
    g += row * g_row + first * g_step + value_head * g_head
    if ERASE:
        x += row * x_row + first * x_step + (value_head if ERASE_R else head) * x_head
    to = chunk.to(tl.int64) * C * HV * K + value_head * K
    of_kind = (row * 0 + all_chunks) * C * HV * K
    own = tl.zeros([C], tl.float32)
    q_square = tl.zeros([C], tl.float32)
    k_square = tl.zeros([C], tl.float32)
    for channel in range(0, K, BK):
        channels = channel + tl.arange(0, BK)
        inside = (channels < K)[None, :]
        live = (steps < left)[:, None] & inside
        gate = tl.load(g + (steps[:, None] * g_step + channels[None, :] * g_channel), mask=live, other=0.0)
        gate = gate.to(total.dtype.element_ty)
        gate = tl.where(gate < FLOOR, FLOOR, gate)
        running, last = tl.cumsum(gate, 0), tl.sum(gate, 0)
        q_tile = tl.load(q + (steps[:, None] * q_step + channels[None, :]), mask=live, other=0.0).to(tl.float32)
        k_tile = tl.load(k + (steps[:, None] * k_step + channels[None, :]), mask=live, other=0.0).to(tl.float32)
        own += tl.sum(q_tile * k_tile, 1)
        if NORM:
            q_square += tl.sum(q_tile * q_tile, 1)
            k_square += tl.sum(k_tile * k_tile, 1)
        x_tile = k_tile
        if ERASE:
            x_tile = tl.load(x + (steps[:, None] * x_step + channels[None, :]), mask=live, other=0.0).to(tl.float32)
        since = tl.exp(running.to(tl.float32))
        until = tl.exp(tl.minimum(last[None, :] - running, 0.0).to(tl.float32))
        out = decayed + to + (steps[:, None] * (HV * K) + channels[None, :])
        tl.store(out, (q_tile * since).to(decayed.dtype.element_ty), mask=inside)
        tl.store(out + of_kind, (x_tile * since).to(decayed.dtype.element_ty), mask=inside)
        tl.store(out + 2 * of_kind, (k_tile * until).to(decayed.dtype.element_ty), mask=inside)
        tl.store(total + at * C * K + (steps[:, None] * K + channels[None, :]), running, mask=inside)
        tl.store(kept + at * K + channels, tl.exp(last.to(tl.float32)), mask=channels < K)
    unit_q = tl.full([C], 1.0, tl.float32)
    unit_k = unit_q
    if NORM:
        unit_q, unit_k = tl.rsqrt(q_square + EPS), tl.rsqrt(k_square + EPS)
        if KEEP:
            norm_q = norms + (chunk.to(tl.int64) * H + head) * C + steps
            tl.store(norm_q, unit_q)
            tl.store(norm_q + (row * 0 + all_chunks) * H * C, unit_k)
    written = tl.load(beta + row * beta_row + (first + steps) * beta_step + value_head * beta_head,
                      mask=steps < left, other=0.0).to(tl.float32)  # fmt: skip
    if RAW:
        written = tl.where(steps < left, strength * sigmoid(written), 0.0)
    factors += at * 4 * C + steps
    tl.store(factors, tl.full([C], 1.0, tl.float32) if ERASE else unit_k)
    tl.store(factors + C, scale * unit_q)
    tl.store(factors + 2 * C, unit_k)
    tl.store(factors + 3 * C, written)
    diagonal = pairs + at * (3 if KEEP else 2) * C * C + steps * (C + 1)
    tl.store(diagonal, (scale * unit_q * unit_k * own).to(pairs.dtype.element_ty))


@triton.jit
def channel_pairs(q, k, x, total, pairs, lower, factors, table, bounds, time, chunks,
                  q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head,
                  H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                  LEVELS: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr, KEEP: tl.constexpr,
                  PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: A, and M but for its diagonal, one product for each halving of the chunk.

    Lane n of a halving is the n-th of all its earlier steps, or of all its later ones; those of one part meet.
    lower: [M, HV, C, C], A below the diagonal.  pairs: as of `decay_channels`; blocks beyond the diagonal are not
    written.
    """
    HV: tl.constexpr = H * R
    program = tl.program_id(0)
    chunk = program // HV
    value_head = program % HV
    head = value_head // R
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first, at = row.to(tl.int64), first.to(tl.int64), program.to(tl.int64)
    dtype = q.dtype.element_ty
    q += row * q_row + first * q_step + head * q_head
    k += row * k_row + first * k_step + head * k_head
    if ERASE:
        x += row * x_row + first * x_step + (value_head if ERASE_R else head) * x_head
    total += at * C * K
    factors += at * 4 * C
    pairs += at * (3 if KEEP else 2) * C * C
    lower += at * C * C
    lanes = tl.arange(0, C // 2)
    for level in range(LEVELS):
        part = lanes >> level
        earlier = (part << (level + 1)) + (lanes & ((1 << level) - 1))
        later = earlier + (1 << level)
        middle = (part << (level + 1)) + (1 << level) - 1
        read = tl.zeros([C // 2, C // 2], tl.float32)
        erased = tl.zeros([C // 2, C // 2], tl.float32)
        for channel in range(0, K, BK):
            channels = channel + tl.arange(0, BK)
            inside = (channels < K)[None, :]
            at_middle = tl.load(total + (middle[:, None] * K + channels[None, :]), mask=inside, other=0.0)
            at_later = tl.load(total + (later[:, None] * K + channels[None, :]), mask=inside, other=0.0)
            at_earlier = tl.load(total + (earlier[:, None] * K + channels[None, :]), mask=inside, other=0.0)
            since = tl.exp(tl.minimum(at_later - at_middle, 0.0).to(tl.float32))
            until = tl.exp(tl.minimum(at_middle - at_earlier, 0.0).to(tl.float32))
            live = (later < left)[:, None] & inside
            q_tile = tl.load(q + (later[:, None] * q_step + channels[None, :]), mask=live, other=0.0).to(tl.float32)
            if ERASE:
                x_tile = tl.load(x + (later[:, None] * x_step + channels[None, :]), mask=live, other=0.0)
            else:
                x_tile = tl.load(k + (later[:, None] * k_step + channels[None, :]), mask=live, other=0.0)
            live = (earlier < left)[:, None] & inside
            k_tile = tl.load(k + (earlier[:, None] * k_step + channels[None, :]), mask=live, other=0.0)
            column = tl.trans((k_tile.to(tl.float32) * until).to(dtype))
            read = tl.dot((q_tile * since).to(dtype), column, read, input_precision=PRECISION)
            erased = tl.dot((x_tile.to(tl.float32) * since).to(dtype), column, erased, input_precision=PRECISION)
        together = part[:, None] == part[None, :]
        by_column = tl.load(factors + 2 * C + earlier)[None, :]
        read *= tl.load(factors + C + later)[:, None] * by_column
        erased *= (tl.load(factors + later) * tl.load(factors + 3 * C + later))[:, None] * by_column
        below = later[:, None] * C + earlier[None, :]
        tl.store(pairs + below, read.to(pairs.dtype.element_ty), mask=together)
        tl.store(lower + below, erased.to(lower.dtype.element_ty), mask=together)
        # Their mirror images are read too where both lie in one block.
        above = earlier[:, None] * C + later[None, :]
        zero = tl.zeros([C // 2, C // 2], pairs.dtype.element_ty)
        tl.store(pairs + above, zero, mask=together & ((2 << level) <= BLOCK))


@triton.jit
def _lower_block(lower, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    index = tl.arange(0, BLOCK)
    rows, columns = index[:, None], index[None, :]
    found = lower + (rows + ROW * BLOCK) * C + (columns + COLUMN * BLOCK)
    # Of a block on the diagonal, what is below it was written.
    return tl.load(found, mask=(rows > columns) if ROW == COLUMN else (rows >= 0), other=0.0).to(tl.float32)


@triton.jit
def invert(lower, pairs, factors, C: tl.constexpr, KEEP: tl.constexpr, SOLVE: tl.constexpr):
    """Of one chunk and value head, one warp: `(I + A)^-1 diag(beta)` transposed, and without beta, as of `prepare`."""
    at = tl.program_id(0).to(tl.int64)
    lower += at * C * C
    solved = pairs + (at * (3 if KEEP else 2) + 1) * C * C
    index = tl.arange(0, BLOCK)
    strengths = factors + (at * 4 + 3) * C + index
    store_inverse(
        solved,
        _lower_block(lower, 0, 0, C), _lower_block(lower, 1, 1, C), _lower_block(lower, 2, 2, C),
        _lower_block(lower, 3, 3, C),
        -_lower_block(lower, 1, 0, C), -_lower_block(lower, 2, 0, C), -_lower_block(lower, 2, 1, C),
        -_lower_block(lower, 3, 0, C), -_lower_block(lower, 3, 1, C), -_lower_block(lower, 3, 2, C),
        tl.load(strengths), tl.load(strengths + BLOCK), tl.load(strengths + 2 * BLOCK), tl.load(strengths + 3 * BLOCK),
        C, KEEP, SOLVE,
    )  # fmt: skip
