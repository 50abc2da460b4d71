"""The step as three Triton kernels, for batches whose states take long: inputs, states, outputs.

Filters, norms and gates want whole heads; a state wants as many small programs as can be had, each of which asks for
its tile at once and waits for nothing else first. Together in one kernel they hold each other up. Apart, the kernels
around the state begin and end within its time, where the device can begin a kernel before the last one has ended.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import activate, add3, filter_token, norm_and_gate, take_turn
from lapkernels.delta_step.triton_states import GATES
from lapkernels.delta_step.triton_step import channel_decay, gates_of


@triton.jit(do_not_specialize=["rows"])
def delta_inputs_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, lamb_ptr, ring_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr,
    position_ptr, slots_ptr, pairs_ptr, products_ptr, values_ptr, gates_ptr, factors_ptr,
    q_sb, q_sh, k_sb, k_sh, v_sb, v_sh, b_sb, a_sb, a_sh, lamb_sb, ring_ss, ring_sr, weight_sc, weight_sw,
    scale, strength, lower_bound, rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KN: tl.constexpr, BW: tl.constexpr,
    BLOCKS: tl.constexpr, G: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr,
    SILU_Q: tl.constexpr, SILU_K: tl.constexpr, SILU_V: tl.constexpr, L2NORM: tl.constexpr, WRITE: tl.constexpr,
    DECAY: tl.constexpr, RATED: tl.constexpr, DT_BIAS: tl.constexpr, BOUNDED: tl.constexpr, LAMBDA: tl.constexpr,
    POSITION: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: of G rows, q and k of a key head, or BW channels of v and the gates of a value head.

    pairs: [B, H, K, 2], k and q with its scale side by side.  products: [B, H], k . q.  values: [B, HV, V].
    gates: [B, HV, 4].  factors: [B, HV, K], decays of key channels.
    """
    take_turn(EARLY)
    PARTS: tl.constexpr = H + HV * BLOCKS
    pid = tl.program_id(0)
    part = pid % PARTS
    row = (pid // PARTS).to(tl.int64) * G + tl.arange(0, G)[:, None]
    live = row < rows
    row = tl.minimum(row, rows - 1)
    slot = row
    if SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.zeros([G, 1], tl.int32)
    if POSITION:
        position = tl.load(position_ptr + row).to(tl.int32)
    live = live & (slot >= 0) & (position >= 0)
    ring_ptr += slot * ring_ss
    now = (position % R) * ring_sr
    if part < H:
        key = tl.arange(0, KN)[None, :]
        mask = live & (key < K)
        q_ring, k_ring = ring_ptr + part * K + key, ring_ptr + (H + part) * K + key
        raw_q, q = filter_token(
            q_ptr + row * q_sb + part * q_sh + key, 0, q_ring, ring_sr, weight_ptr + (part * K + key) * weight_sc,
            weight_sw, bias_ptr + part * K + key, mask, 0, position, 1, W, R, BIAS, SILU_Q,
        )  # fmt: skip
        raw_k, k = filter_token(
            k_ptr + row * k_sb + part * k_sh + key, 0, k_ring, ring_sr, weight_ptr + ((H + part) * K + key) * weight_sc,
            weight_sw, bias_ptr + (H + part) * K + key, mask, 0, position, 1, W, R, BIAS, SILU_K,
        )  # fmt: skip
        if W > 0:
            tl.store(q_ring + now, raw_q, mask=mask)
            tl.store(k_ring + now, raw_k, mask=mask)
        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 1, add3)
        q_unit = scale + tl.zeros_like(qq)
        k_unit = 1.0 + tl.zeros_like(kk)
        if L2NORM:
            q_unit = scale * tl.rsqrt(qq + 1e-6)
            k_unit = tl.rsqrt(kk + 1e-6)
        product = (qk * q_unit * k_unit)[:, None]
        q *= q_unit[:, None]
        k *= k_unit[:, None]
        own = row * H + part
        low = k.to(tl.uint32, bitcast=True).to(tl.int64)
        high = q.to(tl.uint32, bitcast=True).to(tl.int64) << 32
        tl.store(pairs_ptr.to(tl.pointer_type(tl.int64)) + own * K + key, low | high, mask=mask, eviction_policy=KEPT)
        tl.store(products_ptr + own, product, mask=live)
    else:
        head, block = (part - H) // BLOCKS, (part - H) % BLOCKS
        own = row * HV + head
        # Gates first: loads behind the stores of v would wait for them.
        rate = 0.0
        if RATED:
            rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
        a_own = a_ptr + row * a_sb + head * a_sh
        bias_own = dt_bias_ptr + head * (K if DECAY == 2 else 1)
        beta, decay = gates_of(b_ptr + row * b_sb + head, a_own, bias_own, rate, strength, lower_bound, WRITE,
                               DECAY, RATED, DT_BIAS, BOUNDED)  # fmt: skip
        feedback = 0.0
        if LAMBDA:
            # Of what is read with the scale.
            feedback = tl.load(lamb_ptr + row * lamb_sb + head).to(tl.float32) / scale
        if DECAY == 2:
            factors = channel_decay(a_own, bias_own, rate, lower_bound, K, KN, RATED, DT_BIAS, BOUNDED)
        at = block * BW + tl.arange(0, BW)[None, :]
        inside = live & (at < V)
        channel = 2 * H * K + head * V + at
        raw, v = filter_token(v_ptr + row * v_sb + head * v_sh + at, 0, ring_ptr + channel, ring_sr,
                              weight_ptr + channel * weight_sc, weight_sw, bias_ptr + channel, inside, 0, position, 1,
                              W, R, BIAS, SILU_V)  # fmt: skip
        if W > 0:
            tl.store(ring_ptr + channel + now, raw, mask=inside)
        tl.store(values_ptr + own * V + at, v, mask=inside, eviction_policy=KEPT)
        owns = live & (block == 0)
        gate_ptr = gates_ptr + own * GATES
        tl.store(gate_ptr, beta + tl.zeros([G, 1], tl.float32), mask=owns)
        tl.store(gate_ptr + 1, decay + tl.zeros([G, 1], tl.float32), mask=owns)
        if LAMBDA:
            tl.store(gate_ptr + 2, feedback, mask=owns)
        if DECAY == 2:
            number = tl.arange(0, KN)[None, :]
            tl.store(factors_ptr + own * K + number, factors, mask=owns & (number < K))


@triton.jit(do_not_specialize=["heads"])
def delta_outputs_kernel(
    values_ptr, gate_ptr, norm_ptr, out_ptr, position_ptr, slots_ptr, gate_sb, gate_sh, eps, heads,
    HV: tl.constexpr, V: tl.constexpr, V2: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    SIGMOID: tl.constexpr, POSITION: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: what G value heads, counted through all rows, give. values: [B, HV, V], what was read."""
    own = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)[:, None]
    there = own < heads
    own = tl.minimum(own, heads - 1)
    row, head = own // HV, own % HV
    at = tl.arange(0, V2)[None, :]
    live = there
    if SLOTS:
        live = live & (tl.load(slots_ptr + row) >= 0)
    if POSITION:
        live = live & (tl.load(position_ptr + row) >= 0)
    mask = live & (at < V)
    weight, gate = norm_and_gate(norm_ptr + at, gate_ptr + row * gate_sb + head * gate_sh + at, mask, NORM, GATE)
    if GATE:
        gate = activate(gate, SIGMOID)
        weight = weight * gate if NORM else gate
    take_turn(EARLY)
    x = tl.load(values_ptr + own * V + at, mask=mask, other=0.0)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    if NORM or GATE:
        x *= weight
    tl.store(out_ptr + own * V + at, x.to(out_ptr.dtype.element_ty), mask=there & (at < V))
