"""The definition of the step: one token after the other, in fp32 (fp64 for fp64 inputs)."""

import torch
from torch import Tensor

from lapkernels.decoding.reference import (
    convolve_step,
    gated_norm,
    live_rows,
    softplus,
    starting_states,
    write_states,
)
from lapkernels.decoding.rows import ConvState
from lapkernels.delta_step.arguments import StepArguments

NORM_EPS = 1e-6
"""Added to the squared length of q and k before the root, as in fla."""


def delta_step_reference(arguments: StepArguments) -> Tensor:
    """Run the step; returns `[B, T, HV, V]`.

    Waits for the device: which rows have a slot is read on the host.
    """
    (
        q, k, v, state, b, a, A_log, dt_bias, decay_lower_bound, conv, position, slots, gate, norm_weight, norm_eps,
        gate_activation, lamb, strength, scale, qk_l2norm, silu, commit, rounding_seed,
    ) = arguments  # fmt: skip
    batch, time = q.shape[:2]
    output = torch.zeros_like(v, memory_format=torch.contiguous_format)
    rows, places = live_rows(batch, slots, q.device)
    if not len(rows):
        return output
    counts = torch.full_like(rows, time) if commit is None else commit[rows].long()
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _prepare(q[rows], k[rows], v[rows], conv, places, position, rows, counts, silu, dtype)
        if qk_l2norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
        group = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
        x = k if lamb is None else k + lamb[rows].to(dtype).unsqueeze(-1) * q
        beta = torch.full(v.shape[:3], strength, dtype=dtype, device=v.device)
        if b is not None:
            beta = beta * b[rows].to(dtype).sigmoid()
        decay = _decay(None if a is None else a[rows].to(dtype), A_log, dt_bias, decay_lower_bound)

        held = starting_states(state, places, None if position is None else position[rows], dtype)
        kept, reads = held, []
        for t in range(time):
            if decay is not None:
                held = held * decay[:, t]
            found = (x[:, t].unsqueeze(-2) @ held).squeeze(-2)
            update = beta[:, t].unsqueeze(-1) * (v[:, t] - found)
            held = held + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
            reads.append(scale * (q[:, t].unsqueeze(-2) @ held).squeeze(-2))
            kept = torch.where((counts == t + 1).view(-1, 1, 1, 1), held, kept)

        write_states(state, kept, places, counts, rounding_seed)
        read = gated_norm(
            torch.stack(reads, dim=1), norm_weight, norm_eps, None if gate is None else gate[rows], gate_activation
        )
    output[rows] = read.to(output.dtype)
    return output


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ConvState | None,
    places: Tensor,
    position: Tensor | None,
    rows: Tensor,
    counts: Tensor,
    silu: tuple[bool, bool, bool],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """q, k and v after convolution and activation, in the compute dtype."""
    parts = (q, k, v)
    if conv is not None and position is not None:
        joined = torch.cat([x.flatten(2) for x in parts], dim=-1)
        line = convolve_step(joined, conv, places, position[rows].long(), counts)
        pieces = line.split([x.shape[2] * x.shape[3] for x in parts], dim=-1)
        parts = tuple(piece.unflatten(-1, x.shape[2:]) for piece, x in zip(pieces, parts, strict=True))
    return tuple(
        torch.nn.functional.silu(x.to(dtype)) if active else x.to(dtype) for x, active in zip(parts, silu, strict=True)
    )


def _decay(
    a: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, decay_lower_bound: float | None
) -> Tensor | None:
    """What the state is multiplied by, `[rows, T, HV, K or 1, 1]`."""
    if a is None:
        return None
    if A_log is not None:
        a = a if dt_bias is None else a + dt_bias.to(a.dtype)
        rate = A_log.to(a.dtype).exp()
        rate = rate.unsqueeze(-1) if a.ndim == 4 else rate
        a = -rate * softplus(a) if decay_lower_bound is None else decay_lower_bound * torch.sigmoid(rate * a)
    a = a if a.ndim == 4 else a.unsqueeze(-1)
    return a.exp().unsqueeze(-1)
