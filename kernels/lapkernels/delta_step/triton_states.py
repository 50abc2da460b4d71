"""The states of a step of three kernels, cut so that a program waits for memory twice and never in between.

A thread holds 16 bytes of one row in each block of R rows. Of q and k it loads what it needs itself: handed on through
shared memory they would put barriers between the loads, each of which would then wait for the one before.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import add2, mix_bits, narrow_state, take_turn

GATES: tl.constexpr = tl.constexpr(4)
"""Numbers of a head: write strength, decay, query feedback, and one that is not used, for the alignment."""


@triton.jit
def delta_states_kernel(
    state_ptr, pairs_ptr, products_ptr, values_ptr, gates_ptr, factors_ptr, position_ptr, slots_ptr, seed_ptr,
    state_ss, state_sh, half,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, DECAY: tl.constexpr,
    LAMBDA: tl.constexpr, POSITION: tl.constexpr, SLOTS: tl.constexpr, STOCHASTIC: tl.constexpr, TWO: tl.constexpr,
    EVICT: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BV value channels of a value head of a row, all K channels, as blocks [R, BV].

    pairs: [B, H, K, 2], k and q of a channel side by side.  TWO: the state is bf16, and is loaded as words
    of two numbers.  half: 16, told when the kernel runs.  What is read takes the place of v.
    """
    pid = tl.program_id(0)
    split, head, row = pid % SPLITS, (pid // SPLITS) % HV, (pid // (SPLITS * HV)).to(tl.int64)
    BLOCKS: tl.constexpr = (K + R - 1) // R
    WHOLE: tl.constexpr = V == BV * SPLITS
    UNIT: tl.constexpr = 2 if TWO else 1
    within, column = tl.arange(0, R)[:, None], split * BV + tl.arange(0, BV)[None, :]
    inside = _inside(within, column, V, WHOLE)
    slot = row
    if SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    position = 0
    old = row >= 0
    if POSITION:
        position = tl.load(position_ptr + row).to(tl.int32)
        old = position > 0
    live = (slot >= 0) & (position >= 0)
    old = old & live
    state_ptr += slot * state_ss + head * state_sh

    words_ptr = state_ptr.to(tl.pointer_type(tl.int32)) if TWO else state_ptr
    word = split * (BV // UNIT) + tl.arange(0, BV // UNIT)[None, :]
    place, held = within * (STRIDE_K // UNIT) + word * STRIDE_V, _inside(within, word, V // UNIT, WHOLE) & old
    blocks = ()
    for i in tl.static_range(BLOCKS):
        there = _rows(held, within, i * R, R, K)
        words = tl.load(words_ptr + (place + i * (R * STRIDE_K // UNIT)), mask=there, other=0, eviction_policy=EVICT)
        blocks = blocks + (words,)  # noqa: RUF005 -- the language has no unpacking
    # All of that is on its way while the kernel before this one ends: it writes none of it.
    take_turn(EARLY)
    if not live:
        return

    first = inside & (within == 0)
    own, key_head = row * HV + head, row * H + head // (HV // H)
    pairs_ptr = pairs_ptr.to(tl.pointer_type(tl.int64)) + key_head * K
    factors_ptr += own * K
    product = tl.load(products_ptr + key_head)
    seen = product.to(tl.int32, bitcast=True) + tl.zeros([R], tl.int32)
    k, q, factors = (), (), ()
    for i in tl.static_range(BLOCKS):
        # Fewer than there are threads: the compiler then loads each thread's own, instead of handing them on.
        key = i * R + tl.arange(0, R)
        if (i + 1) * R > K:
            both = tl.load(pairs_ptr + key, mask=key < K, other=0, eviction_policy=KEPT)
        else:
            both = tl.load(pairs_ptr + key, eviction_policy=KEPT)
        seen ^= both.to(tl.int32)
        k = k + (_low(both)[:, None],)  # noqa: RUF005
        q = q + (_high(both)[:, None],)  # noqa: RUF005
        if DECAY == 2:
            factors = factors + (tl.load(factors_ptr + key, mask=key < K, other=0.0)[:, None],)  # noqa: RUF005
    # By the threads of the first row, in the columns that they have of the state.
    values_ptr += own * V + column + within * 0
    v = tl.load(values_ptr, mask=first, other=0.0, eviction_policy=KEPT)
    gates_ptr += own * GATES
    both = tl.load(gates_ptr.to(tl.pointer_type(tl.int64)))
    beta, decay = _low(both), _high(both)
    if LAMBDA:
        feedback = tl.load(gates_ptr + 2)
    key = tl.zeros((), tl.uint32)
    if STOCHASTIC:
        key = mix_bits(mix_bits((slot * HV + head).to(tl.uint32)) ^ tl.load(seed_ptr).to(tl.uint32))
    # No bits, but only after q, k and their product have come. The assembler takes the state for loaded and would put
    # what needs it, and with it the wait, in front of some of these loads.
    nothing = (seen & (half - 16))[:, None]
    decay = (decay.to(tl.int32, bitcast=True) | nothing).to(tl.float32, bitcast=True)

    # Both reductions are of the state before the write: S_new^T q = S^T q + (k . q) u.
    found, read = -v, tl.zeros([R, BV], tl.float32)
    for i in tl.static_range(BLOCKS):
        s = _widened(blocks[i], half | nothing, TWO)
        if DECAY == 2:
            s *= factors[i]
        elif not TWO:
            s *= decay
        if TWO and DECAY != 2:
            found += s * (k[i] * decay)
            read += s * (q[i] * decay)
        else:
            found += s * k[i]
            read += s * q[i]
    found, read = tl.reduce((found, read), 0, add2)
    found, read = tl.expand_dims(found, 0), tl.expand_dims(read, 0)
    if LAMBDA:
        found += read * feedback
    update = -beta * found
    for i in tl.static_range(BLOCKS):
        # Widened once more: kept from above, the state would take twice the registers.
        s = _widened(blocks[i], half, TWO)
        if DECAY == 2:
            s *= factors[i]
        else:
            s *= decay
        new = narrow_state(
            s + k[i] * update, key, (i * R + within) * V + column, STOCHASTIC, state_ptr.dtype.element_ty
        )
        tl.store(state_ptr + (within * STRIDE_K + column * STRIDE_V + i * (R * STRIDE_K)), new,
                 mask=_rows(inside, within, i * R, R, K), eviction_policy=EVICT)  # fmt: skip
    tl.store(values_ptr, read + product * update, mask=first, eviction_policy=KEPT)


@triton.jit
def _inside(within, column, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Which columns of a block there are, for each of its rows."""
    if WHOLE:
        return (within >= 0) & (column >= 0)
    return (within >= 0) & (column < WIDTH)


@triton.jit
def _rows(inside, within, FIRST: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Of these, those in rows that there are."""
    if FIRST + R > K:
        return inside & (within < K - FIRST)
    return inside


@triton.jit
def _low(both):
    """The first of two fp32 numbers that were loaded as one."""
    return (both & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _high(both):
    """The second."""
    return (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _widened(words, half, TWO: tl.constexpr):
    """A block of a state in fp32. A compiler that does not know `half` does it as often as it is said."""
    if TWO:
        low = (words << half).to(tl.float32, bitcast=True)
        high = (words & ((half * 0 - 1) << half)).to(tl.float32, bitcast=True)
        return tl.interleave(low, high)
    else:  # What is returned has another shape.
        return words.to(tl.float32)
