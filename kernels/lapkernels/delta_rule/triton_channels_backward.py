"""Decays of single key channels in the chunked form, as Triton kernels: what comes after the walk back."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOptionalOperand=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.delta_rule.triton_backward import by_states
from lapkernels.delta_rule.triton_chunked import whereabouts


@triton.jit
def gradients_by_channel(q, k, x, v, d_o, beta, total, norms, starts, ends, updates, d_b, d_read, d_erased,
                         d_q, d_k, d_x, d_v, d_g, d_beta, table, bounds, scale, time, chunks, all_chunks,
                         q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, v_row, v_step, v_head,
                         d_o_row, d_o_step, d_o_head, beta_row, beta_step, beta_head,
                         d_q_row, d_q_step, d_q_head, d_x_row, d_x_step, d_x_head, d_v_row, d_v_step, d_v_head,
                         d_g_row, d_g_step, d_g_head,
                         H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                         BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, ERASE: tl.constexpr,
                         ERASE_R: tl.constexpr, NORM: tl.constexpr, UNNORM: tl.constexpr, PACKED: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Of one chunk, key head and block of key channels: dq, dk, dx, dv, dg, and this block's share in dbeta.

    d_q and d_k share strides.  d_read, d_erased: of `pair_gradients`, without decays and beta, and symmetric.  d_beta:
    [blocks of K, M, HV, C].  UNNORM: as of `channel_gradients`.

    A gate gains by each pair that it lies between, in the part whose halves the two lie in: in the later half by rows
    from its own step on, in the earlier by columns of steps before its own. The identity by `q dq + x dx - k dk` would
    subtract all other pairs again, which half precision has rounded twice.
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
    inside = (channels < K)[None, :]
    there = (steps < left)[:, None] & inside
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
    rows, columns = steps[:, None], steps[None, :]
    for r in range(R):
        value_head = head * R + r
        at = chunk.to(tl.int64) * HV + value_head
        strength = tl.load(beta + row * beta_row + (first + steps) * beta_step + value_head * beta_head,
                           mask=steps < left, other=0.0).to(tl.float32)  # fmt: skip
        by_change, by_out, by_update, of_beta, both = by_states(
            v + row * v_row + first * v_step + value_head * v_head,
            d_o + row * d_o_row + first * d_o_step + value_head * d_o_head,
            d_v + row * d_v_row + first * d_v_step + value_head * d_v_head,
            starts + at * K * V, ends + at * K * V, updates + at * C * V, d_b + at * C * V, v_step, d_o_step, d_v_step,
            left, channels, block_k == 0, strength, K, V, C, BK, BV, PRECISION,
        )  # fmt: skip
        x_unit = k_unit
        if ERASE:
            x_head_here = value_head if ERASE_R else head
            x_unit = tl.load(x + row * x_row + first * x_step + x_head_here * x_head
                             + (steps[:, None] * x_step + channels[None, :]), mask=there, other=0.0)  # fmt: skip
        sums = total + at * C * K
        running = tl.load(sums + (steps[:, None] * K + channels[None, :]), mask=inside, other=0.0)
        last = tl.load(sums + ((C - 1) * K + channels), mask=channels < K, other=0.0)
        since = tl.exp(running.to(tl.float32))
        by_out *= scale * since
        by_change *= -since
        of_beta += tl.sum(by_change * x_unit.to(tl.float32), 1)
        by_change *= strength[:, None]
        by_update *= tl.exp(tl.minimum(last[None, :] - running, 0.0).to(tl.float32))
        # The state before the chunk meets a row by all gates up to its own, that after it a column by those after it,
        # and both meet by all gates.
        gains = by_update * k_unit.to(tl.float32)
        of_g = tl.cumsum(gains, 0) - gains + (tl.exp(last.to(tl.float32)) * both)[None, :]
        of_g += tl.cumsum(by_out * q_unit.to(tl.float32) + by_change * x_unit.to(tl.float32), 0, reverse=True)
        own = tl.load(d_read + at * C * C + steps * (C + 1)).to(tl.float32)[:, None]
        grad_q += by_out + own * k_unit.to(tl.float32)
        grad_k += by_update + own * q_unit.to(tl.float32)
        if ERASE_R:
            grad_x = by_change
        else:
            grad_x += by_change
        for level in tl.range(LEVELS, num_stages=1):
            middle = ((steps >> (level + 1)) << (level + 1)) + (1 << level) - 1
            is_later = ((steps >> level) & 1) == 1
            at_middle = tl.load(sums + (middle[:, None] * K + channels[None, :]), mask=inside, other=0.0)
            apart = running - at_middle
            decay = tl.exp(tl.minimum(tl.where(is_later[:, None], apart, -apart), 0.0).to(tl.float32))
            # Loaded whole and cleared then, which takes fewer and longer loads.
            meet = (rows >> level) == ((columns >> level) ^ 1)
            inner = at * C * C + (rows * C + columns)
            pairs = tl.load(d_read + inner)
            pairs = tl.where(meet, pairs, tl.zeros_like(pairs))
            # What later steps read with meets what earlier ones wrote, and the other way around: one product.
            mine = tl.where(is_later[:, None], q_unit, k_unit).to(tl.float32)
            product = decay * tl.dot(pairs, (decay * mine).to(dtype), input_precision=PRECISION)
            gains = mine * product
            grad_q += tl.where(is_later[:, None], product, 0.0)
            grad_k += tl.where(is_later[:, None], 0.0, product)
            pairs = tl.load(d_erased + inner)
            pairs = tl.where(meet, pairs, tl.zeros_like(pairs))
            mine = tl.where(is_later[:, None], strength[:, None] * x_unit.to(tl.float32), k_unit.to(tl.float32))
            product = decay * tl.dot(pairs, (decay * mine).to(dtype), input_precision=PRECISION)
            gains += mine * product
            grad_k += tl.where(is_later[:, None], 0.0, product)
            product = tl.where(is_later[:, None], product, 0.0)
            of_beta += tl.sum(x_unit.to(tl.float32) * product, 1)
            grad_x += strength[:, None] * product
            passed = tl.where(is_later[:, None], columns >= rows, columns < rows)
            passed = (passed & ((rows >> level) == (columns >> level))).to(dtype)
            of_g = tl.dot(passed, gains.to(dtype), of_g, input_precision=PRECISION)
        out = block_k.to(tl.int64) * all_chunks * HV * C + at * C + steps
        tl.store(d_beta + out, of_beta)
        tl.store(d_g + row * d_g_row + first * d_g_step + value_head * d_g_head
                 + (steps[:, None] * d_g_step + channels[None, :]), of_g.to(d_g.dtype.element_ty),
                 mask=there)  # fmt: skip
        if ERASE_R:
            tl.store(d_x + row * d_x_row + first * d_x_step + value_head * d_x_head
                     + (steps[:, None] * d_x_step + channels[None, :]), grad_x.to(d_x.dtype.element_ty),
                     mask=there)  # fmt: skip
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
    inner = row * d_q_row + first * d_q_step + head * d_q_head + (steps[:, None] * d_q_step + channels[None, :])
    tl.store(d_q + inner, grad_q.to(d_q.dtype.element_ty), mask=there)
    tl.store(d_k + inner, grad_k.to(d_k.dtype.element_ty), mask=there)
