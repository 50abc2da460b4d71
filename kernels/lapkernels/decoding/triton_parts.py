"""What the decode-step kernels share: filters over the ring, activations, rounding, the norm at the end of a head."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "activate",
    "add2",
    "add3",
    "filter_pair",
    "filter_token",
    "load_tile",
    "mix_bits",
    "narrow_state",
    "norm_and_gate",
    "normed_and_gated",
    "part_of",
    "sigmoid",
    "softplus",
    "store_tile",
    "take_turn",
    "tile_rows",
]


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Wait for the kernel before this one, then let the next one begin.

    In this order no more than two kernels that follow one another run at once: what the one before the last wrote is
    there before this call, what the last one wrote only after it. EARLY: whether launches may begin early.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sigmoid(x):
    """`1 / (1 + e^-x)`, without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """`log(1 + e^x)`, to the last bits where it is small too: a slow gate's rate is all there.

    The GPU's logarithm is precise only away from 1, so `log1p(e)` is `2 atanh(z)`, `z = e / (2 + e) <= 1/3`, by its
    series, whose rest is below 1e-9 of it.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = z * z
    series = 1.0 + s * (
        1.0 / 3
        + s * (1.0 / 5 + s * (1.0 / 7 + s * (1.0 / 9 + s * (1.0 / 11 + s * (1.0 / 13 + s * (1.0 / 15 + s / 17))))))
    )
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def activate(x, SIGMOID: tl.constexpr):
    """The output gate's activation: sigmoid, or SiLU."""
    if SIGMOID:
        return sigmoid(x)
    return x * sigmoid(x)


@triton.jit
def filter_token(
    x_ptr,
    x_stride,
    ring_ptr,
    ring_stride,
    weight_ptr,
    weight_stride,
    bias_ptr,
    mask,
    t,
    position,
    T: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Some channels of token t of a step: raw as they came, and filtered and activated in fp32.

    Pointers are blocks, one for each channel; W = 0 means no convolution. Earlier tokens are those of the step, then
    those in the ring, then zeros.
    """
    raw = tl.load(x_ptr + t * x_stride, mask=mask, other=0.0)
    y = raw.to(tl.float32)
    if W > 0:
        y *= tl.load(weight_ptr + (W - 1) * weight_stride, mask=mask, other=0.0).to(tl.float32)
        for lag in tl.static_range(1, W):
            tap = tl.load(weight_ptr + (W - 1 - lag) * weight_stride, mask=mask, other=0.0).to(tl.float32)
            age = t - lag
            held = mask & (age < 0) & (position + age >= 0)
            old = tl.load(ring_ptr + ((position + age + R) % R) * ring_stride, mask=held, other=0.0)
            if T > 1:
                old += tl.load(x_ptr + age * x_stride, mask=mask & (age >= 0), other=0.0)
            y += old.to(tl.float32) * tap
        if BIAS:
            y += tl.load(bias_ptr, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        y = y * sigmoid(y)
    return raw, y


@triton.jit
def mix_bits(x):
    """A 32-bit word whose every bit depends on all bits of x: a permutation of words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def narrow_state(x, key, inside, STOCHASTIC: tl.constexpr, dtype: tl.constexpr):
    """fp32 to the state's dtype: to the nearest, or to bf16 up or down with the probability that keeps the mean.

    `key` is the block's 32-bit word, `inside` each number's own index in the block.
    """
    if STOCHASTIC:
        bits = mix_bits(key + inside.to(tl.uint32)) & 0xFFFF
        word = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
        # An infinity or NaN would be carried into another number.
        x = tl.where(tl.abs(x) < float("inf"), word.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def norm_and_gate(norm_ptr, gate_ptr, mask, NORM: tl.constexpr, GATE: tl.constexpr):
    """The norm's weights and the raw gate, in fp32; zeros for what there is not."""
    weight = tl.zeros(mask.shape, tl.float32)
    gate = tl.zeros(mask.shape, tl.float32)
    if NORM:
        weight = tl.load(norm_ptr, mask=mask, other=0.0).to(tl.float32)
    if GATE:
        gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    return weight, gate


@triton.jit
def normed_and_gated(x, weight, gate, width, eps, NORM: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr):
    """`x / rms(x) * weight * f(gate)` of all the numbers of a head at once; x is zero where there is none."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x) / width + eps) * weight
    if GATE:
        x = x * activate(gate, SIGMOID)
    return x


@triton.jit
def tile_rows(FIRST: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """Rows FIRST .. FIRST + N of a state in the order in which threads hold them, [N]: see `tile_offsets`."""
    number = tl.arange(0, N)
    return FIRST + (number % ROWS) * (N // ROWS) + number // ROWS


@triton.jit
def tile_offsets(columns, FIRST: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
             WHOLE: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr):  # fmt: skip
    """Where rows FIRST .. FIRST + N of a state's tile lie, [N, BV], and which of them there are.

    ROWS is what the threads of a program cover at once. The rows are dealt so that each thread gets neighbours: their
    offsets are constants of its load instructions instead of registers, and it finds their q and k side by side.
    """
    number = tl.arange(0, N)[:, None]
    at = (number % ROWS) * (N // ROWS * STRIDE_K) + columns[None, :] * STRIDE_V + (number // ROWS) * STRIDE_K
    mask = columns[None, :] >= 0
    if not WHOLE:
        mask = columns[None, :] < V
    if FIRST + N > K:
        mask = mask & (tile_rows(FIRST, N, ROWS)[:, None] < K)
    return at + FIRST * STRIDE_K, mask


@triton.jit
def load_tile(ptr, columns, live, FIRST: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
              V: tl.constexpr, WHOLE: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
              EVICT: tl.constexpr):  # fmt: skip
    """Rows of a state's tile, in fp32."""
    at, mask = tile_offsets(columns, FIRST, N, ROWS, K, V, WHOLE, STRIDE_K, STRIDE_V)
    return tl.load(ptr + at, mask=mask & live, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def store_tile(ptr, columns, live, state, key, FIRST: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
               K: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr, STRIDE_K: tl.constexpr,
               STRIDE_V: tl.constexpr, STOCHASTIC: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """The same rows, rounded and written."""
    at, mask = tile_offsets(columns, FIRST, N, ROWS, K, V, WHOLE, STRIDE_K, STRIDE_V)
    inside, _ = tile_offsets(columns, FIRST, N, ROWS, K, V, True, V, 1)
    value = narrow_state(state, key, inside, STOCHASTIC, ptr.dtype.element_ty)
    tl.store(ptr + at, value, mask=mask & live, eviction_policy=EVICT)


@triton.jit
def filter_pair(q_ptr, k_ptr, q_stride, k_stride, q_ring, k_ring, ring_stride, q_weight, k_weight, weight_stride,
                weight_tap, q_bias, k_bias, t, position, keep, K: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
                W: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, SILU_Q: tl.constexpr,
                SILU_K: tl.constexpr):  # fmt: skip
    """A key head's q and k for token t, N channels of which K count; the raw ones go into the ring if `keep`."""
    at = tl.arange(0, N)
    mask = at < K
    raw_q, q = filter_token(q_ptr + at, q_stride, q_ring + at, ring_stride, q_weight + at * weight_stride, weight_tap,
                            q_bias + at, mask, t, position, T, W, R, BIAS, SILU_Q)  # fmt: skip
    raw_k, k = filter_token(k_ptr + at, k_stride, k_ring + at, ring_stride, k_weight + at * weight_stride, weight_tap,
                            k_bias + at, mask, t, position, T, W, R, BIAS, SILU_K)  # fmt: skip
    if W > 0:
        kept = ((position + t) % R) * ring_stride
        tl.store(q_ring + at + kept, raw_q, mask=mask & keep)
        tl.store(k_ring + at + kept, raw_k, mask=mask & keep)
    return q, k


@triton.jit
def part_of(x, FIRST: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr):
    """Numbers FIRST .. FIRST + N of a vector of WIDTH, shaped to meet a tile; N divides FIRST and WIDTH.

    With several warps they go through shared memory by a gather: the compiler would otherwise find it cheaper to
    filter every channel again in each thread that needs it. One warp would gather by shuffles, a dear way, and needs
    no such care.
    """
    if GATHER:
        part = tl.gather(x, FIRST + tl.arange(0, N), 0)
    elif N == WIDTH:
        part = x
    else:
        pieces = tl.reshape(x, [WIDTH // N, N])
        part = tl.sum(tl.where(tl.arange(0, WIDTH // N)[:, None] == FIRST // N, pieces, 0.0), 0)
    return tl.reshape(tl.trans(tl.reshape(part, [ROWS, N // ROWS])), [N])[:, None]


@triton.jit
def add2(a0, b0, a1, b1):
    """Adds two reductions at once."""
    return a0 + a1, b0 + b1


@triton.jit
def add3(a0, b0, c0, a1, b1, c1):
    """Adds three reductions at once."""
    return a0 + a1, b0 + b1, c0 + c1
