"""The parts that all decode steps share, by definition: convolution from the ring, rounding, norm and gate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.decoding.rows import ConvState

_WORD = 0xFFFFFFFF


def live_rows(batch: int, slots: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of the batch that have a slot, and those slots, both int64."""
    if slots is None:
        rows = torch.arange(batch, device=device)
        return rows, rows
    rows = (slots >= 0).nonzero().squeeze(1)
    return rows, slots[rows].long()


def convolve_step(x: Tensor, conv: ConvState, slots: Tensor, position: Tensor, commit: Tensor) -> Tensor:
    """Filter the tokens of a step, and keep the inputs of those that count.

    Args:
        x: `[rows, T, channels]`, raw.
        conv: filter and ring; the ring is written.
        slots: `[rows]`.
        position: `[rows]`, tokens before the step.
        commit: `[rows]`, how many tokens of the step count.

    Returns:
        `[rows, T, channels]` in fp32 (fp64 for fp64).
    """
    past, time = conv.width - 1, x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    before = position.unsqueeze(1) + torch.arange(-past, 0, device=x.device)
    held = conv.inputs[slots.unsqueeze(1), before % conv.ring].to(wide)
    held = torch.where(before.unsqueeze(2) < 0, 0.0, held)
    line = torch.cat((held, x.to(wide)), dim=1)
    weight = conv.weight.to(wide)
    y = sum(line[:, tap : tap + time] * weight[:, tap] for tap in range(conv.width))
    assert isinstance(y, Tensor)
    counts = torch.arange(time, device=x.device) < commit.unsqueeze(1)
    row, token = counts.nonzero(as_tuple=True)
    conv.inputs[slots[row], (position[row] + token) % conv.ring] = x[row, token]
    return y if conv.bias is None else y + conv.bias.to(wide)


def softplus(x: Tensor) -> Tensor:
    """`log(1 + e^x)` without torch's switch to `x` above 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def gated_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    activation: str,
    *,
    gate_first: bool = False,
) -> Tensor:
    """`norm(x) weight f(gate)` over the last axis, or `norm(x f(gate)) weight`; without a weight, no norm.

    Args:
        x: fp32 or fp64.
        weight: what broadcasts to x, or `None`.
        eps: added to the mean square.
        gate: of x's shape, or `None`.
        activation: `silu` (`swish` is the same) or `sigmoid`.
        gate_first: whether the gate comes before the norm.
    """
    opened = None
    if gate is not None:
        gate = gate.to(x.dtype)
        opened = torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate)
    if opened is not None and gate_first:
        x = x * opened
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
    if opened is not None and not gate_first:
        x = x * opened
    return x


def mix_bits(x: Tensor) -> Tensor:
    """A 32-bit word whose every bit depends on all bits of `x` (int64 that holds a word): a permutation of words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def round_stochastically(x: Tensor, seed: Tensor, block: Tensor) -> Tensor:
    """fp32 to bf16, up or down with the probability that keeps the mean.

    Args:
        x: `[blocks, ...]` in fp32.
        seed: one integer of which the low 32 bits count.
        block: `[blocks]`, the number of each block in its pool: another block, other bits.
    """
    key = mix_bits(mix_bits(block.long() & _WORD) ^ (seed.long() & _WORD))
    inside = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
    bits = mix_bits((key.view(-1, *[1] * inside.ndim) + inside) & _WORD) & 0xFFFF
    word = (x.contiguous().view(torch.int32).long() & _WORD) + bits & 0xFFFF0000
    word = torch.where(word > 0x7FFFFFFF, word - (1 << 32), word).to(torch.int32)
    # An infinity or NaN would be carried into another number.
    return torch.where(x.isfinite(), word.view(torch.float32), x).to(torch.bfloat16)


def starting_states(state: Tensor, slots: Tensor, position: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What rows start a step from, `[rows, ...]`: their slots' states, or zeros before their first token."""
    held = state[slots].to(dtype)
    return held if position is None else torch.where((position == 0).view(-1, 1, 1, 1), 0.0, held)


def write_states(state: Tensor, kept: Tensor, slots: Tensor, counts: Tensor, seed: Tensor | None) -> None:
    """Write the states of the rows of which tokens count, rounded at random where there is a seed.

    Args:
        state: the pool.
        kept: `[rows, heads, ...]`.
        slots: `[rows]`.
        counts: `[rows]`, tokens that count.
        seed: of `round_stochastically`.
    """
    written = counts > 0
    kept, slots = kept[written], slots[written]
    if seed is not None:
        heads = kept.shape[1]
        block = slots.unsqueeze(1) * heads + torch.arange(heads, device=slots.device)
        kept = round_stochastically(kept.flatten(0, 1).float(), seed.view(()), block.flatten()).view_as(kept)
    state[slots] = kept.to(state.dtype)
