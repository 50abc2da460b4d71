"""The step as one Triton kernel: the state is read once and written once; everything else rides along."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import (
    filter_pair,
    filter_token,
    load_tile,
    mix_bits,
    part_of,
    sigmoid,
    softplus,
    store_tile,
)


@triton.jit
def ssd_step_kernel(
    x_ptr, B_ptr, C_ptr, dt_ptr, gate_ptr, out_ptr, state_ptr, ring_ptr, weight_ptr, bias_ptr, A_log_ptr, D_ptr,
    dt_bias_ptr, norm_ptr, position_ptr, slots_ptr, commit_ptr, seed_ptr, counter_ptr, scratch_ptr,
    x_sb, x_st, x_sh, B_sb, B_st, B_sg, C_sb, C_st, C_sg, dt_sb, dt_st, gate_sb, gate_st, gate_sh,
    state_ss, state_sh, ring_ss, ring_sr, weight_sc, weight_sw, eps, lowest, highest,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_P: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, ROWS0: tl.constexpr, ROWS1: tl.constexpr,
    ROWS2: tl.constexpr, NN: tl.constexpr, BP: tl.constexpr, SPLITS: tl.constexpr,
    NORM_HEADS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, SKIP: tl.constexpr, DT_BIAS: tl.constexpr, LIMITED: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr,
    POSITION: tl.constexpr, SLOTS: tl.constexpr, COMMIT: tl.constexpr, STOCHASTIC: tl.constexpr,
    GATHER: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One program: BP channels of one head of one row, all N state channels of each.

    A tile is [N, BP]: rows are state channels. They come in parts of N0, N1, N2 (powers of two, the last masked).
    Where there is a norm, which spans heads, each program leaves its numbers in the scratch, and the last of those that
    share a norm group to arrive does the norm for all.
    """
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = (pid // SPLITS) % HEADS
    row = pid // (SPLITS * HEADS)
    group = head // (HEADS // GROUPS)
    row_wide = row.to(tl.int64)
    columns = split * BP + tl.arange(0, BP)
    inside = columns < P
    WHOLE: tl.constexpr = P == BP * SPLITS
    out_row = out_ptr + row_wide * (T * HEADS * P)

    # All that says where the row is, at once: what follows waits for memory twice, not four times.
    slot = row_wide
    if SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    position = 0
    old = row >= 0
    if POSITION:
        position = tl.load(position_ptr + row).to(tl.int32)
        # Nothing is read for a row's first token: its state is zero, whatever the slot holds.
        old = position > 0
    commit = T
    if COMMIT:
        commit = tl.load(commit_ptr + row).to(tl.int32)
    if SLOTS:  # noqa: SIM102 -- one is known when the kernel is compiled, the other when it runs
        # No position is negative; asked here, it is loaded before the slot is waited for.
        if (slot < 0) | (position < 0):
            for t in range(T):
                at = (t * HEADS + head) * P + columns
                tl.store(out_row + at, tl.zeros([BP], out_ptr.dtype.element_ty), mask=inside)
            return

    state_ptr += slot * state_ss + head * state_sh
    s0 = load_tile(state_ptr, columns, old, 0, N0, ROWS0, N, P, WHOLE, STRIDE_N, STRIDE_P, EVICT)
    if N1 > 0:
        s1 = load_tile(state_ptr, columns, old, N0, N1, ROWS1, N, P, WHOLE, STRIDE_N, STRIDE_P, EVICT)
    if N2 > 0:
        s2 = load_tile(state_ptr, columns, old, N0 + N1, N2, ROWS2, N, P, WHOLE, STRIDE_N, STRIDE_P, EVICT)
    # The loads above are issued before anything waits for those below; the assembler would move them down.
    tl.debug_barrier()

    x_ptr += row_wide * x_sb + head * x_sh
    B_ptr += row_wide * B_sb + group * B_sg
    C_ptr += row_wide * C_sb + group * C_sg
    dt_ptr += row_wide * dt_sb + head
    gate_ptr += row_wide * gate_sb + head * gate_sh
    ring_ptr += slot * ring_ss
    # Where B and C begin among the channels of the convolution.
    first_B = HEADS * P + group * N
    first_C = HEADS * P + GROUPS * N + group * N
    # One program of those that read a group keeps its raw inputs.
    keeps = (head % (HEADS // GROUPS) == 0) & (split == 0)

    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    key = tl.zeros((), tl.uint32)
    if STOCHASTIC:
        block = (slot * HEADS + head).to(tl.uint32)
        key = mix_bits(mix_bits(block) ^ tl.load(seed_ptr).to(tl.uint32))

    MEET: tl.constexpr = NORM and NORM_HEADS * SPLITS > 1
    norm_group = head // NORM_HEADS
    count_ptr = counter_ptr + row * (HEADS // NORM_HEADS) + norm_group
    GATED: tl.constexpr = GATE and (GATE_FIRST or not NORM)
    arrived = tl.zeros((), tl.int32)
    for t in range(T):
        # Everything is read before anything is waited for.
        at = head * P + columns
        raw, x = filter_token(x_ptr + columns, x_st, ring_ptr + at, ring_sr, weight_ptr + at * weight_sc, weight_sw,
                              bias_ptr + at, inside, t, position, T, W, R, BIAS, SILU)  # fmt: skip
        if GATED:
            gate = tl.load(gate_ptr + t * gate_st + columns, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + t * dt_st).to(tl.float32)
        if DT_BIAS:
            step += tl.load(dt_bias_ptr + head).to(tl.float32)
        step = softplus(step)
        if LIMITED:
            step = tl.minimum(tl.maximum(step, lowest), highest)
        decay = tl.exp(-rate * step)
        C, B = filter_pair(C_ptr, B_ptr, C_st, B_st, ring_ptr + first_C, ring_ptr + first_B, ring_sr,
                           weight_ptr + first_C * weight_sc, weight_ptr + first_B * weight_sc, weight_sc, weight_sw,
                           bias_ptr + first_C, bias_ptr + first_B, t, position, keeps & (t < commit), N, NN, T, W, R,
                           BIAS, SILU, SILU)  # fmt: skip
        CB = tl.sum(C * B)
        c0, b0 = part_of(C, 0, N0, ROWS0, NN, GATHER), part_of(B, 0, N0, ROWS0, NN, GATHER)
        if N1 > 0:
            c1, b1 = part_of(C, N0, N1, ROWS1, NN, GATHER), part_of(B, N0, N1, ROWS1, NN, GATHER)
        if N2 > 0:
            c2, b2 = part_of(C, N0 + N1, N2, ROWS2, NN, GATHER), part_of(B, N0 + N1, N2, ROWS2, NN, GATHER)
        if W > 0:
            tl.store(ring_ptr + at + ((position + t) % R) * ring_sr, raw, mask=inside & (t < commit))

        # Of the state before the write: S_new C = S C + (B . C) x.
        read = tl.sum(s0 * c0, 0)
        if N1 > 0:
            read += tl.sum(s1 * c1, 0)
        if N2 > 0:
            read += tl.sum(s2 * c2, 0)
        written = step * x
        s0 = decay * s0 + b0 * written[None, :]
        if N1 > 0:
            s1 = decay * s1 + b1 * written[None, :]
        if N2 > 0:
            s2 = decay * s2 + b2 * written[None, :]
        y = decay * read + CB * written
        if SKIP:
            y += x * tl.load(D_ptr + head).to(tl.float32)

        if GATED:
            y *= gate * sigmoid(gate)
        at += t * (HEADS * P)
        if NORM:
            tl.store(scratch_ptr + row_wide * (T * HEADS * P) + at, y, mask=inside)
        else:
            tl.store(out_row + at, y.to(out_ptr.dtype.element_ty), mask=inside)
        if MEET and T == 1:
            # All of this program's numbers are written before its arrival counts; the state, much longer on its way
            # and of no interest to the others, only then.
            tl.debug_barrier()
            arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")

        commits = commit == t + 1
        store_tile(state_ptr, columns, commits, s0, key, 0, N0, ROWS0, N, P, WHOLE, STRIDE_N, STRIDE_P, STOCHASTIC,
                   EVICT)  # fmt: skip
        if N1 > 0:
            store_tile(state_ptr, columns, commits, s1, key, N0, N1, ROWS1, N, P, WHOLE, STRIDE_N, STRIDE_P,
                       STOCHASTIC, EVICT)  # fmt: skip
        if N2 > 0:
            store_tile(state_ptr, columns, commits, s2, key, N0 + N1, N2, ROWS2, N, P, WHOLE, STRIDE_N, STRIDE_P,
                       STOCHASTIC, EVICT)  # fmt: skip

    if NORM:
        if not (MEET and T == 1):
            tl.debug_barrier()
        if MEET and T > 1:
            arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
        # The last to arrive sees everybody's numbers.
        if arrived == NORM_HEADS * SPLITS - 1:
            if MEET:
                tl.store(count_ptr, 0)
            gate_ptr += (norm_group * NORM_HEADS - head) * gate_sh
            for t in range(T):
                first = (t * HEADS + norm_group * NORM_HEADS) * P
                scratch_row = scratch_ptr + row_wide * (T * HEADS * P) + first
                squares = tl.zeros([CHUNK], tl.float32)
                for chunk in range(CHUNKS):
                    at = chunk * CHUNK + tl.arange(0, CHUNK)
                    y = tl.load(scratch_row + at, mask=at < NORM_HEADS * P, other=0.0, cache_modifier=".cg")
                    squares += y * y
                unit = tl.rsqrt(tl.sum(squares) / (NORM_HEADS * P) + eps)
                for chunk in range(CHUNKS):
                    at = chunk * CHUNK + tl.arange(0, CHUNK)
                    mask = at < NORM_HEADS * P
                    y = tl.load(scratch_row + at, mask=mask, other=0.0, cache_modifier=".cg") * unit
                    y *= tl.load(norm_ptr + norm_group * NORM_HEADS * P + at, mask=mask, other=0.0).to(tl.float32)
                    if GATE and not GATE_FIRST:
                        gate = tl.load(gate_ptr + t * gate_st + (at // P) * gate_sh + at % P, mask=mask, other=0.0)
                        gate = gate.to(tl.float32)
                        y *= gate * sigmoid(gate)
                    tl.store(out_row + first + at, y.to(out_ptr.dtype.element_ty), mask=mask)
