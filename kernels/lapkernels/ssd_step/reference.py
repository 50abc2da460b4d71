"""The definition of the step: one token after the other, in fp32 (fp64 for fp64 inputs)."""

import torch
import torch.nn.functional as F
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


def ssd_step_reference(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    state: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] | None,
    conv: ConvState | None,
    position: Tensor | None,
    slots: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_groups: int,
    norm_eps: float,
    gate_first: bool,
    silu: bool,
    commit: Tensor | None,
    rounding_seed: Tensor | None,
) -> Tensor:
    """Run the step. Arguments as `ssd_step` has checked and completed them; returns `[batch, T, heads, P]`.

    Waits for the device: which rows have a slot is read on the host.
    """
    batch, time, heads, head_width = x.shape
    output = torch.zeros_like(x, memory_format=torch.contiguous_format)
    rows, places = live_rows(batch, slots, x.device)
    if not len(rows):
        return output
    counts = torch.full_like(rows, time) if commit is None else commit[rows].long()
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        parts = (x[rows], B[rows], C[rows])
        if conv is not None and position is not None:
            joined = torch.cat([part.flatten(2) for part in parts], dim=-1)
            line = convolve_step(joined, conv, places, position[rows].long(), counts)
            pieces = line.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
            parts = tuple(piece.unflatten(-1, part.shape[2:]) for piece, part in zip(pieces, parts, strict=True))
        x, B, C = (F.silu(part.to(dtype)) if silu else part.to(dtype) for part in parts)
        B, C = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (B, C))
        step = dt[rows].to(dtype)
        step = softplus(step if dt_bias is None else step + dt_bias.to(dtype))
        step = step if dt_limit is None else step.clamp(*dt_limit)
        decay = (-A_log.to(dtype).exp() * step).exp()

        held = starting_states(state, places, None if position is None else position[rows], dtype)
        kept, reads = held, []
        for t in range(time):
            written = step[:, t].unsqueeze(-1) * x[:, t]
            held = held * decay[:, t, :, None, None] + written.unsqueeze(-1) * B[:, t].unsqueeze(-2)
            reads.append((held @ C[:, t].unsqueeze(-1)).squeeze(-1))
            kept = torch.where((counts == t + 1).view(-1, 1, 1, 1), held, kept)
        # Numbered by state channel first, as the kernel draws its random bits.
        write_states(state.transpose(-1, -2), kept.transpose(-1, -2), places, counts, rounding_seed)

        y = torch.stack(reads, dim=1)
        y = y if D is None else y + D.to(dtype).unsqueeze(-1) * x
        shape = (norm_groups, heads // norm_groups * head_width)
        y = gated_norm(
            y.flatten(2).unflatten(2, shape),
            None if norm_weight is None else norm_weight.view(shape),
            norm_eps,
            None if gate is None else gate[rows].flatten(2).unflatten(2, shape),
            "silu",
            gate_first=gate_first,
        )
    output[rows] = y.flatten(2).unflatten(2, (heads, head_width)).to(output.dtype)
    return output
