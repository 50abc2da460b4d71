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
def columns_of(base, step_stride, left, FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """As `tile`, transposed: [N, C]."""
    steps, channels = tl.arange(0, C), FIRST + tl.arange(0, N)
    mask = (steps < left)[None, :]
    if FIRST + N > WIDTH:
        mask = mask & (channels < WIDTH)[:, None]
    return tl.load(base + (steps[None, :] * step_stride + channels[:, None]), mask=mask, other=0.0)


@triton.jit
def scaled(x, by, FOLD: tl.constexpr):
    """By factors of rows or columns, in its own dtype."""
    if FOLD:
        return (x.to(tl.float32) * by).to(x.dtype)
    return x


@triton.jit
def fetch(ptr, COUNT: tl.constexpr):
    """Bring COUNT elements, which begin a line of the caches, from memory into the second cache."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    _fetch_each(ptr + tl.arange(0, COUNT // LINE) * LINE)


@triton.jit
def fetch_rows(base, step_stride, left, begin, first, C: tl.constexpr, N: tl.constexpr):
    """Channels first .. first + N of C steps from `begin` on, as far as there are any, into the second cache."""
    LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth
    rows = base + tl.minimum(begin + tl.arange(0, C), left - 1) * step_stride + first
    for channel in tl.static_range(0, N, LINE):
        _fetch_each(rows + channel)


@triton.jit
def _fetch_each(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
def _row_of_products(q, q_step, x, x_step, k, k_step, left, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                     NORM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Block row N of `q k^T` and of `x k^T` up to the diagonal, four blocks each, and its block of `q q^T`."""
    zero = tl.zeros([BLOCK, BLOCK], tl.float32)
    c0, c1, c2, c3, a0, a1, a2, a3, own = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for channel in range(0, K, BK):
        q_row = part(q + N * BLOCK * q_step, q_step, left - N * BLOCK, channel, BK, BLOCK, K)
        x_row = part(x + N * BLOCK * x_step, x_step, left - N * BLOCK, channel, BK, BLOCK, K)
        column = tl.trans(part(k, k_step, left, channel, BK, BLOCK, K))
        c0 = tl.dot(q_row, column, c0, input_precision=PRECISION)
        a0 = tl.dot(x_row, column, a0, input_precision=PRECISION)
        if N >= 1:
            column = tl.trans(part(k + BLOCK * k_step, k_step, left - BLOCK, channel, BK, BLOCK, K))
            c1 = tl.dot(q_row, column, c1, input_precision=PRECISION)
            a1 = tl.dot(x_row, column, a1, input_precision=PRECISION)
        if N >= 2:
            column = tl.trans(part(k + 2 * BLOCK * k_step, k_step, left - 2 * BLOCK, channel, BK, BLOCK, K))
            c2 = tl.dot(q_row, column, c2, input_precision=PRECISION)
            a2 = tl.dot(x_row, column, a2, input_precision=PRECISION)
        if N == 3:
            column = tl.trans(part(k + 3 * BLOCK * k_step, k_step, left - 3 * BLOCK, channel, BK, BLOCK, K))
            c3 = tl.dot(q_row, column, c3, input_precision=PRECISION)
            a3 = tl.dot(x_row, column, a3, input_precision=PRECISION)
        if NORM:
            own = tl.dot(q_row, tl.trans(q_row), own, input_precision=PRECISION)
    return c0, c1, c2, c3, a0, a1, a2, a3, own


@triton.jit
def _over_length(product, EPS: tl.constexpr):
    """One over the lengths of the steps whose products with each other are given: their squares lie on the diagonal."""
    index = tl.arange(0, BLOCK)
    return tl.rsqrt(tl.sum(tl.where(index[:, None] == index[None, :], product, 0.0), 1) + EPS)


@triton.jit
def _by_transposed(a, b, DTYPE: tl.constexpr):
    """`a b^T` of fp32 results, multiplied as DTYPE."""
    # The cast comes last: a transposition right before a product would go through shared memory, and need not.
    return tl.dot(a.to(DTYPE), tl.trans(b).to(DTYPE), input_precision="ieee")


@triton.jit
def _inverse(lower, DTYPE: tl.constexpr):
    """`(I + A)^-1` of a block, and its transpose, by products: of its blocks of four steps, then of them all.

    Each is a series that ends after its third power, so that no power grows much beyond the result. A product takes its
    second operand transposed: as tensor cores hold results, that moves nothing.
    """
    index = tl.arange(0, BLOCK)
    near = (index[:, None] // 4) == (index[None, :] // 4)
    identity = tl.where(index[:, None] == index[None, :], 1.0, tl.zeros([BLOCK, BLOCK], tl.float32))
    upper = _by_transposed(identity, lower, DTYPE)
    small, small_t = tl.where(near, lower, 0.0), tl.where(near, upper, 0.0)
    far_t = tl.where(near, 0.0, upper)
    squared_t = _by_transposed(small_t, small, DTYPE)
    first = identity - small
    inner = first + _by_transposed(first, squared_t, DTYPE)
    inner_t = identity - small_t + _by_transposed(squared_t, first, DTYPE)
    x, x_t = _by_transposed(inner, far_t, DTYPE), _by_transposed(far_t, inner, DTYPE)
    first = identity - x
    outer = first + _by_transposed(first, _by_transposed(x_t, x, DTYPE), DTYPE)
    return _by_transposed(outer, inner_t, DTYPE), _by_transposed(inner_t, outer, DTYPE)


@triton.jit
def _within(running, by_column, GATED: tl.constexpr):
    """The decay from each step of a block to each later one, times factors of columns; above the diagonal of no use."""
    if GATED:
        decay = tl.exp(tl.minimum(running[:, None] - running[None, :], 0.0).to(tl.float32))
        return decay * by_column[None, :]
    return tl.broadcast_to(by_column[None, :], (BLOCK, BLOCK))


@triton.jit
def _times(c, by_row, by_column):
    return c * by_row[:, None] * by_column[None, :]


@triton.jit
def _store_block(ptr, c, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(ptr + ((index + ROW * BLOCK)[:, None] * C + (index + COLUMN * BLOCK)[None, :]), c.to(ptr.dtype.element_ty))


@triton.jit
def _store_solved(ptr, u, beta, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr, KEEP: tl.constexpr):
    _store_block(ptr, beta[:, None] * u, ROW, COLUMN, C)
    if KEEP:
        _store_block(ptr + C * C, u, ROW, COLUMN, C)


@triton.jit
def _steps_of(x, step, left, DTYPE: tl.constexpr):
    """Of BLOCK steps; zeros past the sequence."""
    index = tl.arange(0, BLOCK)
    return tl.load(x + index * step, mask=index < left, other=0.0).to(DTYPE)


@triton.jit
def _running(g, step, left, carried, GATED: tl.constexpr):
    """Running sums of the log decay over BLOCK steps, from `carried` on; and the last of them."""
    if GATED:
        decay = _steps_of(g, step, left, carried.dtype)
        return tl.cumsum(decay, 0) + carried, carried + tl.sum(decay, 0)
    return tl.zeros([BLOCK], carried.dtype), carried


@triton.jit
def _store_row(factors, total, norm_q, norm_k, beta, running, last, unit_q, unit_k, scale, N: tl.constexpr,
               C: tl.constexpr, GATED: tl.constexpr, ERASE: tl.constexpr, NORM: tl.constexpr,
               KEEP: tl.constexpr):  # fmt: skip
    """What `prepare` writes of each of BLOCK steps."""
    index = tl.arange(0, BLOCK) + N * BLOCK
    from_start = tl.exp(running.to(tl.float32))
    tl.store(factors + index, from_start * (1.0 if ERASE else unit_k))
    tl.store(factors + C + index, scale * from_start * unit_q)
    tl.store(factors + 2 * C + index, tl.exp((last - running).to(tl.float32)) * unit_k)
    tl.store(factors + 3 * C + index, beta)
    if KEEP:
        if GATED:
            tl.store(total + index, running)
        if NORM:
            tl.store(norm_q + index, unit_q)
            tl.store(norm_k + index, unit_k)


@triton.jit
def prepare(q, k, x, g, beta, total, pairs, factors, kept, norms, table, bounds, scale, time, chunks, all_chunks,
            q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, g_row, g_step, g_head,
            beta_row, beta_step, beta_head,
            H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            GATED: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
            KEEP: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
            SOLVE: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: everything that no state enters.

    pairs: [M, HV, 2 or 3, C, C], M with the scale, `(I + A)^-1 diag(beta)` transposed, and for a backward pass the same
    without beta; blocks beyond the diagonal are not written.  factors: [M, HV, 4, C], by which rows of `X S`, of `Q S`
    and of U are multiplied, and beta.  kept: [M, HV], the decay over the chunk.  For a backward pass also total:
    [M, HV, C], running sums of the log decay, and norms: [2, M, H, C], one over the lengths of q and of k.
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
    left1, left2, left3 = left - BLOCK, left - 2 * BLOCK, left - 3 * BLOCK
    if AHEAD:
        # Later rows of blocks are loaded behind the stores of earlier ones.
        fetch_rows(k, k_step, left, 0, 0, C, K)
        fetch_rows(q, q_step, left, 0, 0, C, K)
    beta0 = _steps_of(beta, beta_step, left, tl.float32)
    beta1 = _steps_of(beta + BLOCK * beta_step, beta_step, left1, tl.float32)
    beta2 = _steps_of(beta + 2 * BLOCK * beta_step, beta_step, left2, tl.float32)
    beta3 = _steps_of(beta + 3 * BLOCK * beta_step, beta_step, left3, tl.float32)
    sum0, at1 = _running(g, g_step, left, tl.zeros([], total.dtype.element_ty), GATED)
    sum1, at2 = _running(g + BLOCK * g_step, g_step, left1, at1, GATED)
    sum2, at3 = _running(g + 2 * BLOCK * g_step, g_step, left2, at2, GATED)
    sum3, last = _running(g + 3 * BLOCK * g_step, g_step, left3, at3, GATED)

    if ERASE:
        x += row * x_row + first * x_step + (value_head if ERASE_R else head) * x_head
    else:
        x, x_step = k, k_step
    pairs += at * (3 if KEEP else 2) * C * C
    solved = pairs + C * C
    factors += at * 4 * C
    total += at * C
    norm_q = norms + (chunk.to(tl.int64) * H + head) * C
    norm_k = norm_q + (row * 0 + all_chunks) * H * C
    tl.store(kept + at, tl.exp(last.to(tl.float32)))
    ones = tl.full([BLOCK], 1.0, tl.float32)
    k0, k1, k2, k3, q0, q1, q2, q3 = ones, ones, ones, ones, ones, ones, ones, ones
    # Row by row of blocks, so that little is held at a time. Between blocks a decay is that from the earlier block on
    # to its border, times that over the blocks between, times that from the later block's border on: no exponential
    # a pair.
    strictly, lower = index[:, None] > index[None, :], index[:, None] >= index[None, :]

    c00, _, _, _, a00, _, _, _, own = _row_of_products(q, q_step, x, x_step, k, k_step, left, 0, K, BK, NORM, PRECISION)
    if NORM:
        k0, q0 = _over_length(a00, EPS), _over_length(own, EPS)
    _store_row(factors, total, norm_q, norm_k, beta0, sum0, last, q0, k0, scale, 0, C, GATED, ERASE, NORM, KEEP)
    strength, reading, within = beta0 * k0 if NORM else beta0, scale * q0, _within(sum0, k0, GATED)
    _store_block(pairs, tl.where(lower, c00 * within * reading[:, None], 0.0), 0, 0, C)
    _, u00 = _inverse(tl.where(strictly, a00 * within * strength[:, None], 0.0), SOLVE)
    _store_solved(solved, u00, beta0, 0, 0, C, KEEP)
    to0 = k0
    if GATED:
        to0 = k0 * tl.exp((at1 - sum0).to(tl.float32))

    c10, c11, _, _, a10, a11, _, _, own = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, 1, K, BK, NORM, PRECISION
    )
    if NORM:
        k1, q1 = _over_length(a11, EPS), _over_length(own, EPS)
    _store_row(factors, total, norm_q, norm_k, beta1, sum1, last, q1, k1, scale, 1, C, GATED, ERASE, NORM, KEEP)
    strength, reading, within = beta1 * k1 if NORM else beta1, scale * q1, _within(sum1, k1, GATED)
    _store_block(pairs, tl.where(lower, c11 * within * reading[:, None], 0.0), 1, 1, C)
    t11, u11 = _inverse(tl.where(strictly, a11 * within * strength[:, None], 0.0), SOLVE)
    _store_solved(solved, u11, beta1, 1, 1, C, KEEP)
    if GATED:
        since = tl.exp((sum1 - at1).to(tl.float32))
        strength, reading = strength * since, reading * since
    _store_block(pairs, _times(c10, reading, to0), 1, 0, C)
    n10 = _times(a10, -strength, to0)
    # u is t transposed: t10 = -t11 (a10 t00), hence u10 = (u00 (-a10)^T) u11, and so on.
    below = _by_transposed(u00, n10, SOLVE)
    u10 = _by_transposed(below, t11, SOLVE)
    _store_solved(solved, u10, beta0, 0, 1, C, KEEP)
    to1 = k1
    if GATED:
        to1 = k1 * tl.exp((at2 - sum1).to(tl.float32))
        over = tl.exp((at2 - at1).to(tl.float32))
        to0 = to0 * over

    c20, c21, c22, _, a20, a21, a22, _, own = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, 2, K, BK, NORM, PRECISION
    )
    if NORM:
        k2, q2 = _over_length(a22, EPS), _over_length(own, EPS)
    _store_row(factors, total, norm_q, norm_k, beta2, sum2, last, q2, k2, scale, 2, C, GATED, ERASE, NORM, KEEP)
    strength, reading, within = beta2 * k2 if NORM else beta2, scale * q2, _within(sum2, k2, GATED)
    _store_block(pairs, tl.where(lower, c22 * within * reading[:, None], 0.0), 2, 2, C)
    t22, u22 = _inverse(tl.where(strictly, a22 * within * strength[:, None], 0.0), SOLVE)
    _store_solved(solved, u22, beta2, 2, 2, C, KEEP)
    if GATED:
        since = tl.exp((sum2 - at2).to(tl.float32))
        strength, reading = strength * since, reading * since
    _store_block(pairs, _times(c20, reading, to0), 2, 0, C)
    n20 = _times(a20, -strength, to0)
    _store_block(pairs, _times(c21, reading, to1), 2, 1, C)
    n21 = _times(a21, -strength, to1)
    below = _by_transposed(u11, n21, SOLVE)
    u21 = _by_transposed(below, t22, SOLVE)
    _store_solved(solved, u21, beta1, 1, 2, C, KEEP)
    below = _by_transposed(u00, n20, SOLVE) + _by_transposed(u10, n21, SOLVE)
    u20 = _by_transposed(below, t22, SOLVE)
    _store_solved(solved, u20, beta0, 0, 2, C, KEEP)
    to2 = k2
    if GATED:
        to2 = k2 * tl.exp((at3 - sum2).to(tl.float32))
        over = tl.exp((at3 - at2).to(tl.float32))
        to0, to1 = to0 * over, to1 * over

    c30, c31, c32, c33, a30, a31, a32, a33, own = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, 3, K, BK, NORM, PRECISION
    )
    if NORM:
        k3, q3 = _over_length(a33, EPS), _over_length(own, EPS)
    _store_row(factors, total, norm_q, norm_k, beta3, sum3, last, q3, k3, scale, 3, C, GATED, ERASE, NORM, KEEP)
    strength, reading, within = beta3 * k3 if NORM else beta3, scale * q3, _within(sum3, k3, GATED)
    _store_block(pairs, tl.where(lower, c33 * within * reading[:, None], 0.0), 3, 3, C)
    t33, u33 = _inverse(tl.where(strictly, a33 * within * strength[:, None], 0.0), SOLVE)
    _store_solved(solved, u33, beta3, 3, 3, C, KEEP)
    if GATED:
        since = tl.exp((sum3 - at3).to(tl.float32))
        strength, reading = strength * since, reading * since
    _store_block(pairs, _times(c30, reading, to0), 3, 0, C)
    n30 = _times(a30, -strength, to0)
    _store_block(pairs, _times(c31, reading, to1), 3, 1, C)
    n31 = _times(a31, -strength, to1)
    _store_block(pairs, _times(c32, reading, to2), 3, 2, C)
    n32 = _times(a32, -strength, to2)
    below = _by_transposed(u22, n32, SOLVE)
    u32 = _by_transposed(below, t33, SOLVE)
    _store_solved(solved, u32, beta2, 2, 3, C, KEEP)
    below = _by_transposed(u11, n31, SOLVE) + _by_transposed(u21, n32, SOLVE)
    u31 = _by_transposed(below, t33, SOLVE)
    _store_solved(solved, u31, beta1, 1, 3, C, KEEP)
    below = _by_transposed(u00, n30, SOLVE) + _by_transposed(u10, n31, SOLVE) + _by_transposed(u20, n32, SOLVE)
    u30 = _by_transposed(below, t33, SOLVE)
    _store_solved(solved, u30, beta0, 0, 3, C, KEEP)


@triton.jit
def walk(q, k, x, v, o, pairs, factors, kept, initial, final, starts, updates, bounds, chunk_starts,
         time, chunks,
         q_row, q_step: tl.constexpr, q_head, k_row, k_step: tl.constexpr, k_head,
         x_row, x_step: tl.constexpr, x_head, v_row, v_step: tl.constexpr, v_head,
         o_row, o_step: tl.constexpr, o_head,
         H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
         BK0: tl.constexpr, BK1: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr,
         PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
         FOLD: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of one sequence, value head and block of value channels: all its chunks, one after the other.

    Steps' strides are constants, as a model's are, and need no registers.

    initial, final: [sequences, HV, K, V].  bounds, chunk_starts: [sequences + 1], of steps and of chunks.  KEEP: write
    the state before each chunk to starts [M, HV, K, V] and U to updates [M, HV, C, V], for a backward pass.
    """
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    HV: tl.constexpr = H * R
    SLOTS: tl.constexpr = 3 if KEEP else 2
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
    after = tl.load(kept + at, mask=count > 0, other=0.0)
    near, far = steps[:, None] // BLOCK, steps[None, :] // BLOCK
    for n in range(count):
        live = (steps < left)[:, None] & inside[None, :]
        more = n + 1 < count
        next_at = tl.where(more, at + HV, at)
        if AHEAD:
            fetch_rows(k, k_step, left, C, 0, C, K)
            fetch_rows(q, q_step, left, C, 0, C, K)
            if ERASE:
                fetch_rows(x, x_step, left, C, 0, C, K)
            fetch_rows(v, v_step, left, C, block.to(tl.int32) * BV, C, BV)
            fetch(pairs + next_at * SLOTS * C * C, 2 * C * C)
            fetch(factors + next_at * 4 * C, 4 * C)
        # What comes last is loaded one chunk ahead, being alone too small to be copied in the background.
        over = after
        after = tl.load(kept + next_at)
        factor = factors + at * 4 * C + steps
        pair = pairs + at * SLOTS * C * C + (steps[:, None] * C + steps[None, :])
        by_found, by_read = tl.load(factor), tl.load(factor + C)
        by_write = tl.load(factor + 2 * C)
        if ERASE or FOLD:
            x0 = tile(x if ERASE else k, x_step if ERASE else k_step, left, 0, BK0, C, K)
        q0 = tile(q, q_step, left, 0, BK0, C, K)
        if FOLD:
            k0 = columns_of(k, k_step, left, 0, BK0, C, K)
        else:
            k0 = tile(k, k_step, left, 0, BK0, C, K)
            x0 = x0 if ERASE else k0
            k0 = tl.trans(k0)
        value = tl.load(v + (steps[:, None] * v_step + columns[None, :]), mask=live, other=0.0)
        solved = tl.trans(tl.load(pair + C * C, mask=near <= far, other=0.0))
        reads = tl.load(pair, mask=near >= far, other=0.0)
        if KEEP:
            tl.store(starts + at * K * V + at0, s0.to(starts.dtype.element_ty), mask=mask0)
        state0 = s0.to(dtype)
        found = tl.dot(scaled(x0, by_found[:, None], FOLD), state0, input_precision=PRECISION)
        if BK1 > 0:
            if ERASE or FOLD:
                x1 = tile(x if ERASE else k, x_step if ERASE else k_step, left, BK0, BK1, C, K)
            q1 = tile(q, q_step, left, BK0, BK1, C, K)
            if FOLD:
                k1 = columns_of(k, k_step, left, BK0, BK1, C, K)
            else:
                k1 = tile(k, k_step, left, BK0, BK1, C, K)
                x1 = x1 if ERASE else k1
                k1 = tl.trans(k1)
            if KEEP:
                tl.store(starts + at * K * V + at1, s1.to(starts.dtype.element_ty), mask=mask1)
            state1 = s1.to(dtype)
            found = tl.dot(scaled(x1, by_found[:, None], FOLD), state1, found, input_precision=PRECISION)
        if not FOLD:
            out = tl.dot(q0, state0, input_precision=PRECISION)
            if BK1 > 0:
                out = tl.dot(q1, state1, out, input_precision=PRECISION)
            found *= by_found[:, None]
        rest = value.to(tl.float32) - found
        wide = tl.dot(solved, rest.to(dtype), input_precision=PRECISION)
        update = wide.to(dtype)
        if KEEP:
            tl.store(updates + at * C * V + (steps[:, None] * V + columns[None, :]), update, mask=inside[None, :])
        written = update
        if not FOLD:
            out = tl.dot(reads, update, by_read[:, None] * out, input_precision=PRECISION)
            written = (by_write[:, None] * wide).to(dtype)
        s0 = tl.dot(scaled(k0, by_write[None, :], FOLD), written, over * s0, input_precision=PRECISION)
        if BK1 > 0:
            s1 = tl.dot(scaled(k1, by_write[None, :], FOLD), written, over * s1, input_precision=PRECISION)
        if FOLD:
            out = tl.dot(scaled(q0, by_read[:, None], True), state0, input_precision=PRECISION)
            if BK1 > 0:
                out = tl.dot(scaled(q1, by_read[:, None], True), state1, out, input_precision=PRECISION)
            out = tl.dot(reads, update, out, input_precision=PRECISION)
        tl.store(o + (steps[:, None] * o_step + columns[None, :]), out.to(o.dtype.element_ty), mask=live)
        q += C * q_step
        k += C * k_step
        v += C * v_step
        o += C * o_step
        if ERASE:
            x += C * x_step
        left -= C
        at = next_at

    if FINAL:
        tl.store(final + held + at0, s0, mask=mask0)
        if BK1 > 0:
            tl.store(final + held + at1, s1, mask=mask1)


@triton.jit
def walk_turned(q, k, x, v, o, pairs, factors, kept, initial, final, starts, updates, bounds, chunk_starts,
         time, chunks,
         q_row, q_step: tl.constexpr, q_head, k_row, k_step: tl.constexpr, k_head,
         x_row, x_step: tl.constexpr, x_head, v_row, v_step: tl.constexpr, v_head,
         o_row, o_step: tl.constexpr, o_head,
         H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
         BK0: tl.constexpr, BK1: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr,
         PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
         AHEAD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """As `walk`, with everything but q, k and x turned around.

    The state is [BV, K]: as it leaves a product, so it enters the next one as its left operand, and so does U. Nothing
    but loads and the output goes through shared memory.

    initial, final: [sequences, HV, K, V].  bounds, chunk_starts: [sequences + 1], of steps and of chunks.  KEEP: write
    the state before each chunk to starts [M, HV, K, V] and U to updates [M, HV, C, V], for a backward pass.
    """
    VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    HV: tl.constexpr = H * R
    SLOTS: tl.constexpr = 3 if KEEP else 2
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
    at0 = rows0[None, :] * V + columns[:, None]
    mask0 = (rows0 < K)[None, :] & inside[:, None]
    held = (sequence * HV + value_head) * K * V
    if INITIAL:
        s0 = tl.load(initial + held + at0, mask=mask0, other=0.0).to(tl.float32)
    else:
        s0 = tl.zeros([BV, BK0], tl.float32)
    if BK1 > 0:
        rows1 = BK0 + tl.arange(0, BK1)
        at1 = rows1[None, :] * V + columns[:, None]
        mask1 = (rows1 < K)[None, :] & inside[:, None]
        if INITIAL:
            s1 = tl.load(initial + held + at1, mask=mask1, other=0.0).to(tl.float32)
        else:
            s1 = tl.zeros([BV, BK1], tl.float32)
    q += row * q_row + begin * q_step + head * q_head
    k += row * k_row + begin * k_step + head * k_head
    v += row * v_row + begin * v_step + value_head * v_head
    o += row * o_row + begin * o_step + value_head * o_head
    if ERASE:
        x += row * x_row + begin * x_step + (value_head if ERASE_R else head) * x_head

    at = chunk * HV + value_head
    left = length
    after = tl.load(kept + at, mask=count > 0, other=0.0)
    near, far = steps[:, None] // BLOCK, steps[None, :] // BLOCK
    for n in range(count):
        live = (steps < left)[:, None] & inside[None, :]
        more = n + 1 < count
        next_at = tl.where(more, at + HV, at)
        if AHEAD:
            fetch_rows(k, k_step, left, C, 0, C, K)
            fetch_rows(q, q_step, left, C, 0, C, K)
            if ERASE:
                fetch_rows(x, x_step, left, C, 0, C, K)
            fetch_rows(v, v_step, left, C, block.to(tl.int32) * BV, C, BV)
            fetch(pairs + next_at * SLOTS * C * C, 2 * C * C)
            fetch(factors + next_at * 4 * C, 4 * C)
        # What comes last is loaded one chunk ahead, being alone too small to be copied in the background.
        over = after
        after = tl.load(kept + next_at)
        factor = factors + at * 4 * C + steps
        pair = pairs + at * SLOTS * C * C + (steps[:, None] * C + steps[None, :])
        by_found, by_read = tl.load(factor), tl.load(factor + C)
        by_write = tl.load(factor + 2 * C)
        k0 = tile(k, k_step, left, 0, BK0, C, K)
        x0 = tile(x, x_step, left, 0, BK0, C, K) if ERASE else k0
        q0 = tile(q, q_step, left, 0, BK0, C, K)
        value = tl.trans(tl.load(v + (steps[:, None] * v_step + columns[None, :]), mask=live, other=0.0))
        solved = tl.load(pair + C * C, mask=near <= far, other=0.0)
        reads = tl.trans(tl.load(pair, mask=near >= far, other=0.0))
        if KEEP:
            tl.store(starts + at * K * V + at0, s0.to(starts.dtype.element_ty), mask=mask0)
        state0 = s0.to(dtype)
        found = tl.dot(state0, tl.trans(x0), input_precision=PRECISION)
        if BK1 > 0:
            k1 = tile(k, k_step, left, BK0, BK1, C, K)
            x1 = tile(x, x_step, left, BK0, BK1, C, K) if ERASE else k1
            q1 = tile(q, q_step, left, BK0, BK1, C, K)
            if KEEP:
                tl.store(starts + at * K * V + at1, s1.to(starts.dtype.element_ty), mask=mask1)
            state1 = s1.to(dtype)
            found = tl.dot(state1, tl.trans(x1), found, input_precision=PRECISION)
        found = (-by_found[None, :] * found).to(dtype)
        update = tl.dot(value, solved, input_precision=PRECISION)
        update = tl.dot(found, solved, update, input_precision=PRECISION)
        if KEEP:
            tl.store(updates + at * C * V + (steps[None, :] * V + columns[:, None]),
                     update.to(updates.dtype.element_ty), mask=inside[:, None])  # fmt: skip
        written, update = (by_write[None, :] * update).to(dtype), update.to(dtype)
        s0 = tl.dot(written, k0, over * s0, input_precision=PRECISION)
        out = tl.dot(state0, tl.trans(q0), input_precision=PRECISION)
        if BK1 > 0:
            s1 = tl.dot(written, k1, over * s1, input_precision=PRECISION)
            out = tl.dot(state1, tl.trans(q1), out, input_precision=PRECISION)
        out = tl.dot(update, reads, by_read[None, :] * out, input_precision=PRECISION)
        tl.store(o + (steps[:, None] * o_step + columns[None, :]), tl.trans(out.to(o.dtype.element_ty)), mask=live)
        q += C * q_step
        k += C * k_step
        v += C * v_step
        o += C * o_step
        if ERASE:
            x += C * x_step
        left -= C
        at = next_at

    if FINAL:
        tl.store(final + held + at0, s0, mask=mask0)
        if BK1 > 0:
            tl.store(final + held + at1, s1, mask=mask1)
