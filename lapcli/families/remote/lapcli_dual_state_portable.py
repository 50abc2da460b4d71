"""The operator of dual-state attention in a few lines of torch, for machines without lapkernels.

Written by lapcli beside models that it converted. Licence: Apache 2.0.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 16


def portable_dual_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mixture: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    bounds: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator of `lapkernels.dual_state` in a few lines of torch, for machines without lapkernels.

    Chunks of 16 tokens, one after the other; within one, the decay from each token to each later one, by channel.

    Args:
        q: `[B, T, HQ, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: `[B, T, states, H, K]`, log decays.
        mixture: `[states]`, the share of each state.
        scale: factor on q.
        initial_state: `[B or sequences, states, H, K, V]`.
        bounds: of packed sequences, from 0 to T, where B is 1.

    Returns:
        The output `[B, T, HQ, V]` in v's dtype and the final states in fp32 (fp64 for fp64).
    """
    if bounds is not None:
        parts = [
            portable_dual_state(
                q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], mixture, scale,
                None if initial_state is None else initial_state[n : n + 1],
            )
            for n, (a, b) in enumerate(itertools.pairwise(bounds))
        ]  # fmt: skip
        return torch.cat([output for output, _ in parts], 1), torch.cat([state for _, state in parts])
    dtype, heads = v.dtype, k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        q = (_wide(q) * scale).unflatten(2, (heads, -1))
        k, v, g, mixture = (_wide(x) for x in (k, v, g, mixture))
        if initial_state is None:
            state = v.new_zeros(q.shape[0], g.shape[2], heads, k.shape[3], v.shape[3])
        else:
            state = initial_state.to(v.dtype)
        outputs = []
        for start in range(0, q.shape[1], _CHUNK):
            part = slice(start, start + _CHUNK)
            total = g[:, part].double().cumsum(1)
            after = (total.unsqueeze(2) - total.unsqueeze(1)).to(v.dtype)
            later = torch.ones(after.shape[1:3], dtype=torch.bool, device=q.device).triu(1)
            decay = after.masked_fill(later[:, :, None, None, None], -math.inf).exp()
            pairs = torch.einsum("bthrk,bshk,btsahk,a->bhrts", q[:, part], k[:, part], decay, mixture)
            carried = torch.einsum("bthrk,btahk,a,bahkv->bthrv", q[:, part], total.exp().to(v.dtype), mixture, state)
            outputs.append(carried + torch.einsum("bhrts,bshv->bthrv", pairs, v[:, part]))
            written = torch.einsum("bsahk,bshk,bshv->bahkv", decay[:, -1], k[:, part], v[:, part])
            state = total[:, -1].exp().to(v.dtype).unsqueeze(-1) * state + written
        return torch.cat(outputs, 1).flatten(2, 3).to(dtype), state


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
