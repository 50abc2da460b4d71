"""The step as one Triton kernel: each state is read once and written once, k and v are loaded once for all of them."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# The language of kernels is not quite Python: its tensors have no types, its constants are ones when it is compiled.

import triton
import triton.language as tl

from lapkernels.decoding.triton_parts import softplus


@triton.jit
def dual_state_step_kernel(
    q_ptr, k_ptr, v_ptr, gate_ptr, mixture_ptr, out_ptr, state_ptr, position_ptr, slots_ptr, commit_ptr,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, gate_sb, gate_st, gate_sn, gate_sh, state_ss,
    scale, normaliser, floor,
    HEADS: tl.constexpr, READERS: tl.constexpr, STATES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    T: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
    POSITION: tl.constexpr, SLOTS: tl.constexpr, COMMIT: tl.constexpr,
):  # fmt: skip
    """One program: BV value channels of one key head of one row, in all states, for all query heads that read it.

    A tile is [BK, BV]: all K channels of one state. State after state passes through the registers; what is read of
    them is gathered in [BR, BV], a row for each token and query head.
    """
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = (pid // SPLITS) % HEADS
    row = pid // (SPLITS * HEADS)
    row_wide = row.to(tl.int64)
    columns = split * BV + tl.arange(0, BV)
    rows = tl.arange(0, BK)
    in_v = columns < V
    in_k = rows < K
    tile = in_k[:, None] & in_v[None, :]
    reads = tl.arange(0, BR)
    # Where each read goes: token, then query head.
    out_row = out_ptr + row_wide * (T * HEADS * READERS * V)
    at = ((reads // READERS) * (HEADS * READERS) + head * READERS + reads % READERS) * V
    out_at = out_row + at[:, None] + columns[None, :]
    out_mask = (reads < T * READERS)[:, None] & in_v[None, :]

    slot = row_wide
    if SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot < 0:
            tl.store(out_at, tl.zeros([BR, BV], out_ptr.dtype.element_ty), mask=out_mask)
            return
    # Nothing is read for a row's first token: its states are zero, whatever the slot holds.
    old = row >= 0
    if POSITION:
        old = tl.load(position_ptr + row) > 0
    commit = T
    if COMMIT:
        commit = tl.load(commit_ptr + row).to(tl.int32)

    q_ptr += row_wide * q_sb + head * READERS * q_sh
    k_ptr += row_wide * k_sb + head * k_sh
    v_ptr += row_wide * v_sb + head * v_sh
    gate_ptr += row_wide * gate_sb + head * gate_sh
    state_ptr += slot * state_ss + head * (K * V) + rows[:, None] * V + columns[None, :]

    states = tl.arange(0, BS)
    logits = tl.load(mixture_ptr + states, mask=states < STATES, other=-float("inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = shares / tl.sum(shares, 0) * scale

    k = tl.load(k_ptr + rows, mask=in_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + columns, mask=in_v, other=0.0).to(tl.float32)
    out = tl.zeros([BR, BV], tl.float32)
    # In pairs: one state comes while the other is worked on. Eight at once took a minute to compile, and spilled.
    for a in tl.range(0, STATES, loop_unroll_factor=2):
        share = tl.sum(tl.where(states == a, shares, 0.0), 0)
        held = tl.load(state_ptr + a * (HEADS * K * V), mask=tile & old, other=0.0).to(tl.float32)
        for t in tl.static_range(T):
            if T > 1:
                k = tl.load(k_ptr + t * k_st + rows, mask=in_k, other=0.0).to(tl.float32)
                v = tl.load(v_ptr + t * v_st + columns, mask=in_v, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + t * gate_st + a * gate_sn + rows, mask=in_k, other=0.0).to(tl.float32)
            decay = tl.exp(tl.maximum(-softplus(-gate) / normaliser, floor))
            held = decay[:, None] * held + k[:, None] * v[None, :]
            for r in tl.static_range(READERS):
                q = tl.load(q_ptr + t * q_st + r * q_sh + rows, mask=in_k, other=0.0).to(tl.float32)
                read = share * tl.sum(q[:, None] * held, 0)
                out += tl.where((reads == t * READERS + r)[:, None], read[None, :], 0.0)
            tl.store(
                state_ptr + a * (HEADS * K * V),
                held.to(state_ptr.dtype.element_ty),
                mask=tile & (commit == t + 1),
            )
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
