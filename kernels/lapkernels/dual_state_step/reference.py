"""The definition of the step: one token after the other, in fp32 (fp64 for fp64 inputs)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.decoding.reference import live_rows, starting_states, write_states
from lapkernels.dual_state_step.arguments import StepArguments


def dual_state_step_reference(arguments: StepArguments) -> Tensor:
    """Run the step; returns `[batch, T, HQ, V]`.

    Waits for the device: which rows have a slot is read on the host.
    """
    q, k, v, state, gate, mixture, normaliser, floor, scale, position, slots, commit = arguments
    batch, time, query_heads, _ = q.shape
    heads, value_width, states = k.shape[2], v.shape[3], len(mixture)
    output = v.new_zeros(batch, time, query_heads, value_width)
    rows, places = live_rows(batch, slots, q.device)
    if not len(rows):
        return output
    counts = torch.full_like(rows, time) if commit is None else commit[rows].long()
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        decay = (F.logsigmoid(gate[rows].to(dtype)) / normaliser).clamp(min=floor).exp()
        shares = mixture.to(dtype).softmax(0)
        q, k, v = (x[rows].to(dtype) for x in (q, k, v))
        q = (q * scale).unflatten(2, (heads, -1))
        pool = state.flatten(1, 2)
        held = starting_states(pool, places, None if position is None else position[rows], dtype)
        held = held.unflatten(1, (states, heads))
        kept, reads = held, []
        for t in range(time):
            written = k[:, t, :, :, None] * v[:, t, :, None, :]
            held = decay[:, t].unsqueeze(-1) * held + written.unsqueeze(1)
            reads.append((shares[:, None, None, None] * (q[:, t].unsqueeze(1) @ held)).sum(1).flatten(1, 2))
            kept = torch.where((counts == t + 1).view(-1, 1, 1, 1, 1), held, kept)
        write_states(pool, kept.flatten(1, 2), places, counts, None)
    output[rows] = torch.stack(reads, dim=1).to(output.dtype)
    return output
