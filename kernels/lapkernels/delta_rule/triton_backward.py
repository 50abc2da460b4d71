"""The backward pass of the chunked form as Triton kernels: the walk back, and the gradients of chunks, which lie apart.

Names are those of this folder's README: in a chunk `U = (I + A)^-1 B`, `B = beta (V - X~ S_0)`,
`O = scale (Q~ S_0 + M U)`, `S_C = e^G_C S_0 + K^T U`. `d` before a name is the gradient of the loss by it.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOptionalOperand=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import sigmoid, softplus
from lapkernels.delta_rule.triton_chunked import BLOCK, course, operand_of, tile, whereabouts


@triton.jit
def walk_back(q, k, x, d_o, pairs, factors, kept, d_final, d_initial, ends, d_b, bounds, chunk_starts,
              time, chunks,
              q_row, q_step: tl.constexpr, q_head, k_row, k_step: tl.constexpr, k_head,
              x_row, x_step: tl.constexpr, x_head, d_o_row, d_o_step: tl.constexpr, d_o_head,
              H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
              BK0: tl.constexpr, BK1: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr,
              PACKED: tl.constexpr, INITIAL: tl.constexpr, BY_CHANNEL: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Of one sequence, value head and block of value channels: dS after each chunk, and dB of each chunk.

    Turned around: dS is [BV, K] here, and what has C steps is [BV, C]; so a product's result is the next one's left
    operand as it lies in registers.
    BY_CHANNEL: as of `walk`.
    d_final, d_initial: [sequences, HV, K, V].  ends: [M, HV, K, V].  d_b: [M, HV, C, V].
    """
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    HV: tl.constexpr = H * R
    program = tl.program_id(0).to(tl.int64)
    block = program % VALUE_BLOCKS
    value_head = (program // VALUE_BLOCKS) % HV
    sequence = program // (VALUE_BLOCKS * HV)
    head = value_head // R
    dtype = q.dtype.element_ty
    row, begin, length, chunk, count = course(sequence, bounds, chunk_starts, time, chunks, PACKED)
    steps = tl.arange(0, C)
    columns = block.to(tl.int32) * BV + tl.arange(0, BV)
    inside = columns < V
    rows0 = tl.arange(0, BK0)
    at0 = rows0[None, :] * V + columns[:, None]
    mask0 = (rows0 < K)[None, :] & inside[:, None]
    held = (sequence * HV + value_head) * K * V
    ds0 = tl.load(d_final + held + at0, mask=mask0, other=0.0).to(tl.float32)
    if BK1 > 0:
        rows1 = BK0 + tl.arange(0, BK1)
        at1 = rows1[None, :] * V + columns[:, None]
        mask1 = (rows1 < K)[None, :] & inside[:, None]
        ds1 = tl.load(d_final + held + at1, mask=mask1, other=0.0).to(tl.float32)
    # From the last chunk on.
    first = (sequence * 0 + count - 1) * C
    q += operand_of(row, begin, chunk, head, value_head, q_row, q_step, q_head, C, BY_CHANNEL) + first * q_step
    k += operand_of(row, begin, chunk, head, value_head, k_row, k_step, k_head, C, BY_CHANNEL) + first * k_step
    d_o += row * d_o_row + (begin + first) * d_o_step + value_head * d_o_head
    if ERASE:
        x_head_here = value_head if ERASE_R else head
        x += operand_of(row, begin, chunk, x_head_here, value_head, x_row, x_step, x_head, C, BY_CHANNEL)
        x += first * x_step
    at = (chunk + count - 1) * HV + value_head
    left = length - first
    near, far = steps[:, None] // BLOCK, steps[None, :] // BLOCK
    for _ in range(count):
        factor = factors + at * 4 * C + steps
        by_found, by_read = tl.load(factor) * tl.load(factor + 3 * C), tl.load(factor + C)
        by_write = tl.load(factor + 2 * C)
        if BY_CHANNEL:
            over0 = tl.load(kept + at * K + rows0, mask=rows0 < K, other=0.0)[None, :]
            if BK1 > 0:
                over1 = tl.load(kept + at * K + rows1, mask=rows1 < K, other=0.0)[None, :]
        else:
            over0 = tl.load(kept + at)
            over1 = over0
        pair = pairs + at * 3 * C * C + (steps[:, None] * C + steps[None, :])
        k0 = tile(k, k_step, left, 0, BK0, C, K)
        live = (steps < left)[:, None] & inside[None, :]
        d_out = tl.trans(tl.load(d_o + (steps[:, None] * d_o_step + columns[None, :]), mask=live, other=0.0))
        reads = tl.load(pair, mask=near >= far, other=0.0)
        solved = tl.trans(tl.load(pair + 2 * C * C, mask=near <= far, other=0.0))
        x0 = tile(x, x_step, left, 0, BK0, C, K) if ERASE else k0
        q0 = tile(q, q_step, left, 0, BK0, C, K)
        # The same once more: what is multiplied by factors cannot be an operand where it was loaded.
        live = (steps < left)[None, :] & inside[:, None]
        d_out_here = tl.load(d_o + (steps[None, :] * d_o_step + columns[:, None]), mask=live, other=0.0)
        state0 = ds0.to(dtype)
        d_update = tl.dot(state0, tl.trans(k0), input_precision=PRECISION)
        if BK1 > 0:
            k1 = tile(k, k_step, left, BK0, BK1, C, K)
            q1 = tile(q, q_step, left, BK0, BK1, C, K)
            x1 = tile(x, x_step, left, BK0, BK1, C, K) if ERASE else k1
            state1 = ds1.to(dtype)
            d_update = tl.dot(state1, tl.trans(k1), d_update, input_precision=PRECISION)
        d_update = tl.dot(d_out, reads, by_write[None, :] * d_update, input_precision=PRECISION)
        change = tl.dot(d_update.to(dtype), solved, input_precision=PRECISION)
        tl.store(ends + at * K * V + at0, state0.to(ends.dtype.element_ty), mask=mask0)
        tl.store(d_b + at * C * V + (steps[None, :] * V + columns[:, None]), change.to(d_b.dtype.element_ty),
                 mask=inside[:, None])  # fmt: skip
        d_found = (-by_found[None, :] * change).to(dtype)
        d_read = (by_read[None, :] * d_out_here.to(tl.float32)).to(dtype)
        ds0 = tl.dot(d_found, x0, over0 * ds0, input_precision=PRECISION)
        ds0 = tl.dot(d_read, q0, ds0, input_precision=PRECISION)
        if BK1 > 0:
            tl.store(ends + at * K * V + at1, state1.to(ends.dtype.element_ty), mask=mask1)
            ds1 = tl.dot(d_found, x1, over1 * ds1, input_precision=PRECISION)
            ds1 = tl.dot(d_read, q1, ds1, input_precision=PRECISION)
        q -= C * q_step
        k -= C * k_step
        d_o -= C * d_o_step
        if ERASE:
            x -= C * x_step
        left += C
        at -= HV

    if INITIAL:
        tl.store(d_initial + held + at0, ds0, mask=mask0)
        if BK1 > 0:
            tl.store(d_initial + held + at1, ds1, mask=mask1)


@triton.jit
def pair_gradients(q, k, x, d_o, beta, total, norms, updates, d_b, d_read, d_erased, d_total, d_beta, table, bounds,
                   scale, time, chunks, all_chunks,
                   q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, d_o_row, d_o_step, d_o_head,
                   beta_row, beta_step, beta_head,
                   H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                   BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, ERASE: tl.constexpr,
                   ERASE_R: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr, BY_CHANNEL: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: gradients by `q_t . k_s` and by `x_t . k_s`, and what they give for decay and beta.

    d_read, d_erased: [M, HV, C, C].  d_total, d_beta: [M, HV, C], the latter without what comes by way of V and S.
    BY_CHANNEL: without decays and beta, by which channels differ, with the mirror image of each, and no more.
    """
    HV: tl.constexpr = H * R
    program = tl.program_id(0)
    chunk = program // HV
    value_head = program % HV
    head = value_head // R
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first, at = row.to(tl.int64), first.to(tl.int64), program.to(tl.int64)
    steps = tl.arange(0, C)
    d_o_base = d_o + row * d_o_row + first * d_o_step + value_head * d_o_head
    d_pairs = tl.zeros([C, C], tl.float32)
    d_lower = tl.zeros([C, C], tl.float32)
    for block in range((V + BV - 1) // BV):
        columns = block * BV + tl.arange(0, BV)
        inside = (columns < V)[None, :]
        inner = steps[:, None] * V + columns[None, :]
        update = tl.load(updates + at * C * V + inner, mask=inside, other=0.0)
        change = tl.load(d_b + at * C * V + inner, mask=inside, other=0.0)
        d_out = tl.load(d_o_base + (steps[:, None] * d_o_step + columns[None, :]),
                        mask=(steps < left)[:, None] & inside, other=0.0)  # fmt: skip
        d_pairs += tl.dot(d_out, tl.trans(update), input_precision=PRECISION)
        d_lower -= tl.dot(change, tl.trans(update), input_precision=PRECISION)
    if BY_CHANNEL:
        inner = at * C * C + (steps[:, None] * C + steps[None, :])
        d_pairs = tl.where(steps[:, None] >= steps[None, :], d_pairs * scale, 0.0)
        d_lower = tl.where(steps[:, None] > steps[None, :], d_lower, 0.0)
        tl.store(d_read + inner, d_pairs.to(d_read.dtype.element_ty), mask=steps[:, None] >= steps[None, :])
        tl.store(d_erased + inner, d_lower.to(d_erased.dtype.element_ty), mask=steps[:, None] >= steps[None, :])
        mirrored = at * C * C + (steps[None, :] * C + steps[:, None])
        tl.store(d_read + mirrored, d_pairs.to(d_read.dtype.element_ty), mask=steps[:, None] > steps[None, :])
        tl.store(d_erased + mirrored, d_lower.to(d_erased.dtype.element_ty), mask=steps[:, None] > steps[None, :])
        return
    q_base = q + row * q_row + first * q_step + head * q_head
    k_base = k + row * k_row + first * k_step + head * k_head
    x_base = k_base
    if ERASE:
        x_base = x + row * x_row + first * x_step + (value_head if ERASE_R else head) * x_head
    read = tl.zeros([C, C], tl.float32)
    erased = tl.zeros([C, C], tl.float32)
    for channel in tl.static_range(0, K, BK):
        k_tile = tl.trans(tile(k_base, k_step, left, channel, BK, C, K))
        read += tl.dot(tile(q_base, q_step, left, channel, BK, C, K), k_tile, input_precision=PRECISION)
        erased += tl.dot(tile(x_base, x_step if ERASE else k_step, left, channel, BK, C, K), k_tile,
                         input_precision=PRECISION)  # fmt: skip
    if NORM:
        unit = norms + (chunk.to(tl.int64) * H + head) * C + steps
        unit_q = tl.load(unit)
        unit_k = tl.load(unit + (row * 0 + all_chunks) * H * C)
        read *= unit_q[:, None] * unit_k[None, :]
        erased *= unit_k[:, None] * unit_k[None, :]
    strength = tl.load(beta + row * beta_row + (first + steps) * beta_step + value_head * beta_head,
                       mask=steps < left, other=0.0).to(tl.float32)  # fmt: skip
    d_pairs = tl.where(steps[:, None] >= steps[None, :], d_pairs * scale, 0.0)
    d_lower = tl.where(steps[:, None] > steps[None, :], d_lower, 0.0)
    if GATED:
        running = tl.load(total + at * C + steps)
        within = tl.exp(tl.minimum(running[:, None] - running[None, :], 0.0).to(tl.float32))
        d_pairs *= within
        d_lower *= within
    tl.store(d_beta + at * C + steps, tl.sum(d_lower * erased, 1))
    d_lower *= strength[:, None]
    if GATED:
        logs = d_pairs * read + d_lower * erased
        tl.store(d_total + at * C + steps, tl.sum(logs, 1) - tl.sum(logs, 0))
    inner = at * C * C + (steps[:, None] * C + steps[None, :])
    tl.store(d_read + inner, d_pairs.to(d_read.dtype.element_ty))
    tl.store(d_erased + inner, d_lower.to(d_erased.dtype.element_ty))


@triton.jit
def by_states(v, d_o, d_v, starts, ends, updates, d_b, v_step, d_o_step, d_v_step, left, channels, once, strength,
              K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """What a chunk's directions gain by the states at both of its ends, for the channels given, before decays.

    Returns those of erase directions (without -beta), of read directions (without the scale) and of write directions,
    [C, BK]; `v . dB` by step, and `S_0 . dS_C` by channel.  once: whether to read v and write d_v.
    """
    steps = tl.arange(0, C)
    by_change = tl.zeros([C, BK], tl.float32)
    by_out = tl.zeros([C, BK], tl.float32)
    by_update = tl.zeros([C, BK], tl.float32)
    by_value = tl.zeros([C], tl.float32)
    both = tl.zeros([BK], tl.float32)
    for block in range((V + BV - 1) // BV):
        columns = block * BV + tl.arange(0, BV)
        inside = (columns < V)[None, :]
        inner = steps[:, None] * V + columns[None, :]
        of_state = channels[:, None] * V + columns[None, :]
        held = (channels < K)[:, None] & inside
        live = (steps < left)[:, None] & inside
        start = tl.load(starts + of_state, mask=held, other=0.0)
        end = tl.load(ends + of_state, mask=held, other=0.0)
        update = tl.load(updates + inner, mask=inside, other=0.0)
        change = tl.load(d_b + inner, mask=inside, other=0.0)
        d_out = tl.load(d_o + (steps[:, None] * d_o_step + columns[None, :]), mask=live, other=0.0)
        by_change += tl.dot(change, tl.trans(start), input_precision=PRECISION)
        by_out += tl.dot(d_out, tl.trans(start), input_precision=PRECISION)
        by_update += tl.dot(update, tl.trans(end), input_precision=PRECISION)
        both += tl.sum(start.to(tl.float32) * end.to(tl.float32), 1)
        live = live & once
        value = tl.load(v + (steps[:, None] * v_step + columns[None, :]), mask=live, other=0.0)
        by_value += tl.sum(value.to(tl.float32) * change.to(tl.float32), 1)
        tl.store(d_v + (steps[:, None] * d_v_step + columns[None, :]),
                 (strength[:, None] * change.to(tl.float32)).to(d_v.dtype.element_ty), mask=live)  # fmt: skip
    return by_change, by_out, by_update, by_value, both


@triton.jit
def channel_gradients(q, k, x, v, d_o, beta, total, norms, starts, ends, updates, d_b, d_read, d_erased,
                      d_q, d_k, d_x, d_v, d_total, d_beta, table, bounds, scale, time, chunks, all_chunks,
                      q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, v_row, v_step, v_head,
                      d_o_row, d_o_step, d_o_head, beta_row, beta_step, beta_head,
                      d_q_row, d_q_step, d_q_head, d_x_row, d_x_step, d_x_head, d_v_row, d_v_step, d_v_head,
                      H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                      BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, ERASE: tl.constexpr,
                      ERASE_R: tl.constexpr, NORM: tl.constexpr, UNNORM: tl.constexpr, PACKED: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    """Of one chunk, key head and block of key channels: dq, dk, dx, dv, and what S gives for decay and beta.

    d_q and d_k share strides.  d_total, d_beta: [blocks of K, M, HV, C].  UNNORM: through the normalisation, which
    takes all channels in one block; else d_q and d_k are by the unit vectors.
    """
    HV: tl.constexpr = H * R
    program = tl.program_id(0)
    block_k = tl.program_id(1)
    chunk = program // H
    head = program % H
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first = row.to(tl.int64), first.to(tl.int64)
    steps = tl.arange(0, C)
    channels = block_k * BK + tl.arange(0, BK)
    there = (steps < left)[:, None] & (channels < K)[None, :]
    dtype = v.dtype.element_ty
    q_unit = tl.load(q + row * q_row + first * q_step + head * q_head + (steps[:, None] * q_step + channels[None, :]),
                     mask=there, other=0.0)  # fmt: skip
    k_unit = tl.load(k + row * k_row + first * k_step + head * k_head + (steps[:, None] * k_step + channels[None, :]),
                     mask=there, other=0.0)  # fmt: skip
    if NORM:
        unit = norms + program.to(tl.int64) * C + steps
        unit_q = tl.load(unit)
        unit_k = tl.load(unit + (row * 0 + all_chunks) * H * C)
        q_unit = (q_unit.to(tl.float32) * unit_q[:, None]).to(dtype)
        k_unit = (k_unit.to(tl.float32) * unit_k[:, None]).to(dtype)
    grad_q = tl.zeros([C, BK], tl.float32)
    grad_k = tl.zeros([C, BK], tl.float32)
    grad_x = tl.zeros([C, BK], tl.float32)
    for r in range(R):
        value_head = head * R + r
        at = chunk.to(tl.int64) * HV + value_head
        strength = tl.load(beta + row * beta_row + (first + steps) * beta_step + value_head * beta_head,
                           mask=steps < left, other=0.0).to(tl.float32)  # fmt: skip
        by_change, by_out, by_update, by_value, both = by_states(
            v + row * v_row + first * v_step + value_head * v_head,
            d_o + row * d_o_row + first * d_o_step + value_head * d_o_head,
            d_v + row * d_v_row + first * d_v_step + value_head * d_v_head,
            starts + at * K * V, ends + at * K * V, updates + at * C * V, d_b + at * C * V, v_step, d_o_step, d_v_step,
            left, channels, block_k == 0, strength, K, V, C, BK, BV, PRECISION,
        )  # fmt: skip
        by_out *= scale
        if GATED:
            running = tl.load(total + at * C + steps)
            last = tl.load(total + at * C + C - 1)
            from_start = tl.exp(running.to(tl.float32))
            by_out *= from_start[:, None]
            by_change *= from_start[:, None]
            by_update *= tl.exp((last - running).to(tl.float32))[:, None]
        if ERASE:
            x_head_here = value_head if ERASE_R else head
            x_unit = tl.load(x + row * x_row + first * x_step + x_head_here * x_head
                             + (steps[:, None] * x_step + channels[None, :]), mask=there, other=0.0)  # fmt: skip
        else:
            x_unit = k_unit
        there_beta = by_value - tl.sum(by_change * x_unit.to(tl.float32), 1)
        by_change *= -strength[:, None]
        out = block_k.to(tl.int64) * all_chunks * HV * C + at * C + steps
        tl.store(d_beta + out, there_beta)
        if GATED:
            written = tl.sum(by_update * k_unit.to(tl.float32), 1)
            of_total = (
                tl.sum(by_out * q_unit.to(tl.float32), 1) + tl.sum(by_change * x_unit.to(tl.float32), 1) - written
            )
            at_end = tl.sum(written, 0) + tl.exp(last.to(tl.float32)) * tl.sum(both, 0)
            tl.store(d_total + out, of_total + tl.where(steps == C - 1, at_end, 0.0))
        within = at * C * C + (steps[:, None] * C + steps[None, :])
        of_read = tl.load(d_read + within)
        of_erased = tl.load(d_erased + within)
        grad_q += by_out + tl.dot(of_read, k_unit, input_precision=PRECISION)
        grad_k += by_update + tl.dot(tl.trans(of_read), q_unit, input_precision=PRECISION)
        grad_k += tl.dot(tl.trans(of_erased), x_unit, input_precision=PRECISION)
        of_x = by_change + tl.dot(of_erased, k_unit, input_precision=PRECISION)
        if ERASE_R:
            tl.store(d_x + row * d_x_row + first * d_x_step + value_head * d_x_head
                     + (steps[:, None] * d_x_step + channels[None, :]), of_x.to(d_x.dtype.element_ty),
                     mask=there)  # fmt: skip
        else:
            grad_x += of_x
    inner = row * d_q_row + first * d_q_step + head * d_q_head + (steps[:, None] * d_q_step + channels[None, :])
    if ERASE:
        if not ERASE_R:
            tl.store(d_x + row * d_x_row + first * d_x_step + head * d_x_head
                     + (steps[:, None] * d_x_step + channels[None, :]), grad_x.to(d_x.dtype.element_ty),
                     mask=there)  # fmt: skip
    else:
        grad_k += grad_x
    if UNNORM:
        q_wide, k_wide = q_unit.to(tl.float32), k_unit.to(tl.float32)
        grad_q = unit_q[:, None] * (grad_q - q_wide * tl.sum(q_wide * grad_q, 1)[:, None])
        grad_k = unit_k[:, None] * (grad_k - k_wide * tl.sum(k_wide * grad_k, 1)[:, None])
    tl.store(d_q + inner, grad_q.to(d_q.dtype.element_ty), mask=there)
    tl.store(d_k + inner, grad_k.to(d_k.dtype.element_ty), mask=there)


@triton.jit
def gate_gradients(by_pairs, by_channels, beta_by_pairs, beta_by_channels, g, beta, A_log, dt_bias, d_g, d_beta,
                   d_rates, d_biases, table, bounds, strength, time, chunks, all_chunks,
                   g_row, g_step, g_head, beta_row, beta_step, beta_head,
                   d_g_row, d_g_step, d_g_head, d_beta_row, d_beta_step, d_beta_head,
                   HV: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr, GATED: tl.constexpr,
                   PACKED: tl.constexpr, RAW: tl.constexpr, RATED: tl.constexpr,
                   DT_BIAS: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: all parts of dbeta, and dg from those of the running sum: each step is in all later
    sums of its chunk. RAW, RATED: on through the activations.

    by_pairs, beta_by_pairs: [M, HV, C].  by_channels, beta_by_channels: [BLOCKS, M, HV, C].  d_rates, d_biases:
    [M, HV], the shares of this chunk in the gradients of A_log and dt_bias.
    """
    program = tl.program_id(0)
    chunk = program // HV
    value_head = program % HV
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first = row.to(tl.int64), first.to(tl.int64)
    steps = tl.arange(0, C)
    at = program.to(tl.int64) * C + steps
    all_of_block = (row * 0 + all_chunks) * HV * C
    inside = steps < left
    written = tl.load(beta_by_pairs + at)
    for block in range(BLOCKS):
        written += tl.load(beta_by_channels + at + block * all_of_block)
    if RAW:
        opened = sigmoid(tl.load(beta + row * beta_row + (first + steps) * beta_step + value_head * beta_head,
                                 mask=inside, other=0.0).to(tl.float32))  # fmt: skip
        written *= strength * opened * (1.0 - opened)
    tl.store(d_beta + row * d_beta_row + (first + steps) * d_beta_step + value_head * d_beta_head,
             written.to(d_beta.dtype.element_ty), mask=inside)  # fmt: skip
    if GATED:
        sums = tl.load(by_pairs + at)
        for block in range(BLOCKS):
            sums += tl.load(by_channels + at + block * all_of_block)
        later = tl.cumsum(sums, 0, reverse=True)
        if RATED:
            raw = tl.load(g + row * g_row + (first + steps) * g_step + value_head * g_head,
                          mask=inside, other=0.0).to(tl.float32)  # fmt: skip
            if DT_BIAS:
                raw += tl.load(dt_bias + value_head).to(tl.float32)
            later = tl.where(inside, -tl.exp(tl.load(A_log + value_head).to(tl.float32)) * later, 0.0)
            tl.store(d_rates + program, tl.sum(later * softplus(raw), 0))
            later *= sigmoid(raw)
            if DT_BIAS:
                tl.store(d_biases + program, tl.sum(later, 0))
        tl.store(d_g + row * d_g_row + (first + steps) * d_g_step + value_head * d_g_head,
                 later.to(d_g.dtype.element_ty), mask=inside)  # fmt: skip
