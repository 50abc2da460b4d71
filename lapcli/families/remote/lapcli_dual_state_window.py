"""The control for dual-state attention: softmax attention to the first tokens and the last ones, in constant memory.

Written by lapcli beside models that it converted. Licence: Apache 2.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .lapcli_dual_state_cache import WindowCacheLayer


@dataclass(frozen=True)
class Window:
    """What a token sees of its sequence.

    Attributes:
        last: so many tokens up to itself.
        sinks: so many tokens from the sequence's beginning.
    """

    last: int
    sinks: int


def equal_memory_window(
    states: int,
    key_width: int,
    value_width: int,
    *,
    width: int = 1,
    state_bytes: int = 4,
    kv_bytes: int = 2,
) -> int:
    """Tokens, sinks included, whose keys and values take the bytes of the states that replace them; one at least.

    Args:
        states: of a layer.
        key_width: of the teacher, K.
        value_width: V.
        width: of a state, in K.
        state_bytes: of a number of a state.
        kv_bytes: of a number of a key or value.
    """
    per_token = (key_width + value_width) * kv_bytes
    return max(1, states * width * key_width * value_width * state_bytes // per_token)


def attention_mask(ranks: Tensor, dtype: torch.dtype, window: Window | None = None) -> Tensor:
    """What a token sees of its own packed sequence, as a number that is added to the scores: 0, or -inf.

    Args:
        ranks: int64 `[B, T]`, how many tokens of its sequence come before each; 0 where one begins.
        dtype: of the queries.
        window: what a token sees; `None` for all up to itself.

    Returns:
        `[B, 1, T, T]`. PyTorch makes the same of a mask of truth values, once more in each layer.
    """
    now, then = ranks.unsqueeze(2), ranks.unsqueeze(1)
    sequence = (ranks == 0).cumsum(1)
    seen = (then <= now) & (sequence.unsqueeze(2) == sequence.unsqueeze(1))
    if window is not None:
        seen &= (then < window.sinks) | (then > now - window.last)
    return torch.zeros(seen.shape, dtype=dtype, device=ranks.device).masked_fill_(~seen, -torch.inf).unsqueeze(1)


def attend_window_by_ranks(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: Window, ranks: Tensor, shared: dict[Any, Tensor]
) -> Tensor:
    """`attend_window` over packed sequences whose boundaries are a tensor; no shape depends on what lies in it.

    Args:
        q: `[B, HQ, T, d]`.
        k: `[B, H, T, d]`.
        v: `[B, H, T, V]`.
        scaling: the read scale.
        window: what a token sees.
        ranks: as for `attention_mask`.
        shared: what layers of one pass keep for each other; written.

    Returns:
        `[B, T, HQ, V]`.
    """
    key = ("window", window, q.device, q.dtype)
    if key not in shared:
        shared[key] = attention_mask(ranks, q.dtype, window)
    # With a mask, kernels of CUDA take no grouped heads: PyTorch would fall back to whole matrices of weights.
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, shared[key], scale=scaling).transpose(1, 2)


def attend_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    window: Window,
    is_token: Tensor | None,
    bounds: Sequence[int] | None,
    held: WindowCacheLayer | None,
) -> Tensor:
    """Softmax attention to the first tokens of a sequence and to its last ones.

    Tokens are counted without pads, so a row sees the same whatever lies before it.

    Args:
        q: `[B, HQ, T, d]`.
        k: `[B, H, T, d]`.
        v: `[B, H, T, V]`.
        scaling: the read scale.
        window: what a token sees.
        is_token: bool `[B, T]`, or `None` where all are.
        bounds: of packed sequences, in all rows laid one behind the other.
        held: what is kept between calls; written.

    Returns:
        `[B, T, HQ, V]`.
    """
    rows, _, time, _ = q.shape
    if is_token is None:
        is_token = torch.ones(rows, time, dtype=torch.bool, device=q.device)
    before = torch.zeros(rows, dtype=torch.long, device=q.device)
    if held is not None and held.counts is not None:
        before = held.counts
    # Number of each token within its sequence, -1 for a pad.
    ranks = torch.where(is_token, is_token.long().cumsum(1) - 1 + before.unsqueeze(1), -1)
    sequence = torch.zeros_like(ranks)
    if bounds is not None:
        starts = torch.tensor(bounds[:-1], device=q.device)
        number = torch.zeros(rows * time, dtype=torch.long, device=q.device)
        number[starts] = 1
        number = number.cumsum(0) - 1
        ranks = (torch.arange(rows * time, device=q.device) - starts[number]).view(rows, time)
        sequence = number.view(rows, time)
    keys, values, at, of = k, v, ranks, sequence
    if held is not None and held.keys is not None and held.values is not None and held.ranks is not None:
        keys, values = torch.cat((held.keys, k), 2), torch.cat((held.values, v), 2)
        at, of = torch.cat((held.ranks, ranks), 1), F.pad(sequence, (held.ranks.shape[1], 0))

    now, then = ranks.unsqueeze(2), at.unsqueeze(1)
    seen = (then >= 0) & (then <= now) & ((then < window.sinks) | (then > now - window.last))
    seen &= sequence.unsqueeze(2) == of.unsqueeze(1)
    # A pad sees itself, so that its weights are finite; nobody sees a pad.
    itself = torch.eye(time, dtype=torch.bool, device=q.device)
    seen |= F.pad(itself, (at.shape[1] - time, 0)) & (now < 0)
    keys, values = (x.where((at >= 0)[:, None, :, None], 0.0) for x in (keys, values))
    output = F.scaled_dot_product_attention(q, keys, values, seen.unsqueeze(1), scale=scaling, enable_gqa=True)
    if held is not None:
        _keep(held, keys, values, at, before + is_token.sum(1), window)
        held.seen += time
    return output.transpose(1, 2)


def _keep(held: WindowCacheLayer, keys: Tensor, values: Tensor, at: Tensor, counts: Tensor, window: Window) -> None:
    """Put sinks and the last tokens into their slots; one slot more takes what is not kept."""
    sinks, slots = window.sinks, window.sinks + window.last
    among_last = at >= counts.unsqueeze(1) - window.last
    place = torch.where(at < sinks, at, torch.where(among_last, sinks + (at - sinks) % window.last, slots))
    place = torch.where(at < 0, slots, place)
    rows, heads = keys.shape[:2]

    def placed(tensor: Tensor) -> Tensor:
        room = tensor.new_zeros(rows, heads, slots + 1, tensor.shape[3])
        return room.scatter(2, place[:, None, :, None].expand_as(tensor), tensor)[:, :, :slots].contiguous()

    held.keys, held.values = placed(keys), placed(values)
    held.ranks = at.new_full((rows, slots + 1), -1).scatter(1, place, at)[:, :slots].contiguous()
    held.counts = counts
