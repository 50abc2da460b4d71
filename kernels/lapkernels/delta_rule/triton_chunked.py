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

from lapkernels.decoding.triton_parts import sigmoid, softplus


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


@triton.jit
def operand_of(row, begin, chunk, head, value_head, of_row, of_step, of_head, C: tl.constexpr,
               BY_CHANNEL: tl.constexpr):  # fmt: skip
    """Where a sequence's q, k or x begins, as the caller gave it or as `decay_channels` wrote it."""
    if BY_CHANNEL:
        return chunk * C * of_step + value_head * of_head
    return row * of_row + begin * of_step + head * of_head


BLOCK: tl.constexpr = tl.constexpr(16)
"""Steps of a block of a chunk: one that tensor cores take, and that one warp inverts without waiting for another."""


@triton.jit
def _block_of(x, step, left, channel, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Of block N of a chunk the channels from `channel` on: [BLOCK, BK]."""
    return part(x + N * BLOCK * step, step, left - N * BLOCK, channel, BK, BLOCK, K)


@triton.jit
def _row_of_products(q, q_step, x, x_step, k, k_step, left, q_row, x_row, k0, k1, k2, k3, N: tl.constexpr,
                     K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Block row N of `q k^T` and of `x k^T` up to the diagonal, four blocks each, and its block of `q q^T`.

    Of q, x and k the first BK channels are given, and used where there are no others.
    """
    zero = tl.zeros([BLOCK, BLOCK], tl.float32)
    c0, c1, c2, c3, a0, a1, a2, a3, own = zero, zero, zero, zero, zero, zero, zero, zero, zero
    if K <= BK:
        c0 = tl.dot(q_row, tl.trans(k0), input_precision=PRECISION)
        a0 = tl.dot(x_row, tl.trans(k0), input_precision=PRECISION)
        if N >= 1:
            c1 = tl.dot(q_row, tl.trans(k1), input_precision=PRECISION)
            a1 = tl.dot(x_row, tl.trans(k1), input_precision=PRECISION)
        if N >= 2:
            c2 = tl.dot(q_row, tl.trans(k2), input_precision=PRECISION)
            a2 = tl.dot(x_row, tl.trans(k2), input_precision=PRECISION)
        if N == 3:
            c3 = tl.dot(q_row, tl.trans(k3), input_precision=PRECISION)
            a3 = tl.dot(x_row, tl.trans(k3), input_precision=PRECISION)
        if NORM:
            own = tl.dot(q_row, tl.trans(q_row), input_precision=PRECISION)
    for channel in range(0 if K > BK else BK, K, BK):
        q_more = _block_of(q, q_step, left, channel, N, K, BK)
        x_more = _block_of(x, x_step, left, channel, N, K, BK)
        column = tl.trans(_block_of(k, k_step, left, channel, 0, K, BK))
        c0 = tl.dot(q_more, column, c0, input_precision=PRECISION)
        a0 = tl.dot(x_more, column, a0, input_precision=PRECISION)
        if N >= 1:
            column = tl.trans(_block_of(k, k_step, left, channel, 1, K, BK))
            c1 = tl.dot(q_more, column, c1, input_precision=PRECISION)
            a1 = tl.dot(x_more, column, a1, input_precision=PRECISION)
        if N >= 2:
            column = tl.trans(_block_of(k, k_step, left, channel, 2, K, BK))
            c2 = tl.dot(q_more, column, c2, input_precision=PRECISION)
            a2 = tl.dot(x_more, column, a2, input_precision=PRECISION)
        if N == 3:
            column = tl.trans(_block_of(k, k_step, left, channel, 3, K, BK))
            c3 = tl.dot(q_more, column, c3, input_precision=PRECISION)
            a3 = tl.dot(x_more, column, a3, input_precision=PRECISION)
        if NORM:
            own = tl.dot(q_more, tl.trans(q_more), own, input_precision=PRECISION)
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
def store_inverse(solved, a00, a11, a22, a33, n10, n20, n21, n30, n31, n32, beta0, beta1, beta2, beta3,
                  C: tl.constexpr, KEEP: tl.constexpr, SOLVE: tl.constexpr):  # fmt: skip
    """Invert `I + A` of a chunk, given the blocks on the diagonal of A and those of -A below it, and write `solved`."""
    _, u00 = _inverse(a00, SOLVE)
    t11, u11 = _inverse(a11, SOLVE)
    t22, u22 = _inverse(a22, SOLVE)
    t33, u33 = _inverse(a33, SOLVE)
    # u is t transposed: t10 = -t11 (a10 t00), hence u10 = (u00 (-a10)^T) u11, and so on.
    below = _by_transposed(u00, n10, SOLVE)
    u10 = _by_transposed(below, t11, SOLVE)
    below = _by_transposed(u11, n21, SOLVE)
    u21 = _by_transposed(below, t22, SOLVE)
    below = _by_transposed(u22, n32, SOLVE)
    u32 = _by_transposed(below, t33, SOLVE)
    below = _by_transposed(u00, n20, SOLVE) + _by_transposed(u10, n21, SOLVE)
    u20 = _by_transposed(below, t22, SOLVE)
    below = _by_transposed(u11, n31, SOLVE) + _by_transposed(u21, n32, SOLVE)
    u31 = _by_transposed(below, t33, SOLVE)
    below = _by_transposed(u00, n30, SOLVE) + _by_transposed(u10, n31, SOLVE) + _by_transposed(u20, n32, SOLVE)
    u30 = _by_transposed(below, t33, SOLVE)
    _store_solved(solved, u00, beta0, 0, 0, C, KEEP)
    _store_solved(solved, u11, beta1, 1, 1, C, KEEP)
    _store_solved(solved, u22, beta2, 2, 2, C, KEEP)
    _store_solved(solved, u33, beta3, 3, 3, C, KEEP)
    _store_solved(solved, u10, beta0, 0, 1, C, KEEP)
    _store_solved(solved, u20, beta0, 0, 2, C, KEEP)
    _store_solved(solved, u21, beta1, 1, 2, C, KEEP)
    _store_solved(solved, u30, beta0, 0, 3, C, KEEP)
    _store_solved(solved, u31, beta1, 1, 3, C, KEEP)
    _store_solved(solved, u32, beta2, 2, 3, C, KEEP)


@triton.jit
def _steps_of(x, step, left, DTYPE: tl.constexpr):
    """Of BLOCK steps; zeros past the sequence."""
    index = tl.arange(0, BLOCK)
    return tl.load(x + index * step, mask=index < left, other=0.0).to(DTYPE)


@triton.jit
def _strengths(beta, step, left, strength, RAW: tl.constexpr):
    """Write strengths of BLOCK steps; RAW: from what is before their sigmoid. Zeros past the sequence."""
    found = _steps_of(beta, step, left, tl.float32)
    if RAW:
        found = tl.where(tl.arange(0, BLOCK) < left, strength * sigmoid(found), 0.0)
    return found


@triton.jit
def _running(g, step, left, carried, rate, bias, GATED: tl.constexpr, RATED: tl.constexpr):
    """Running sums of the log decay over BLOCK steps, from `carried` on; and the last of them.

    RATED: g is the step before its softplus, which `rate` turns into a log decay.
    """
    if GATED:
        if RATED:
            decay = rate * softplus(_steps_of(g, step, left, tl.float32) + bias)
            decay = tl.where(tl.arange(0, BLOCK) < left, -decay, 0.0).to(carried.dtype)
        else:
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
def prepare(q, k, x, g, beta, A_log, dt_bias, total, pairs, factors, kept, norms, table, bounds, scale, strength,
            time, chunks, all_chunks,
            q_row, q_step, q_head, k_row, k_step, k_head, x_row, x_step, x_head, g_row, g_step, g_head,
            beta_row, beta_step, beta_head,
            H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            GATED: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
            KEEP: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
            RAW: tl.constexpr, RATED: tl.constexpr, DT_BIAS: tl.constexpr):  # fmt: skip
    """Of one chunk and value head: everything that no state enters.

    RAW, RATED: beta and g are what comes before their activations, `strength sigmoid(beta)` and
    `-exp(A_log) softplus(g + dt_bias)`, whose parameters are [HV].
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
    beta0 = _strengths(beta, beta_step, left, strength, RAW)
    beta1 = _strengths(beta + BLOCK * beta_step, beta_step, left1, strength, RAW)
    beta2 = _strengths(beta + 2 * BLOCK * beta_step, beta_step, left2, strength, RAW)
    beta3 = _strengths(beta + 3 * BLOCK * beta_step, beta_step, left3, strength, RAW)
    rate, bias = 0.0, 0.0
    if RATED:
        rate = tl.exp(tl.load(A_log + value_head).to(tl.float32))
    if DT_BIAS:
        bias = tl.load(dt_bias + value_head).to(tl.float32)
    sum0, at1 = _running(g, g_step, left, tl.zeros([], total.dtype.element_ty), rate, bias, GATED, RATED)
    sum1, at2 = _running(g + BLOCK * g_step, g_step, left1, at1, rate, bias, GATED, RATED)
    sum2, at3 = _running(g + 2 * BLOCK * g_step, g_step, left2, at2, rate, bias, GATED, RATED)
    sum3, last = _running(g + 3 * BLOCK * g_step, g_step, left3, at3, rate, bias, GATED, RATED)

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
    k_of0 = _block_of(k, k_step, left, 0, 0, K, BK)
    k_of1 = _block_of(k, k_step, left, 0, 1, K, BK)
    k_of2 = _block_of(k, k_step, left, 0, 2, K, BK)
    k_of3 = _block_of(k, k_step, left, 0, 3, K, BK)
    q_of0 = _block_of(q, q_step, left, 0, 0, K, BK)
    q_of1 = _block_of(q, q_step, left, 0, 1, K, BK)
    q_of2 = _block_of(q, q_step, left, 0, 2, K, BK)
    q_of3 = _block_of(q, q_step, left, 0, 3, K, BK)
    x_of0, x_of1, x_of2, x_of3 = k_of0, k_of1, k_of2, k_of3
    if ERASE:
        x_of0 = _block_of(x, x_step, left, 0, 0, K, BK)
        x_of1 = _block_of(x, x_step, left, 0, 1, K, BK)
        x_of2 = _block_of(x, x_step, left, 0, 2, K, BK)
        x_of3 = _block_of(x, x_step, left, 0, 3, K, BK)
    c00, _, _, _, a00, _, _, _, own0 = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, q_of0, x_of0, k_of0, k_of0, k_of0, k_of0, 0, K, BK, NORM, PRECISION
    )
    c10, c11, _, _, a10, a11, _, _, own1 = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, q_of1, x_of1, k_of0, k_of1, k_of1, k_of1, 1, K, BK, NORM, PRECISION
    )
    c20, c21, c22, _, a20, a21, a22, _, own2 = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, q_of2, x_of2, k_of0, k_of1, k_of2, k_of2, 2, K, BK, NORM, PRECISION
    )
    c30, c31, c32, c33, a30, a31, a32, a33, own3 = _row_of_products(
        q, q_step, x, x_step, k, k_step, left, q_of3, x_of3, k_of0, k_of1, k_of2, k_of3, 3, K, BK, NORM, PRECISION
    )
    ones = tl.full([BLOCK], 1.0, tl.float32)
    k0, k1, k2, k3, q0, q1, q2, q3 = ones, ones, ones, ones, ones, ones, ones, ones
    if NORM:
        k0, q0 = _over_length(a00, EPS), _over_length(own0, EPS)
        k1, q1 = _over_length(a11, EPS), _over_length(own1, EPS)
        k2, q2 = _over_length(a22, EPS), _over_length(own2, EPS)
        k3, q3 = _over_length(a33, EPS), _over_length(own3, EPS)
    _store_row(factors, total, norm_q, norm_k, beta0, sum0, last, q0, k0, scale, 0, C, GATED, ERASE, NORM, KEEP)
    _store_row(factors, total, norm_q, norm_k, beta1, sum1, last, q1, k1, scale, 1, C, GATED, ERASE, NORM, KEEP)
    _store_row(factors, total, norm_q, norm_k, beta2, sum2, last, q2, k2, scale, 2, C, GATED, ERASE, NORM, KEEP)
    _store_row(factors, total, norm_q, norm_k, beta3, sum3, last, q3, k3, scale, 3, C, GATED, ERASE, NORM, KEEP)
    # Between blocks a decay is that from the earlier block on to its border, times that over the blocks between, times
    # that from the later block's border on: no exponential a pair.
    strictly, lower = index[:, None] > index[None, :], index[:, None] >= index[None, :]
    strength0, reading0, within0 = beta0 * k0 if NORM else beta0, scale * q0, _within(sum0, k0, GATED)
    strength1, reading1, within1 = beta1 * k1 if NORM else beta1, scale * q1, _within(sum1, k1, GATED)
    strength2, reading2, within2 = beta2 * k2 if NORM else beta2, scale * q2, _within(sum2, k2, GATED)
    strength3, reading3, within3 = beta3 * k3 if NORM else beta3, scale * q3, _within(sum3, k3, GATED)
    _store_block(pairs, tl.where(lower, c00 * within0 * reading0[:, None], 0.0), 0, 0, C)
    _store_block(pairs, tl.where(lower, c11 * within1 * reading1[:, None], 0.0), 1, 1, C)
    _store_block(pairs, tl.where(lower, c22 * within2 * reading2[:, None], 0.0), 2, 2, C)
    _store_block(pairs, tl.where(lower, c33 * within3 * reading3[:, None], 0.0), 3, 3, C)
    a00 = tl.where(strictly, a00 * within0 * strength0[:, None], 0.0)
    a11 = tl.where(strictly, a11 * within1 * strength1[:, None], 0.0)
    a22 = tl.where(strictly, a22 * within2 * strength2[:, None], 0.0)
    a33 = tl.where(strictly, a33 * within3 * strength3[:, None], 0.0)
    to0, to1, to2 = k0, k1, k2
    if GATED:
        since = tl.exp((sum1 - at1).to(tl.float32))
        strength1, reading1 = strength1 * since, reading1 * since
        since = tl.exp((sum2 - at2).to(tl.float32))
        strength2, reading2 = strength2 * since, reading2 * since
        since = tl.exp((sum3 - at3).to(tl.float32))
        strength3, reading3 = strength3 * since, reading3 * since
        to0 = k0 * tl.exp((at1 - sum0).to(tl.float32))
        to1 = k1 * tl.exp((at2 - sum1).to(tl.float32))
        to2 = k2 * tl.exp((at3 - sum2).to(tl.float32))
    to20, to31, to30 = to0, to1, to0
    if GATED:
        to20, to31 = to0 * tl.exp((at2 - at1).to(tl.float32)), to1 * tl.exp((at3 - at2).to(tl.float32))
        to30 = to0 * tl.exp((at3 - at1).to(tl.float32))
    _store_block(pairs, _times(c10, reading1, to0), 1, 0, C)
    _store_block(pairs, _times(c20, reading2, to20), 2, 0, C)
    _store_block(pairs, _times(c21, reading2, to1), 2, 1, C)
    _store_block(pairs, _times(c30, reading3, to30), 3, 0, C)
    _store_block(pairs, _times(c31, reading3, to31), 3, 1, C)
    _store_block(pairs, _times(c32, reading3, to2), 3, 2, C)
    n10 = _times(a10, -strength1, to0)
    n20 = _times(a20, -strength2, to20)
    n21 = _times(a21, -strength2, to1)
    n30 = _times(a30, -strength3, to30)
    n31 = _times(a31, -strength3, to31)
    n32 = _times(a32, -strength3, to2)
    store_inverse(solved, a00, a11, a22, a33, n10, n20, n21, n30, n31, n32, beta0, beta1, beta2, beta3, C, KEEP, SOLVE)


@triton.jit
def _tile_now(base, step_stride, left, FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
              NOW: tl.constexpr):  # fmt: skip
    """As `tile`; NOW: in no pipeline, which takes no load behind a condition. The condition always holds."""
    if NOW:
        found = tl.zeros([C, N], base.dtype.element_ty)
        if left > 0:
            found = tile(base, step_stride, left, FIRST, N, C, WIDTH)
    else:
        found = tile(base, step_stride, left, FIRST, N, C, WIDTH)
    return found


@triton.jit
def walk(q, k, x, v, o, pairs, factors, kept, initial, final, starts, updates, bounds, chunk_starts,
         time, chunks,
         q_row, q_step: tl.constexpr, q_head, k_row, k_step: tl.constexpr, k_head,
         x_row, x_step: tl.constexpr, x_head, v_row, v_step: tl.constexpr, v_head,
         o_row, o_step: tl.constexpr, o_head,
         H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
         BK0: tl.constexpr, BK1: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, ERASE_R: tl.constexpr,
         PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
         BY_CHANNEL: tl.constexpr, Q_LATE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of one sequence, value head and block of value channels: all its chunks, one after the other.

    Steps' strides are constants, as a model's are, and need no registers.  Q_LATE: load q for the chunk at hand alone,
    which leaves shared memory for another program.

    BY_CHANNEL: q, k and x are of `decay_channels`, [M C, HV, K] each, and kept is [M, HV, K].

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
    q += operand_of(row, begin, chunk, head, value_head, q_row, q_step, q_head, C, BY_CHANNEL)
    k += operand_of(row, begin, chunk, head, value_head, k_row, k_step, k_head, C, BY_CHANNEL)
    v += row * v_row + begin * v_step + value_head * v_head
    o += row * o_row + begin * o_step + value_head * o_head
    if ERASE:
        x_head_here = value_head if ERASE_R else head
        x += operand_of(row, begin, chunk, x_head_here, value_head, x_row, x_step, x_head, C, BY_CHANNEL)

    at = chunk * HV + value_head
    left = length
    if BY_CHANNEL:
        after0 = tl.load(kept + at * K + rows0, mask=(rows0 < K) & (count > 0), other=0.0)
        if BK1 > 0:
            after1 = tl.load(kept + at * K + rows1, mask=(rows1 < K) & (count > 0), other=0.0)
    else:
        after = tl.load(kept + at, mask=count > 0, other=0.0)
    near, far = steps[:, None] // BLOCK, steps[None, :] // BLOCK
    for n in range(count):
        live = (steps < left)[:, None] & inside[None, :]
        more = n + 1 < count
        next_at = tl.where(more, at + HV, at)
        # What comes last is loaded one chunk ahead, being alone too small to be copied in the background.
        if BY_CHANNEL:
            over0 = after0[:, None]
            after0 = tl.load(kept + next_at * K + rows0, mask=rows0 < K, other=0.0)
            if BK1 > 0:
                over1 = after1[:, None]
                after1 = tl.load(kept + next_at * K + rows1, mask=rows1 < K, other=0.0)
        else:
            over0 = after
            over1 = after
            after = tl.load(kept + next_at)
        factor = factors + at * 4 * C + steps
        pair = pairs + at * SLOTS * C * C + (steps[:, None] * C + steps[None, :])
        by_found, by_read = tl.load(factor), tl.load(factor + C)
        by_write = tl.load(factor + 2 * C)
        k0 = tile(k, k_step, left, 0, BK0, C, K)
        x0 = tile(x, x_step, left, 0, BK0, C, K) if ERASE else k0
        q0 = _tile_now(q, q_step, left, 0, BK0, C, K, Q_LATE)
        value = tl.load(v + (steps[:, None] * v_step + columns[None, :]), mask=live, other=0.0)
        solved = tl.trans(tl.load(pair + C * C, mask=near <= far, other=0.0))
        reads = tl.load(pair, mask=near >= far, other=0.0)
        if KEEP:
            tl.store(starts + at * K * V + at0, s0.to(starts.dtype.element_ty), mask=mask0)
        state0 = s0.to(dtype)
        found = tl.dot(x0, state0, input_precision=PRECISION)
        if BK1 > 0:
            k1 = tile(k, k_step, left, BK0, BK1, C, K)
            x1 = tile(x, x_step, left, BK0, BK1, C, K) if ERASE else k1
            q1 = _tile_now(q, q_step, left, BK0, BK1, C, K, Q_LATE)
            if KEEP:
                tl.store(starts + at * K * V + at1, s1.to(starts.dtype.element_ty), mask=mask1)
            state1 = s1.to(dtype)
            found = tl.dot(x1, state1, found, input_precision=PRECISION)
        out = tl.dot(q0, state0, input_precision=PRECISION)
        if BK1 > 0:
            out = tl.dot(q1, state1, out, input_precision=PRECISION)
        rest = value.to(tl.float32) - by_found[:, None] * found
        wide = tl.dot(solved, rest.to(dtype), input_precision=PRECISION)
        update = wide.to(dtype)
        if KEEP:
            tl.store(updates + at * C * V + (steps[:, None] * V + columns[None, :]), update, mask=inside[None, :])
        out = tl.dot(reads, update, by_read[:, None] * out, input_precision=PRECISION)
        written = (by_write[:, None] * wide).to(dtype)
        s0 = tl.dot(tl.trans(k0), written, over0 * s0, input_precision=PRECISION)
        if BK1 > 0:
            s1 = tl.dot(tl.trans(k1), written, over1 * s1, input_precision=PRECISION)
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
