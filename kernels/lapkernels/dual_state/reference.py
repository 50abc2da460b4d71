"""The definition of the operator: one step after the other, in fp32 (fp64 for fp64 inputs)."""

import itertools

import torch
from torch import Tensor

from lapkernels.delta_rule.reference import compute_dtype
from lapkernels.delta_rule.validation import read_boundaries


def dual_state_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mixture: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Arguments as `dual_state` has checked and completed them.

    Returns:
        The output `[B, T, HQ, V]` and the final state `[sequences, states, H, K, V]`, both in the compute dtype.
    """
    with torch.autocast(q.device.type, enabled=False):
        if cu_seqlens is None:
            return _recurrence(q, k, v, g, mixture, scale, initial_state)
        outputs, states = [], []
        bounds = read_boundaries(cu_seqlens, q.shape[1])
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            part = slice(start, stop)
            held = None if initial_state is None else initial_state[index : index + 1]
            output, state = _recurrence(q[:, part], k[:, part], v[:, part], g[:, part], mixture, scale, held)
            outputs.append(output)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states, dim=0)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, mixture: Tensor, scale: float, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q)
    batch, time, _, key_width = q.shape
    heads, value_width, states = k.shape[2], v.shape[3], g.shape[2]
    q = (q.to(dtype) * scale).unflatten(2, (heads, -1))
    k, v, decay, mixture = k.to(dtype), v.to(dtype), g.to(dtype).exp(), mixture.to(dtype)
    if initial_state is None:
        state = q.new_zeros(batch, states, heads, key_width, value_width)
    else:
        state = initial_state.to(dtype)
    outputs = []
    for t in range(time):
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = decay[:, t].unsqueeze(-1) * state + written.unsqueeze(1)
        read = q[:, t].unsqueeze(1) @ state
        outputs.append((mixture[:, None, None, None] * read).sum(1).flatten(1, 2))
    return torch.stack(outputs, dim=1), state
