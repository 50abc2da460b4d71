"""The chunked form as two Triton kernels: what chunks can do apart, and the walk from chunk to chunk.

The derivation and the traffic are in this folder's README. `C` steps a chunk, `BV` value channels a program; the key
axis lies in one block of `BK0` channels, or in two where it is no power of two, so that 96 costs 64 + 32 and not 128.
Decays between steps are exponentials of differences of running sums, never above 1; the sums are fp64 where inputs are
fp32.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOptionalOperand=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

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
def part(base, step_stride, left, channel, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """As `tile`, from a channel that a loop counts, a multiple of N."""
    steps, channels = tl.arange(0, C), channel + tl.arange(0, N)
    mask = (steps < left)[:, None]
    if WIDTH % N != 0:
        mask = mask & (channels < WIDTH)[None, :]
    return tl.load(base + (steps[:, None] * step_stride + channels[None, :]), mask=mask, other=0.0)


@triton.jit
def course(sequence, bounds, chunk_starts, time, chunks, PACKED: tl.constexpr):
    """A sequence's row, first step and length, and its first chunk and their number."""
    if PACKED:
        begin = tl.load(bounds + sequence).to(tl.int64)
        length = tl.load(bounds + sequence + 1) - begin
        chunk = tl.load(chunk_starts + sequence).to(tl.int64)
        count = (tl.load(chunk_starts + sequence + 1) - chunk).to(tl.int32)
        return sequence * 0, begin, length, chunk, count
    return sequence, sequence * 0, sequence * 0 + time, sequence * chunks, chunks


BLOCK: tl.constexpr = tl.constexpr(16)
"""Steps of a block of a chunk: one that tensor cores take, and that one warp inverts without waiting for another."""


@triton.jit
def _lower_products(a, a_step, b, b_step, left, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """The blocks on and below the diagonal of `a b^T`, `[C, C]`, row by row: 00, 10, 11, 20, 21, 22, 30, 31, 32, 33."""
    c00 = tl.zeros([BLOCK, BLOCK], tl.float32)
    c10, c11, c20, c21, c22, c30, c31, c32, c33 = c00, c00, c00, c00, c00, c00, c00, c00, c00
    for channel in range(0, K, BK):
        b0 = tl.trans(part(b, b_step, left, channel, BK, BLOCK, K))
        b1 = tl.trans(part(b + BLOCK * b_step, b_step, left - BLOCK, channel, BK, BLOCK, K))
        b2 = tl.trans(part(b + 2 * BLOCK * b_step, b_step, left - 2 * BLOCK, channel, BK, BLOCK, K))
        b3 = tl.trans(part(b + 3 * BLOCK * b_step, b_step, left - 3 * BLOCK, channel, BK, BLOCK, K))
        row = part(a, a_step, left, channel, BK, BLOCK, K)
        c00 += tl.dot(row, b0, input_precision=PRECISION)
        row = part(a + BLOCK * a_step, a_step, left - BLOCK, channel, BK, BLOCK, K)
        c10 += tl.dot(row, b0, input_precision=PRECISION)
        c11 += tl.dot(row, b1, input_precision=PRECISION)
        row = part(a + 2 * BLOCK * a_step, a_step, left - 2 * BLOCK, channel, BK, BLOCK, K)
        c20 += tl.dot(row, b0, input_precision=PRECISION)
        c21 += tl.dot(row, b1, input_precision=PRECISION)
        c22 += tl.dot(row, b2, input_precision=PRECISION)
        row = part(a + 3 * BLOCK * a_step, a_step, left - 3 * BLOCK, channel, BK, BLOCK, K)
        c30 += tl.dot(row, b0, input_precision=PRECISION)
        c31 += tl.dot(row, b1, input_precision=PRECISION)
        c32 += tl.dot(row, b2, input_precision=PRECISION)
        c33 += tl.dot(row, b3, input_precision=PRECISION)
    return c00, c10, c11, c20, c21, c22, c30, c31, c32, c33


@triton.jit
def _over_length(x, step, left, K: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr):
    """One over the length of each of BLOCK steps."""
    squares = tl.zeros([BLOCK], tl.float32)
    for channel in range(0, K, BK):
        channels = part(x, step, left, channel, BK, BLOCK, K).to(tl.float32)
        squares += tl.sum(channels * channels, 1)
    return 1.0 / tl.sqrt(squares + EPS)


@triton.jit
def _within(running, GATED: tl.constexpr):
    """The decay from each step of a block to each later one; above the diagonal 1 or less, and of no use."""
    if GATED:
        return tl.exp(tl.minimum(running[:, None] - running[None, :], 0.0).to(tl.float32))
    return tl.full([BLOCK, BLOCK], 1.0, tl.float32)


@triton.jit
def _times(c, by_row, by_column):
    return c * by_row[:, None] * by_column[None, :]


@triton.jit
def _eliminate(t, lower, j):
    """Step j of forward substitution on the rows of a block: each row below loses its share of row j."""
    index = tl.arange(0, BLOCK)
    column = tl.sum(tl.where(index[None, :] == j, lower, 0.0), 1)
    row = tl.sum(tl.where(index[:, None] == j, t, 0.0), 0)
    return t - column[:, None] * row[None, :]


@triton.jit
def _series(lower, PRECISION: tl.constexpr):
    """`(I + A)^-1` of a block by products: of its blocks of four steps, then of them all.

    Each is a series that ends after its third power, so that no power grows much beyond the result.
    """
    index = tl.arange(0, BLOCK)
    near = (index[:, None] // 4) == (index[None, :] // 4)
    small = tl.where(near, lower, 0.0)
    squared = tl.dot(small, small, input_precision=PRECISION)
    identity = tl.where(index[:, None] == index[None, :], 1.0, tl.zeros([BLOCK, BLOCK], tl.float32))
    inverse = identity - small + squared - tl.dot(small, squared, input_precision=PRECISION)
    x = tl.dot(inverse, tl.where(near, 0.0, lower), input_precision=PRECISION)
    result = inverse - tl.dot(x, inverse, input_precision=PRECISION)
    squared = tl.dot(x, x, input_precision=PRECISION)
    return result + tl.dot(squared, result, input_precision=PRECISION)


@triton.jit
def _store_block(ptr, c, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(ptr + ((index + ROW * BLOCK)[:, None] * C + (index + COLUMN * BLOCK)[None, :]), c.to(ptr.dtype.element_ty))


@triton.jit
def _store_lower(ptr, c00, c10, c11, c20, c21, c22, c30, c31, c32, c33, C: tl.constexpr):
    """A lower triangular matrix by its blocks, with the zeros above."""
    none = tl.zeros([BLOCK, BLOCK], tl.float32)
    _store_block(ptr, c00, 0, 0, C)
    _store_block(ptr, none, 0, 1, C)
    _store_block(ptr, none, 0, 2, C)
    _store_block(ptr, none, 0, 3, C)
    _store_block(ptr, c10, 1, 0, C)
    _store_block(ptr, c11, 1, 1, C)
    _store_block(ptr, none, 1, 2, C)
    _store_block(ptr, none, 1, 3, C)
    _store_block(ptr, c20, 2, 0, C)
    _store_block(ptr, c21, 2, 1, C)
    _store_block(ptr, c22, 2, 2, C)
    _store_block(ptr, none, 2, 3, C)
    _store_block(ptr, c30, 3, 0, C)
    _store_block(ptr, c31, 3, 1, C)
    _store_block(ptr, c32, 3, 2, C)
    _store_block(ptr, c33, 3, 3, C)


@triton.jit
def _running(g, step, left, carried, GATED: tl.constexpr):
    """Running sums of the log decay over BLOCK steps, from `carried` on; and the last of them."""
    index = tl.arange(0, BLOCK)
    if GATED:
        decay = tl.load(g + index * step, mask=index < left, other=0.0).to(carried.dtype)
        return tl.cumsum(decay, 0) + carried, carried + tl.sum(decay, 0)
    return tl.zeros([BLOCK], carried.dtype), carried


@triton.jit
def _store_factors(ptr, beta, running, last, unit_q, unit_k, scale, NUMBER: tl.constexpr, C: tl.constexpr,
                   ERASE: tl.constexpr):  # fmt: skip
    """What rows of products with the state are multiplied by: see `prepare`."""
    index = tl.arange(0, BLOCK) + NUMBER * BLOCK
    from_start = tl.exp(running.to(tl.float32))
    tl.store(ptr + index, beta * from_start * (1.0 if ERASE else unit_k))
    tl.store(ptr + C + index, scale * from_start * unit_q)
    tl.store(ptr + 2 * C + index, tl.exp((last - running).to(tl.float32)) * unit_k)
    tl.store(ptr + 3 * C + index, beta)


@triton.jit
def prepare(q, k, x, g, beta, total, solved, read, factors, kept, norms, table, bounds, scale, time, chunks, all_chunks,
            q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, g_row, g_step, g_head,
            beta_row, beta_step, beta_head,
            H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            GATED: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
            KEEP: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
            SERIES: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: everything that no state enters.

    solved: `(I + A)^-1`, [M, HV, C, C].  read: M, [M, HV, C, C], with the scale.  factors: [M, HV, 4, C], by which rows
    of `X S`, of `Q S` and of U are multiplied, and beta.  kept: [M, HV], the decay over the chunk.  For a backward pass
    also total: [M, HV, C], running sums of the log decay, and norms: [2, M, H, C], one over the lengths of q and of k.
    """
    HV: tl.constexpr = H * R
    program = tl.program_id(0)
    chunk = program // HV
    value_head = program % HV
    head = value_head // R
    row, first, left = whereabouts(table, bounds, chunk, time, chunks, C, PACKED)
    row, first, at = row.to(tl.int64), first.to(tl.int64), program.to(tl.int64)
    index = tl.arange(0, BLOCK)
    q += row * q_row + first * q_step + head * q_head
    k += row * k_row + first * k_step + head * k_head
    g += row * g_row + first * g_step + value_head * g_head
    beta += row * beta_row + first * beta_step + value_head * beta_head
    beta0 = tl.load(beta + index * beta_step, mask=index < left, other=0.0).to(tl.float32)
    beta1 = tl.load(beta + (index + BLOCK) * beta_step, mask=index + BLOCK < left, other=0.0).to(tl.float32)
    beta2 = tl.load(beta + (index + 2 * BLOCK) * beta_step, mask=index + 2 * BLOCK < left, other=0.0).to(tl.float32)
    beta3 = tl.load(beta + (index + 3 * BLOCK) * beta_step, mask=index + 3 * BLOCK < left, other=0.0).to(tl.float32)
    sum0, at1 = _running(g, g_step, left, tl.zeros([], total.dtype.element_ty), GATED)
    sum1, at2 = _running(g + BLOCK * g_step, g_step, left - BLOCK, at1, GATED)
    sum2, at3 = _running(g + 2 * BLOCK * g_step, g_step, left - 2 * BLOCK, at2, GATED)
    sum3, last = _running(g + 3 * BLOCK * g_step, g_step, left - 3 * BLOCK, at3, GATED)
    if ERASE:
        x += row * x_row + first * x_step + (value_head if ERASE_R else head) * x_head
        a00, a10, a11, a20, a21, a22, a30, a31, a32, a33 = _lower_products(x, x_step, k, k_step, left, K, BK, PRECISION)
    else:
        a00, a10, a11, a20, a21, a22, a30, a31, a32, a33 = _lower_products(k, k_step, k, k_step, left, K, BK, PRECISION)
    k0, k1, k2, k3 = (
        tl.full([BLOCK], 1.0, tl.float32),
        tl.full([BLOCK], 1.0, tl.float32),
        tl.full([BLOCK], 1.0, tl.float32),
        tl.full([BLOCK], 1.0, tl.float32),
    )
    q0, q1, q2, q3 = k0, k1, k2, k3
    if NORM:
        k0 = _over_length(k, k_step, left, K, BK, EPS)
        k1 = _over_length(k + BLOCK * k_step, k_step, left - BLOCK, K, BK, EPS)
        k2 = _over_length(k + 2 * BLOCK * k_step, k_step, left - 2 * BLOCK, K, BK, EPS)
        k3 = _over_length(k + 3 * BLOCK * k_step, k_step, left - 3 * BLOCK, K, BK, EPS)
        q0 = _over_length(q, q_step, left, K, BK, EPS)
        q1 = _over_length(q + BLOCK * q_step, q_step, left - BLOCK, K, BK, EPS)
        q2 = _over_length(q + 2 * BLOCK * q_step, q_step, left - 2 * BLOCK, K, BK, EPS)
        q3 = _over_length(q + 3 * BLOCK * q_step, q_step, left - 3 * BLOCK, K, BK, EPS)
    if KEEP:
        if NORM:
            unit = norms + (chunk.to(tl.int64) * H + head) * C + index
            tl.store(unit, q0)
            tl.store(unit + BLOCK, q1)
            tl.store(unit + 2 * BLOCK, q2)
            tl.store(unit + 3 * BLOCK, q3)
            unit += (row * 0 + all_chunks) * H * C
            tl.store(unit, k0)
            tl.store(unit + BLOCK, k1)
            tl.store(unit + 2 * BLOCK, k2)
            tl.store(unit + 3 * BLOCK, k3)
        if GATED:
            tl.store(total + at * C + index, sum0)
            tl.store(total + at * C + BLOCK + index, sum1)
            tl.store(total + at * C + 2 * BLOCK + index, sum2)
            tl.store(total + at * C + 3 * BLOCK + index, sum3)
    factor = factors + at * 4 * C
    _store_factors(factor, beta0, sum0, last, q0, k0, scale, 0, C, ERASE)
    _store_factors(factor, beta1, sum1, last, q1, k1, scale, 1, C, ERASE)
    _store_factors(factor, beta2, sum2, last, q2, k2, scale, 2, C, ERASE)
    _store_factors(factor, beta3, sum3, last, q3, k3, scale, 3, C, ERASE)
    tl.store(kept + at, tl.exp(last.to(tl.float32)))

    # Between blocks a decay is that up to the later block's border, times that from there: no exponential a pair.
    w0, w1, w2, w3 = _within(sum0, GATED), _within(sum1, GATED), _within(sum2, GATED), _within(sum3, GATED)
    k10, k20, k21, k30, k31, k32 = k0, k0, k1, k0, k1, k2
    from1 = tl.exp((sum1 - at1).to(tl.float32))
    from2 = tl.exp((sum2 - at2).to(tl.float32))
    from3 = tl.exp((sum3 - at3).to(tl.float32))
    if GATED:
        k10 = k0 * tl.exp((at1 - sum0).to(tl.float32))
        k20 = k0 * tl.exp((at2 - sum0).to(tl.float32))
        k21 = k1 * tl.exp((at2 - sum1).to(tl.float32))
        k30 = k0 * tl.exp((at3 - sum0).to(tl.float32))
        k31 = k1 * tl.exp((at3 - sum1).to(tl.float32))
        k32 = k2 * tl.exp((at3 - sum2).to(tl.float32))
    # A: where q and k are normalised here, k is the erase direction.
    e0, e1, e2, e3 = beta0, beta1, beta2, beta3
    if NORM:
        e0, e1, e2, e3 = beta0 * k0, beta1 * k1, beta2 * k2, beta3 * k3
    strictly = index[:, None] > index[None, :]
    a00 = tl.where(strictly, _times(a00 * w0, e0, k0), 0.0)
    a11 = tl.where(strictly, _times(a11 * w1, e1, k1), 0.0)
    a22 = tl.where(strictly, _times(a22 * w2, e2, k2), 0.0)
    a33 = tl.where(strictly, _times(a33 * w3, e3, k3), 0.0)
    e1, e2, e3 = e1 * from1, e2 * from2, e3 * from3
    a10 = _times(a10, e1, k10)
    a20 = _times(a20, e2, k20)
    a21 = _times(a21, e2, k21)
    a30 = _times(a30, e3, k30)
    a31 = _times(a31, e3, k31)
    a32 = _times(a32, e3, k32)
    t00 = tl.where(index[:, None] == index[None, :], 1.0, tl.zeros([BLOCK, BLOCK], tl.float32))
    t11, t22, t33 = t00, t00, t00
    if SERIES:
        t00, t11, t22, t33 = _series(a00, SOLVE), _series(a11, SOLVE), _series(a22, SOLVE), _series(a33, SOLVE)
    else:
        for j in range(BLOCK - 1):
            t00 = _eliminate(t00, a00, j)
            t11 = _eliminate(t11, a11, j)
            t22 = _eliminate(t22, a22, j)
            t33 = _eliminate(t33, a33, j)
    t10 = -tl.dot(t11, tl.dot(a10, t00, input_precision=SOLVE), input_precision=SOLVE)
    t21 = -tl.dot(t22, tl.dot(a21, t11, input_precision=SOLVE), input_precision=SOLVE)
    t32 = -tl.dot(t33, tl.dot(a32, t22, input_precision=SOLVE), input_precision=SOLVE)
    below = tl.dot(a20, t00, input_precision=SOLVE) + tl.dot(a21, t10, input_precision=SOLVE)
    t20 = -tl.dot(t22, below, input_precision=SOLVE)
    below = tl.dot(a31, t11, input_precision=SOLVE) + tl.dot(a32, t21, input_precision=SOLVE)
    t31 = -tl.dot(t33, below, input_precision=SOLVE)
    below = tl.dot(a30, t00, input_precision=SOLVE) + tl.dot(a31, t10, input_precision=SOLVE)
    below += tl.dot(a32, t20, input_precision=SOLVE)
    t30 = -tl.dot(t33, below, input_precision=SOLVE)
    _store_lower(solved + at * C * C, t00, t10, t11, t20, t21, t22, t30, t31, t32, t33, C)

    c00, c10, c11, c20, c21, c22, c30, c31, c32, c33 = _lower_products(q, q_step, k, k_step, left, K, BK, PRECISION)
    q0, q1, q2, q3 = scale * q0, scale * q1, scale * q2, scale * q3
    lower = index[:, None] >= index[None, :]
    c00 = tl.where(lower, _times(c00 * w0, q0, k0), 0.0)
    c11 = tl.where(lower, _times(c11 * w1, q1, k1), 0.0)
    c22 = tl.where(lower, _times(c22 * w2, q2, k2), 0.0)
    c33 = tl.where(lower, _times(c33 * w3, q3, k3), 0.0)
    q1, q2, q3 = q1 * from1, q2 * from2, q3 * from3
    c10 = _times(c10, q1, k10)
    c20, c21 = _times(c20, q2, k20), _times(c21, q2, k21)
    c30, c31, c32 = _times(c30, q3, k30), _times(c31, q3, k31), _times(c32, q3, k32)
    _store_lower(read + at * C * C, c00, c10, c11, c20, c21, c22, c30, c31, c32, c33, C)


@triton.jit
def walk(q, k, x, v, o, solved, read, factors, kept, initial, final, starts, updates, bounds, chunk_starts,
         time, chunks,
         q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, v_row, v_step, v_head,
         o_row, o_step, o_head,
         H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
         BK0: tl.constexpr, BK1: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr,
         PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Of one sequence, value head and block of value channels: all its chunks, one after the other.

    initial, final: [sequences, HV, K, V].  bounds, chunk_starts: [sequences + 1], of steps and of chunks.  KEEP: write
    the state before each chunk to starts [M, HV, K, V] and U to updates [M, HV, C, V], for a backward pass.
    """
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    HV: tl.constexpr = H * R
    program = tl.program_id(0).to(tl.int64)
    block = program % VALUE_BLOCKS
    value_head = (program // VALUE_BLOCKS) % HV
    sequence = program // (VALUE_BLOCKS * HV)
    head = value_head // R
    dtype = v.dtype.element_ty
    row, begin, length, chunk, count = course(sequence, bounds, chunk_starts, time, chunks, PACKED)
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
    q += row * q_row + begin * q_step + head * q_head
    k += row * k_row + begin * k_step + head * k_head
    v += row * v_row + begin * v_step + value_head * v_head
    o += row * o_row + begin * o_step + value_head * o_head
    if ERASE:
        x += row * x_row + begin * x_step + (value_head if ERASE_R else head) * x_head

    at = chunk * HV + value_head
    left = length
    for _ in range(count):
        live = (steps < left)[:, None] & inside[None, :]
        k0 = tile(k, k_step, left, 0, BK0, C, K)
        q0 = tile(q, q_step, left, 0, BK0, C, K)
        x0 = tile(x, x_step, left, 0, BK0, C, K) if ERASE else k0
        value = tl.load(v + (steps[:, None] * v_step + columns[None, :]), mask=live, other=0.0)
        inverse = tl.load(solved + at * C * C + (steps[:, None] * C + steps[None, :]))
        pairs = tl.load(read + at * C * C + (steps[:, None] * C + steps[None, :]))
        factor = factors + at * 4 * C + steps
        if KEEP:
            tl.store(starts + at * K * V + at0, s0.to(starts.dtype.element_ty), mask=mask0)
        state = s0.to(dtype)
        found = tl.dot(x0, state, input_precision=PRECISION)
        out = tl.dot(q0, state, input_precision=PRECISION)
        if BK1 > 0:
            k1 = tile(k, k_step, left, BK0, BK1, C, K)
            q1 = tile(q, q_step, left, BK0, BK1, C, K)
            x1 = tile(x, x_step, left, BK0, BK1, C, K) if ERASE else k1
            if KEEP:
                tl.store(starts + at * K * V + at1, s1.to(starts.dtype.element_ty), mask=mask1)
            state = s1.to(dtype)
            found += tl.dot(x1, state, input_precision=PRECISION)
            out += tl.dot(q1, state, input_precision=PRECISION)
        rest = tl.load(factor + 3 * C)[:, None] * value.to(tl.float32) - tl.load(factor)[:, None] * found
        update = tl.dot(inverse, rest.to(dtype), input_precision=PRECISION)
        if KEEP:
            tl.store(updates + at * C * V + (steps[:, None] * V + columns[None, :]),
                     update.to(updates.dtype.element_ty), mask=inside[None, :])  # fmt: skip
        out = tl.dot(pairs, update.to(dtype), tl.load(factor + C)[:, None] * out, input_precision=PRECISION)
        tl.store(o + (steps[:, None] * o_step + columns[None, :]), out.to(o.dtype.element_ty), mask=live)
        written = (tl.load(factor + 2 * C)[:, None] * update).to(dtype)
        over = tl.load(kept + at)
        s0 = tl.dot(tl.trans(k0), written, over * s0, input_precision=PRECISION)
        if BK1 > 0:
            s1 = tl.dot(tl.trans(k1), written, over * s1, input_precision=PRECISION)
        q += C * q_step
        k += C * k_step
        v += C * v_step
        o += C * o_step
        if ERASE:
            x += C * x_step
        left -= C
        at += HV

    if FINAL:
        tl.store(final + held + at0, s0, mask=mask0)
        if BK1 > 0:
            tl.store(final + held + at1, s1, mask=mask1)
