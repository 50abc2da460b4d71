"""The definition of the operator: one step after the other, in fp32 (fp64 for fp64 inputs)."""

import itertools

import torch
from torch import Tensor

from lapkernels.delta_rule.validation import read_boundaries


def compute_dtype(q: Tensor) -> torch.dtype:
    """The dtype that the state and all sums have: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def erase_direction(q: Tensor, k: Tensor, lamb: Tensor) -> Tensor:
    """Q-Delta's `x = k + lamb q`, `[B, T, HV, K]` in the compute dtype.

    Args:
        q: `[B, T, H, K]`, after any normalisation.
        k: `[B, T, H, K]`, after any normalisation.
        lamb: `[B, T, HV]`.
    """
    dtype, repeats = compute_dtype(q), lamb.shape[2] // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(repeats, dim=2) for x in (q, k))
    return torch.addcmul(k, lamb.to(dtype).unsqueeze(-1), q)


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Arguments as `delta_rule` has checked and completed them.

    Returns:
        The output `[B, T, HV, V]` and the final state `[sequences, HV, K, V]`, both in the compute dtype.
    """
    with torch.autocast(q.device.type, enabled=False):
        if cu_seqlens is None:
            return _recurrence(q, k, v, beta, g, erase, scale, initial_state)
        outputs, states = [], []
        bounds = read_boundaries(cu_seqlens, q.shape[1])
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            part = slice(start, stop)
            output, state = _recurrence(
                q[:, part],
                k[:, part],
                v[:, part],
                beta[:, part],
                None if g is None else g[:, part],
                erase[:, part],
                scale,
                None if initial_state is None else initial_state[index : index + 1],
            )
            outputs.append(output)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states, dim=0)


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q)
    batch, time, _, key_width = q.shape
    value_heads, value_width = v.shape[2:]

    def per_value_head(x: Tensor) -> Tensor:
        return x.to(dtype).repeat_interleave(value_heads // x.shape[2], dim=2)

    q, k, erase = per_value_head(q) * scale, per_value_head(k), per_value_head(erase)
    v, beta = v.to(dtype), beta.to(dtype)
    decay = None if g is None else g.to(dtype).exp()
    if decay is not None:
        # Of a head, or of each of its key channels: rows of the state.
        decay = decay.unsqueeze(-1) if g is not None and g.ndim == 4 else decay[..., None, None]
    if initial_state is None:
        state = q.new_zeros(batch, value_heads, key_width, value_width)
    else:
        state = initial_state.to(dtype)

    outputs = []
    for t in range(time):
        if decay is not None:
            state = state * decay[:, t]
        found = (erase[:, t].unsqueeze(-2) @ state).squeeze(-2)
        update = beta[:, t, :, None] * (v[:, t] - found)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state
