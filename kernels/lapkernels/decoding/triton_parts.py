"""What the decode-step kernels share: filters over the ring, activations, rounding, the norm at the end of a head."""

import triton
import triton.language as tl

__all__ = ["activate", "filter_token", "narrow_state", "normed_and_gated", "sigmoid", "softplus"]


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
def normed_and_gated(
    x, norm_ptr, gate_ptr, mask, width, eps, NORM: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr
):
    """`x / rms(x) * weight * f(gate)` of all the numbers of a head at once; x is zero where masked."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x) / width + eps) * tl.load(norm_ptr, mask=mask, other=0.0).to(tl.float32)
    if GATE:
        x = x * activate(tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32), SIGMOID)
    return x
