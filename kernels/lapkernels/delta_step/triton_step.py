"""The step as one Triton kernel: the state is read once and written once; everything else rides along."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import (
    add2,
    add3,
    filter_pair,
    filter_token,
    load_tile,
    mix_bits,
    norm_and_gate,
    normed_and_gated,
    part_of,
    sigmoid,
    softplus,
    store_tile,
    take_turn,
)


@triton.jit
def _log_decay(a, rate, bias, lower_bound, RATED: tl.constexpr, BOUNDED: tl.constexpr):
    """The log decay from its raw projection: as it is, by softplus, or bounded below."""
    if not RATED:
        return a
    if BOUNDED:
        return lower_bound * sigmoid(rate * (a + bias))
    return -rate * softplus(a + bias)


@triton.jit
def gates_of(b_ptr, a_ptr, dt_bias_ptr, rate, strength, lower_bound, WRITE: tl.constexpr, DECAY: tl.constexpr,
           RATED: tl.constexpr, DT_BIAS: tl.constexpr, BOUNDED: tl.constexpr):  # fmt: skip
    """A head's write strength and its factor of decay, 1 where it has none of its own."""
    beta = strength
    if WRITE:
        beta = strength * sigmoid(tl.load(b_ptr).to(tl.float32))
    decay = tl.full((), 1.0, tl.float32)
    if DECAY == 1:
        a = tl.load(a_ptr).to(tl.float32)
        bias = tl.zeros_like(a)
        if DT_BIAS:
            bias = tl.load(dt_bias_ptr).to(tl.float32)
        decay = tl.exp(_log_decay(a, rate, bias, lower_bound, RATED, BOUNDED))
    return beta, decay


@triton.jit
def channel_decay(a_ptr, dt_bias_ptr, rate, lower_bound, K: tl.constexpr, N: tl.constexpr, RATED: tl.constexpr,
                   DT_BIAS: tl.constexpr, BOUNDED: tl.constexpr):  # fmt: skip
    """The factors of the key channels, N of which K count."""
    at = tl.arange(0, N)
    mask = at < K
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.zeros_like(a)
    if DT_BIAS:
        bias = tl.load(dt_bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return tl.exp(_log_decay(a, rate, bias, lower_bound, RATED, BOUNDED))


@triton.jit
def delta_step_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, lamb_ptr, gate_ptr, out_ptr, state_ptr, ring_ptr, weight_ptr, bias_ptr,
    A_log_ptr, dt_bias_ptr, norm_ptr, position_ptr, slots_ptr, commit_ptr, seed_ptr, counter_ptr, scratch_ptr,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, b_sb, b_st, a_sb, a_st, a_sh, lamb_sb, lamb_st,
    gate_sb, gate_st, gate_sh, state_ss, state_sh, ring_ss, ring_sr, weight_sc, weight_sw,
    scale, strength, eps, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, ROWS0: tl.constexpr, ROWS1: tl.constexpr,
    ROWS2: tl.constexpr, KN: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, TILES2: tl.constexpr, SPLITS: tl.constexpr, V2: tl.constexpr,
    BIAS: tl.constexpr, SILU_Q: tl.constexpr, SILU_K: tl.constexpr, SILU_V: tl.constexpr, L2NORM: tl.constexpr,
    WRITE: tl.constexpr, DECAY: tl.constexpr, RATED: tl.constexpr, DT_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    LAMBDA: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr,
    POSITION: tl.constexpr, SLOTS: tl.constexpr, COMMIT: tl.constexpr, STOCHASTIC: tl.constexpr,
    GATHER: tl.constexpr, EVICT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: TILES tiles of BV value channels of one value head of one row, all K channels of each.

    DECAY: 0 none, 1 a factor a head, 2 a factor a key channel. The K channels come in parts of K0, K1, K2 (powers of
    two, the last masked), so that K = 96 is 64 + 32 and not 128. Where several programs share a head and there is a
    norm, each leaves what it read in the scratch, and the last to arrive does the norm and the gate for all.
    """
    take_turn(EARLY)
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = (pid // SPLITS) % HV
    row = pid // (SPLITS * HV)
    key_head = head // (HV // H)
    row_wide = row.to(tl.int64)
    first = split * (TILES * BV)
    columns = first + tl.arange(0, BV)
    # Whether all that is left of a head's output can be done where its numbers are.
    ONE: tl.constexpr = TILES * SPLITS == 1
    HELD: tl.constexpr = NORM and not ONE and T == 1 and SPLITS == 1
    LEFT: tl.constexpr = NORM and not ONE and not HELD
    WHOLE: tl.constexpr = V == BV * TILES * SPLITS
    # The usual case, where everything is read before anything is waited for.
    SINGLE: tl.constexpr = T * TILES == 1
    MEET: tl.constexpr = LEFT and SPLITS > 1
    out_ptr += (row_wide * T * HV + head) * V
    gate_ptr += row_wide * gate_sb + head * gate_sh

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
            for tile in range(TILES):
                at = columns + tile * BV
                for t in range(T):
                    tl.store(out_ptr + t * (HV * V) + at, tl.zeros([BV], out_ptr.dtype.element_ty), mask=at < V)
            return

    state_ptr += slot * state_ss + head * state_sh
    s0 = load_tile(state_ptr, columns, old, 0, K0, ROWS0, K, V, WHOLE, STRIDE_K, STRIDE_V, EVICT)
    if K1 > 0:
        s1 = load_tile(state_ptr, columns, old, K0, K1, ROWS1, K, V, WHOLE, STRIDE_K, STRIDE_V, EVICT)
    if K2 > 0:
        s2 = load_tile(state_ptr, columns, old, K0 + K1, K2, ROWS2, K, V, WHOLE, STRIDE_K, STRIDE_V, EVICT)
    # The loads above are issued before anything waits for those below; the assembler would move them down.
    tl.debug_barrier()

    q_ptr += row_wide * q_sb + key_head * q_sh
    k_ptr += row_wide * k_sb + key_head * k_sh
    v_ptr += row_wide * v_sb + head * v_sh
    a_ptr += row_wide * a_sb + head * a_sh
    b_ptr += row_wide * b_sb + head
    lamb_ptr += row_wide * lamb_sb + head
    ring_ptr += slot * ring_ss
    q_ring = ring_ptr + key_head * K
    k_ring = ring_ptr + (H + key_head) * K
    v_ring = ring_ptr + 2 * H * K + head * V
    q_weight = weight_ptr + key_head * K * weight_sc
    k_weight = weight_ptr + (H + key_head) * K * weight_sc
    v_weight = weight_ptr + (2 * H * K + head * V) * weight_sc
    q_bias = bias_ptr + key_head * K
    k_bias = bias_ptr + (H + key_head) * K
    v_bias = bias_ptr + 2 * H * K + head * V
    dt_bias_ptr += head * (K if DECAY == 2 else 1)
    # One program of those that read a key head keeps its raw inputs.
    keeps = (head % (HV // H) == 0) & (split == 0)

    rate = 0.0
    if RATED:
        rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    key = tl.zeros((), tl.uint32)
    if STOCHASTIC:
        block = (slot * HV + head).to(tl.uint32)
        key = mix_bits(mix_bits(block) ^ tl.load(seed_ptr).to(tl.uint32))

    if SINGLE:
        inside = columns < V
        raw_v, v = filter_token(v_ptr + columns, v_st, v_ring + columns, ring_sr, v_weight + columns * weight_sc,
                                weight_sw, v_bias + columns, inside, 0, position, T, W, R, BIAS, SILU_V)  # fmt: skip
        if not LEFT:
            weight, gate = norm_and_gate(norm_ptr + columns, gate_ptr + columns, inside, NORM, GATE)
    if HELD:
        held = tl.arange(0, TILES2)[:, None] * BV + columns[None, :]
        held_weight, held_gate = norm_and_gate(norm_ptr + held, gate_ptr + held, held < V, NORM, GATE)
    if T == 1:
        beta, decay = gates_of(b_ptr, a_ptr, dt_bias_ptr, rate, strength, lower_bound, WRITE, DECAY, RATED, DT_BIAS,
                             BOUNDED)  # fmt: skip
        if DECAY == 2:
            factors = channel_decay(a_ptr, dt_bias_ptr, rate, lower_bound, K, KN, RATED, DT_BIAS, BOUNDED)
        q, k = filter_pair(q_ptr, k_ptr, q_st, k_st, q_ring, k_ring, ring_sr, q_weight, k_weight, weight_sc, weight_sw,
                           q_bias, k_bias, 0, position, keeps & (commit > 0), K, KN, T, W, R, BIAS, SILU_Q,
                           SILU_K)  # fmt: skip
        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add3)
        q0, k0 = part_of(q, 0, K0, ROWS0, KN, GATHER), part_of(k, 0, K0, ROWS0, KN, GATHER)
        if K1 > 0:
            q1, k1 = part_of(q, K0, K1, ROWS1, KN, GATHER), part_of(k, K0, K1, ROWS1, KN, GATHER)
        if K2 > 0:
            q2, k2 = part_of(q, K0 + K1, K2, ROWS2, KN, GATHER), part_of(k, K0 + K1, K2, ROWS2, KN, GATHER)

    reads = tl.zeros([TILES2, BV], tl.float32)
    arrived = tl.zeros((), tl.int32)
    for tile in range(TILES):
        at = columns + tile * BV
        inside = at < V
        for t in range(T):
            if not SINGLE:
                raw_v, v = filter_token(v_ptr + at, v_st, v_ring + at, ring_sr, v_weight + at * weight_sc, weight_sw,
                                        v_bias + at, inside, t, position, T, W, R, BIAS, SILU_V)  # fmt: skip
                if not LEFT and not HELD:
                    weight, gate = norm_and_gate(norm_ptr + at, gate_ptr + t * gate_st + at, inside, NORM, GATE)
            if T > 1:
                beta, decay = gates_of(b_ptr + t * b_st, a_ptr + t * a_st, dt_bias_ptr, rate, strength, lower_bound,
                                     WRITE, DECAY, RATED, DT_BIAS, BOUNDED)  # fmt: skip
                if DECAY == 2:
                    factors = channel_decay(a_ptr + t * a_st, dt_bias_ptr, rate, lower_bound, K, KN, RATED, DT_BIAS,
                                             BOUNDED)  # fmt: skip
                q, k = filter_pair(q_ptr, k_ptr, q_st, k_st, q_ring, k_ring, ring_sr, q_weight, k_weight, weight_sc,
                                   weight_sw, q_bias, k_bias, t, position, keeps & (t < commit) & (tile == 0), K, KN,
                                   T, W, R, BIAS, SILU_Q, SILU_K)  # fmt: skip
                qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add3)
                q0, k0 = part_of(q, 0, K0, ROWS0, KN, GATHER), part_of(k, 0, K0, ROWS0, KN, GATHER)
                if K1 > 0:
                    q1, k1 = part_of(q, K0, K1, ROWS1, KN, GATHER), part_of(k, K0, K1, ROWS1, KN, GATHER)
                if K2 > 0:
                    q2, k2 = part_of(q, K0 + K1, K2, ROWS2, KN, GATHER), part_of(k, K0 + K1, K2, ROWS2, KN, GATHER)
            if W > 0:
                tl.store(v_ring + at + ((position + t) % R) * ring_sr, raw_v, mask=inside & (t < commit))
            if DECAY == 2:
                s0 *= part_of(factors, 0, K0, ROWS0, KN, GATHER)
                if K1 > 0:
                    s1 *= part_of(factors, K0, K1, ROWS1, KN, GATHER)
                if K2 > 0:
                    s2 *= part_of(factors, K0 + K1, K2, ROWS2, KN, GATHER)

            # Both reductions are of the state before the write: S_new^T q = S^T q + (k . q) u.
            found, read = tl.reduce((s0 * k0, s0 * q0), 0, add2)
            if K1 > 0:
                found1, read1 = tl.reduce((s1 * k1, s1 * q1), 0, add2)
                found += found1
                read += read1
            if K2 > 0:
                found2, read2 = tl.reduce((s2 * k2, s2 * q2), 0, add2)
                found += found2
                read += read2
            q_unit = 1.0
            k_unit = 1.0
            if L2NORM:
                # Lengths come in as factors of the sums, so no product waits for them.
                q_unit = tl.rsqrt(qq + 1e-6)
                k_unit = tl.rsqrt(kk + 1e-6)
            read *= decay * q_unit
            found *= decay * k_unit
            if LAMBDA:
                found += read * tl.load(lamb_ptr + t * lamb_st).to(tl.float32)
            update = beta * (v - found)
            written = k_unit * update
            s0 = decay * s0 + k0 * written[None, :]
            if K1 > 0:
                s1 = decay * s1 + k1 * written[None, :]
            if K2 > 0:
                s2 = decay * s2 + k2 * written[None, :]
            out = scale * (read + (q_unit * qk) * written)

            if LEFT:
                tl.store(scratch_ptr + ((row_wide * HV + head) * T + t) * V + at, out, mask=inside)
            if MEET and SINGLE:
                # All of this program's numbers are written before its arrival counts; the state, much longer on its
                # way and of no interest to the others, only then.
                tl.debug_barrier()
                arrived = tl.atomic_add(counter_ptr + row * HV + head, 1, sem="acq_rel", scope="gpu")

            commits = commit == t + 1
            store_tile(state_ptr, at, commits, s0, key, 0, K0, ROWS0, K, V, WHOLE, STRIDE_K, STRIDE_V,
                           STOCHASTIC, EVICT)  # fmt: skip
            if K1 > 0:
                store_tile(state_ptr, at, commits, s1, key, K0, K1, ROWS1, K, V, WHOLE, STRIDE_K, STRIDE_V,
                           STOCHASTIC, EVICT)  # fmt: skip
            if K2 > 0:
                store_tile(state_ptr, at, commits, s2, key, K0 + K1, K2, ROWS2, K, V, WHOLE, STRIDE_K, STRIDE_V,
                           STOCHASTIC, EVICT)  # fmt: skip

            if HELD:
                reads = tl.where(tl.arange(0, TILES2)[:, None] == tile, out[None, :], reads)
            elif not LEFT:
                out = normed_and_gated(out, weight, gate, V, eps, NORM, GATE, SIGMOID)
                tl.store(out_ptr + t * (HV * V) + at, out.to(out_ptr.dtype.element_ty), mask=inside)

        if TILES > 1:
            more = old & (tile + 1 < TILES)
            ahead = at + BV
            s0 = load_tile(state_ptr, ahead, more, 0, K0, ROWS0, K, V, WHOLE, STRIDE_K, STRIDE_V, EVICT)
            if K1 > 0:
                s1 = load_tile(state_ptr, ahead, more, K0, K1, ROWS1, K, V, WHOLE, STRIDE_K, STRIDE_V, EVICT)
            if K2 > 0:
                s2 = load_tile(state_ptr, ahead, more, K0 + K1, K2, ROWS2, K, V, WHOLE, STRIDE_K, STRIDE_V, EVICT)

    if HELD:
        out = normed_and_gated(reads, held_weight, held_gate, V, eps, NORM, GATE, SIGMOID)
        at = tl.arange(0, TILES2)[:, None] * BV + columns[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < V)
    if LEFT:
        if not (MEET and SINGLE):
            tl.debug_barrier()
        if MEET and not SINGLE:
            arrived = tl.atomic_add(counter_ptr + row * HV + head, 1, sem="acq_rel", scope="gpu")
        # The last to arrive sees everybody's numbers.
        if arrived == (SPLITS - 1 if MEET else 0):
            if MEET:
                tl.store(counter_ptr + row * HV + head, 0)
            at = tl.arange(0, V2)
            for t in range(T):
                out = tl.load(scratch_ptr + ((row_wide * HV + head) * T + t) * V + at, mask=at < V, other=0.0,
                              cache_modifier=".cg")  # fmt: skip
                weight, gate = norm_and_gate(norm_ptr + at, gate_ptr + t * gate_st + at, at < V, NORM, GATE)
                out = normed_and_gated(out, weight, gate, V, eps, NORM, GATE, SIGMOID)
                tl.store(out_ptr + t * (HV * V) + at, out.to(out_ptr.dtype.element_ty), mask=at < V)
