"""The chunked form as two Triton kernels: what chunks can do apart, and the walk from chunk to chunk.

The derivation and the traffic are in this folder's README. `C` steps a chunk, `BV` value channels a program; the key
axis lies in one block of `BK0` channels, or in two where it is no power of two, so that 96 costs 64 + 32 and not 128.
Decays between steps are exponentials of differences of running sums, never above 1; the sums are fp64 where inputs are fp32.
"""

import triton
import triton.language as tl


@triton.jit
def whereabouts(table, bounds, chunk, time, chunks, C: tl.constexpr, PACKED: tl.constexpr):
    """A chunk's row, its first step in that row, and how many steps its sequence still has from there."""
    if PACKED:
        sequence = tl.load(table + 2 * chunk)
        first = tl.load(bounds + sequence) + tl.load(table + 2 * chunk + 1) * C
        left = tl.load(bounds + sequence + 1) - first
        return chunk * 0, first, left
    row = chunk // chunks
    first = (chunk % chunks) * C
    return row, first, time - first


@triton.jit
def tile(base, step_stride, left, FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """Channels FIRST .. FIRST + N of the C steps from `base`, [C, N]; zeros past the sequence and past WIDTH."""
    steps, channels = tl.arange(0, C), FIRST + tl.arange(0, N)
    mask = (steps < left)[:, None]
    if FIRST + N > WIDTH:
        mask = mask & (channels < WIDTH)[None, :]
    return tl.load(base + (steps[:, None] * step_stride + channels[None, :]), mask=mask, other=0.0)


@triton.jit
def _inverse(lower, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + A)^-1` of `[C, C]`, A strictly lower triangular.

    The blocks of B steps on the diagonal by substitution, row by row, all at once; the rest by products:
    with D what is inverted so far and L the blocks below, `(I + D L)^-1` is a finite series, since D L is nilpotent.
    """
    N: tl.constexpr = C // B
    blocks = tl.reshape(lower, [N, B, N, B])
    on_diagonal = (tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :])[:, None, :, None]
    small = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)
    rows = tl.arange(0, B)[None, :, None]
    columns = tl.arange(0, B)[None, None, :]
    inverse = tl.where(rows == columns, 1.0, tl.zeros([N, B, B], tl.float32))
    for i in range(1, B):
        coefficients = tl.sum(tl.where(rows == i, small, 0.0), 1)
        taken = tl.sum(coefficients[:, :, None] * inverse, 1)
        inverse -= tl.where(rows == i, taken[:, None, :], 0.0)
    if N == 1:
        return tl.reshape(inverse, [C, C])
    spread = tl.where(on_diagonal, tl.expand_dims(inverse, 2), 0.0)
    diagonal = tl.reshape(spread, [C, C])
    below = tl.reshape(tl.where(on_diagonal, 0.0, blocks), [C, C])
    # N nilpotent of order C / B, at most 4: (I + X)^-1 = (I - X)(I + X^2).
    x = tl.dot(diagonal, below, input_precision=PRECISION)
    result = diagonal - tl.dot(x, diagonal, input_precision=PRECISION)
    if N > 2:
        squared = tl.dot(x, x, input_precision=PRECISION)
        result += tl.dot(squared, result, input_precision=PRECISION)
    return result


@triton.jit
def prepare(q, k, x, g, beta, total, solved, norms, table, bounds, time, chunks,
            q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, g_row, g_step, g_head,
            beta_row, beta_step, beta_head,
            H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK0: tl.constexpr, BK1: tl.constexpr,
            GATED: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
            PACKED: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr):  # fmt: skip
    """Of one chunk and key head: running sums of the decay, `(I + A)^-1`, and one over the lengths of q and k.

    total: [M, HV, C].  solved: [M, HV, C, C].  norms: [2, M, H, C] (of q, of k).
    """
    program = tl.program_id(0)
    chunk = program // H
    head = program % H
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first = row.to(tl.int64), first.to(tl.int64)
    steps = tl.arange(0, C)
    k_base = k + row * k_row + first * k_step + head * k_head
    k0 = tile(k_base, k_step, left, 0, BK0, C, K)
    if BK1 > 0:
        k1 = tile(k_base, k_step, left, BK0, BK1, C, K)
    if NORM:
        q_base = q + row * q_row + first * q_step + head * q_head
        q0 = tile(q_base, q_step, left, 0, BK0, C, K).to(tl.float32)
        long_q = tl.sum(q0 * q0, 1)
        long_k = tl.sum(k0.to(tl.float32) * k0.to(tl.float32), 1)
        if BK1 > 0:
            q1 = tile(q_base, q_step, left, BK0, BK1, C, K).to(tl.float32)
            long_q += tl.sum(q1 * q1, 1)
            long_k += tl.sum(k1.to(tl.float32) * k1.to(tl.float32), 1)
        unit_k = 1.0 / tl.sqrt(long_k + EPS)
        norm = norms + program.to(tl.int64) * C + steps
        tl.store(norm, 1.0 / tl.sqrt(long_q + EPS))
        tl.store(norm + tl.num_programs(0).to(tl.int64) * C, unit_k)
    if not ERASE_R:
        if ERASE:
            x_base = x + row * x_row + first * x_step + head * x_head
            x0 = tile(x_base, x_step, left, 0, BK0, C, K)
        else:
            x0 = k0
        pairs = tl.dot(x0, tl.trans(k0), input_precision=PRECISION)
        if BK1 > 0:
            if ERASE:
                x1 = tile(x_base, x_step, left, BK0, BK1, C, K)
            else:
                x1 = k1
            pairs += tl.dot(x1, tl.trans(k1), input_precision=PRECISION)
        if NORM:
            pairs *= unit_k[:, None] * unit_k[None, :]
    for r in range(R):
        value_head = head * R + r
        if ERASE_R:
            x_base = x + row * x_row + first * x_step + value_head * x_head
            x0 = tile(x_base, x_step, left, 0, BK0, C, K)
            pairs = tl.dot(x0, tl.trans(k0), input_precision=PRECISION)
            if BK1 > 0:
                x1 = tile(x_base, x_step, left, BK0, BK1, C, K)
                pairs += tl.dot(x1, tl.trans(k1), input_precision=PRECISION)
        strength = tl.load(beta + row * beta_row + (first + steps) * beta_step + value_head * beta_head,
                           mask=steps < left, other=0.0).to(tl.float32)  # fmt: skip
        erased = strength[:, None] * pairs
        at = chunk.to(tl.int64) * (H * R) + value_head
        if GATED:
            decay = tl.load(g + row * g_row + (first + steps) * g_step + value_head * g_head,
                            mask=steps < left, other=0.0)  # fmt: skip
            running = tl.cumsum(decay.to(total.dtype.element_ty), 0)
            tl.store(total + at * C + steps, running)
            erased *= tl.exp(tl.minimum(running[:, None] - running[None, :], 0.0).to(tl.float32))
        erased = tl.where(steps[:, None] > steps[None, :], erased, 0.0)
        found = _inverse(erased, C, B, SOLVE)
        tl.store(solved + at * C * C + (steps[:, None] * C + steps[None, :]), found.to(solved.dtype.element_ty))


@triton.jit
def walk(q, k, x, v, beta, o, total, solved, norms, initial, final, starts, updates, bounds, chunk_starts,
         scale, time, chunks, all_chunks,
         q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, v_row, v_step, v_head,
         beta_row, beta_step, beta_head, o_row, o_step, o_head,
         H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
         BK0: tl.constexpr, BK1: tl.constexpr, BV: tl.constexpr,
         GATED: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
         INITIAL: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of one sequence, value head and block of value channels: all its chunks, one after the other.

    initial, final: [sequences, HV, K, V].  bounds, chunk_starts: [sequences + 1], of steps and of chunks.  KEEP: write the state before each chunk to starts [M, HV, K, V] and the
    updates to updates [M, HV, C, V], for a backward pass.
    """
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    HV: tl.constexpr = H * R
    program = tl.program_id(0).to(tl.int64)
    block = program % VALUE_BLOCKS
    value_head = (program // VALUE_BLOCKS) % HV
    sequence = program // (VALUE_BLOCKS * HV)
    head = value_head // R
    dtype = v.dtype.element_ty
    if PACKED:
        row = sequence * 0
        begin = tl.load(bounds + sequence).to(tl.int64)
        length = tl.load(bounds + sequence + 1) - begin
        chunk = tl.load(chunk_starts + sequence).to(tl.int64)
        count = (tl.load(chunk_starts + sequence + 1) - chunk).to(tl.int32)
    else:
        row = sequence
        begin = sequence * 0
        length = time
        chunk = sequence * chunks
        count = chunks
    steps = tl.arange(0, C)
    columns = block.to(tl.int32) * BV + tl.arange(0, BV)
    inside = columns < V
    rows0 = tl.arange(0, BK0)
    at0 = rows0[:, None] * V + columns[None, :]
    mask0 = (rows0 < K)[:, None] & inside[None, :]
    held = (sequence * HV + value_head) * K * V
    if INITIAL:
        s0 = tl.load(initial + held + at0, mask=mask0, other=0.0).to(tl.float32)
    else:
        s0 = tl.zeros([BK0, BV], tl.float32)
    if BK1 > 0:
        rows1 = BK0 + tl.arange(0, BK1)
        at1 = rows1[:, None] * V + columns[None, :]
        mask1 = (rows1 < K)[:, None] & inside[None, :]
        if INITIAL:
            s1 = tl.load(initial + held + at1, mask=mask1, other=0.0).to(tl.float32)
        else:
            s1 = tl.zeros([BK1, BV], tl.float32)
    q_base = q + row * q_row + begin * q_step + head * q_head
    k_base = k + row * k_row + begin * k_step + head * k_head
    v_base = v + row * v_row + begin * v_step + value_head * v_head
    o_base = o + row * o_row + begin * o_step + value_head * o_head
    beta_base = beta + row * beta_row + begin * beta_step + value_head * beta_head
    if ERASE:
        x_base = x + row * x_row + begin * x_step + (value_head if ERASE_R else head) * x_head
    below = steps[:, None] >= steps[None, :]

    first = begin * 0
    for index in range(count):
        left = length - first
        at = (chunk + index) * HV + value_head
        k0 = tile(k_base + first * k_step, k_step, left, 0, BK0, C, K)
        q0 = tile(q_base + first * q_step, q_step, left, 0, BK0, C, K)
        x0 = tile(x_base + first * x_step, x_step, left, 0, BK0, C, K) if ERASE else k0
        live = (steps < left)[:, None] & inside[None, :]
        value = tl.load(v_base + first * v_step + (steps[:, None] * v_step + columns[None, :]), mask=live, other=0.0)
        strength = tl.load(beta_base + (first + steps) * beta_step, mask=steps < left, other=0.0).to(tl.float32)
        inverse = tl.load(solved + at * C * C + (steps[:, None] * C + steps[None, :]))
        if KEEP:
            tl.store(starts + at * K * V + at0, s0.to(starts.dtype.element_ty), mask=mask0)
        found = tl.dot(x0, s0.to(dtype), input_precision=PRECISION)
        read = tl.dot(q0, s0.to(dtype), input_precision=PRECISION)
        pairs = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if BK1 > 0:
            k1 = tile(k_base + first * k_step, k_step, left, BK0, BK1, C, K)
            q1 = tile(q_base + first * q_step, q_step, left, BK0, BK1, C, K)
            x1 = tile(x_base + first * x_step, x_step, left, BK0, BK1, C, K) if ERASE else k1
            if KEEP:
                tl.store(starts + at * K * V + at1, s1.to(starts.dtype.element_ty), mask=mask1)
            found += tl.dot(x1, s1.to(dtype), input_precision=PRECISION)
            read += tl.dot(q1, s1.to(dtype), input_precision=PRECISION)
            pairs += tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if NORM:
            unit = norms + ((chunk + index) * H + head) * C + steps
            unit_q = tl.load(unit)
            unit_k = tl.load(unit + all_chunks * H * C)
            found *= unit_k[:, None]
            read *= unit_q[:, None]
            pairs *= unit_q[:, None] * unit_k[None, :]
        if GATED:
            running = tl.load(total + at * C + steps)
            last = tl.load(total + at * C + C - 1)
            within = tl.exp(tl.minimum(running[:, None] - running[None, :], 0.0).to(tl.float32))
            from_start = tl.exp(running.to(tl.float32))
            found *= from_start[:, None]
            read *= from_start[:, None]
            pairs *= within
        rest = strength[:, None] * (value.to(tl.float32) - found)
        update = tl.dot(inverse, rest.to(dtype), input_precision=PRECISION)
        if KEEP:
            tl.store(updates + at * C * V + (steps[:, None] * V + columns[None, :]),
                     update.to(updates.dtype.element_ty), mask=inside[None, :])  # fmt: skip
        pairs = tl.where(below, pairs, 0.0)
        read += tl.dot(pairs.to(dtype), update.to(dtype), input_precision=PRECISION)
        tl.store(o_base + first * o_step + (steps[:, None] * o_step + columns[None, :]),
                 (read * scale).to(o.dtype.element_ty), mask=live)  # fmt: skip
        if NORM:
            update *= unit_k[:, None]
        if GATED:
            update *= tl.exp((last - running).to(tl.float32))[:, None]
            kept = tl.exp(last.to(tl.float32))
            s0 *= kept
            if BK1 > 0:
                s1 *= kept
        s0 += tl.dot(tl.trans(k0), update.to(dtype), input_precision=PRECISION)
        if BK1 > 0:
            s1 += tl.dot(tl.trans(k1), update.to(dtype), input_precision=PRECISION)
        first += C

    if FINAL:
        tl.store(final + held + at0, s0, mask=mask0)
        if BK1 > 0:
            tl.store(final + held + at1, s1, mask=mask1)
