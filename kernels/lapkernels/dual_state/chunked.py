"""The operator as matrix products over chunks of the time axis; plain PyTorch, differentiable, any length.

The derivation is in this folder's README. All chunks of all sequences are worked on at once, along one axis `M` (see
`lapkernels.chunk_layout`); only the hand-over of the states from chunk to chunk is a loop, of one multiplication and
one sum. `R = HQ / H` query heads read the states of one key head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapkernels.chunk_layout import Layout, from_chunks, packed_layout, rows_layout, to_chunks
from lapkernels.delta_rule.reference import compute_dtype
from lapkernels.delta_rule.validation import read_boundaries

_AT_ONCE = {"cpu": 1 << 21}
"""Numbers of the products between pairs of steps that are held at once, by device: on a CPU what its caches hold."""
_AT_ONCE_ELSEWHERE = 1 << 26
_NOTHING_LEFT = -1e4
"""A log decay whose exponential is zero in fp64: what is below it counts as it, since infinities have no difference."""


def dual_state_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mixture: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run the chunked form. Arguments as `dual_state` has checked and completed them.

    Without `cu_seqlens` nothing here depends on values, so the call can be compiled whole and captured in a CUDA graph.

    Returns:
        The output `[B, T, HQ, V]` and the final state `[sequences, states, H, K, V]`, both in the compute dtype.
    """
    with torch.autocast(q.device.type, enabled=False):
        batch, time, _, key_width = q.shape
        heads, value_width, states = k.shape[2], v.shape[3], g.shape[2]
        dtype = compute_dtype(q)
        if cu_seqlens is None:
            layout = rows_layout(batch, time, chunk_size)
        else:
            layout = packed_layout(tuple(read_boundaries(cu_seqlens, time)), chunk_size, q.device)

        q_ = _chunks(q.unflatten(2, (heads, -1)), layout, dtype) * scale
        k_ = _cleared(_chunks(k.unsqueeze(3), layout, dtype), layout).squeeze(2)
        v_ = _cleared(_chunks(v.unsqueeze(3), layout, dtype), layout).squeeze(2)
        g_ = _cleared(_chunks(g.transpose(2, 3), layout, dtype), layout)
        mixture = mixture.to(dtype)

        # After one gate of -50 an fp32 sum would carry its rounding error into every later pair of the chunk.
        total = g_.clamp(min=_NOTHING_LEFT).cumsum(-2, dtype=torch.float64)
        from_start = total.exp().to(dtype)
        to_end = (total[..., -1:, :] - total).exp().to(dtype)

        if initial_state is None:
            state = q_.new_zeros(layout.counts[0], heads, states, key_width, value_width)
        else:
            state = initial_state.to(dtype).transpose(1, 2)
            if layout.order is not None:
                state = state.index_select(0, layout.order)
        # [M, H, states, K, V]
        added = (k_.unsqueeze(2) * to_end).mT @ v_.unsqueeze(2)
        starts, state = _HandOver.apply(from_start[..., -1, :, None], added, state, layout.counts)

        # What comes from before the chunk: all states side by side are one longer key axis.
        decayed = mixture[:, None, None] * from_start
        carried = q_.unsqueeze(4) * decayed.transpose(2, 3).unsqueeze(2)
        carried = carried.flatten(2, 3).flatten(-2)
        output = carried @ starts.flatten(2, 3)
        pairs = _Pairs.apply(q_, k_, total, mixture)
        output = output + pairs.flatten(2, 3) @ v_
        output = output.unflatten(2, (-1, layout.chunk))

        state = state.transpose(1, 2)
        if layout.order is not None:
            state = torch.empty_like(state).index_copy(0, layout.order, state)
        # [M, H, R, C, V] to [M, C, HQ, V]
        return from_chunks(output.permute(0, 3, 1, 2, 4).flatten(2, 3), layout, batch, time), state


def _chunks(x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """`[B, T, H, n, width]` to `[M, H, n, C, width]` in the compute dtype."""
    x = to_chunks(x, layout)
    x = x if layout.take is not None else x.flatten(0, 1)
    return x.movedim(1, 3).to(dtype, memory_format=torch.contiguous_format)


def _cleared(x: Tensor, layout: Layout) -> Tensor:
    """`[M, H, n, C, width]` with zeros where there is no token: nothing decays, nothing is written."""
    if layout.is_token is None:
        return x
    return x.where(layout.is_token.view(-1, 1, 1, layout.chunk, 1), 0.0)


class _HandOver(torch.autograd.Function):
    """The states from chunk to chunk, `S <- kept S + added`.

    Args:
        kept: `[M, H, states, K, 1]`, the decay over each chunk.
        added: `[M, H, states, K, V]`, what each chunk writes, decayed to its end.
        state: `[sequences, H, states, K, V]`, the longest sequence first.
        counts: sequences that still run, step by step.

    Returns:
        The states before the chunks, in the shape of `added`, and the final ones.
    """

    @staticmethod
    def forward(ctx: Any, kept: Tensor, added: Tensor, state: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        starts, finished = [], []
        for factor, term in zip(kept.split(counts), added.split(counts), strict=True):
            if term.shape[0] < state.shape[0]:
                finished.append(state[term.shape[0] :])
                state = state[: term.shape[0]]
            starts.append(state)
            state = torch.addcmul(term, factor, state)
        starts = torch.cat(starts)
        ctx.save_for_backward(kept, starts)
        ctx.counts = counts
        return starts, torch.cat((state, *finished[::-1])) if finished else state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_starts, d_final = gradients
        kept, starts = ctx.saved_tensors
        d_state = d_final[: ctx.counts[-1]]
        d_added = []
        steps = zip(kept.split(ctx.counts), d_starts.split(ctx.counts), strict=True)
        for factor, term in reversed(list(steps)):
            if term.shape[0] > d_state.shape[0]:
                d_state = torch.cat((d_state, d_final[d_state.shape[0] : term.shape[0]]))
            d_added.append(d_state)
            d_state = torch.addcmul(term, factor, d_state)
        d_added = torch.cat(d_added[::-1])
        return (d_added * starts).sum(-1, keepdim=True), d_added, d_state, None


class _Pairs(torch.autograd.Function):
    """`P[r, t, s] = sum_k q[r, t, k] k[s, k] sum_a mixture_a exp(G_a[t, k] - G_a[s, k])` for s <= t, else 0.

    Each pair of steps has a decay of its own in each channel, so this is no product of two matrices: splitting the
    exponential would take `exp(-G)`, which has no bound. The decays of the states are mixed first, so further states
    cost no further products. They are made again in the backward pass: nothing is kept but the inputs.

    Args:
        q: `[M, H, R, C, K]`, scaled.
        k: `[M, H, C, K]`.
        total: `[M, H, states, C, K]`, running sums of the log decays, fp64.
        mixture: `[states]`.

    Returns:
        `[M, H, R, C, C]`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, total: Tensor, mixture: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, total, mixture)
        found = []
        for part in _parts(k):
            mixed = sum(mixture[a] * decay for a, decay in enumerate(_decays(total[part], k.dtype)))
            # [M, H, C, R, K] @ [M, H, C, K, C]
            found.append(q[part].transpose(2, 3) @ (mixed * k[part].unsqueeze(2)).mT)
        return torch.cat(found).transpose(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, total, mixture = ctx.saved_tensors
        d_pairs = gradients[0].transpose(2, 3)
        d_q, d_k, d_total = [], [], []
        d_mixture = torch.zeros_like(mixture)
        for part in _parts(k):
            decays = list(_decays(total[part], k.dtype))
            mixed = sum(mixture[a] * decay for a, decay in enumerate(decays))
            keys = k[part].unsqueeze(2)
            d_q.append((d_pairs[part] @ (mixed * keys)).transpose(2, 3))
            # By k[s] decay[t, s], summed over the query heads: [M, H, C, C, K].
            pulled = d_pairs[part].mT @ q[part].transpose(2, 3)
            d_k.append((pulled * mixed).sum(2))
            pulled = pulled * keys
            for a, decay in enumerate(decays):
                decay.mul_(pulled)
                d_mixture[a] += decay.sum()
                # By the logarithm of each decay, a difference of two running sums.
                d_total.append(decay.sum(3, dtype=total.dtype).sub_(decay.sum(2, dtype=total.dtype)).mul_(mixture[a]))
        states = len(mixture)
        by_state = [torch.cat(d_total[a::states]) for a in range(states)]
        return torch.cat(d_q), torch.cat(d_k), torch.stack(by_state, 2), d_mixture


def _parts(k: Tensor) -> list[slice]:
    """Slices of the chunks `[M, H, C, K]` whose pairs are worked on together."""
    chunks, heads, chunk, width = k.shape
    at_once = max(1, _AT_ONCE.get(k.device.type, _AT_ONCE_ELSEWHERE) // (heads * chunk * chunk * width))
    return [slice(first, first + at_once) for first in range(0, chunks, at_once)]


def _decays(total: Tensor, dtype: torch.dtype) -> Any:
    """State by state, the decay from step s to step t in each channel, `[M, H, C, C, K]`, zero for s > t."""
    chunk = total.shape[3]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).triu(1).unsqueeze(-1)
    for sums in total.unbind(2):
        # Never the exponential of a positive number: what lies above the diagonal is replaced before.
        yield (sums.unsqueeze(3) - sums.unsqueeze(2)).to(dtype).masked_fill_(later, -torch.inf).exp_()
