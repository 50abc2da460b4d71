"""The operator as matrix products over chunks of the time axis; plain PyTorch, differentiable, any length.

The derivation is in this folder's README. All chunks of all sequences are worked on at once; only the hand-over
of the state from chunk to chunk is a loop. Chunks lie along one axis `M`, ordered by their number within their
sequence and then by sequence, with longer sequences first: step `n` of the loop is then one slice of `M`, for rows
of one length and for packed sequences alike. `R = HV / H` value heads read one key head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.delta_rule.reference import compute_dtype
from lapkernels.delta_rule.validation import read_boundaries


class _Layout(NamedTuple):
    """How tokens are laid out in chunks; `take` and `put` are `None` where reshaping does it."""

    chunk: int
    counts: tuple[int, ...]
    """How many sequences still run at each step of the loop; never rises."""
    take: Tensor | None
    """`[M * C]`, the token in each place of each chunk, `T` (one past the end) where there is none."""
    put: Tensor | None
    """`[T]`, the place of each token among `[M * C]`."""
    order: Tensor | None
    """`[sequences]`, the sequences from the longest to the shortest."""


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run the chunked form. Arguments as `delta_rule` has checked and completed them; `erase` `None` means `k`.

    Without `cu_seqlens` nothing here depends on values, so the call can be compiled whole and captured in a
    CUDA graph.

    Returns:
        The output `[B, T, HV, V]` and the final state `[sequences, HV, K, V]`, both in the compute dtype.
    """
    with torch.autocast(q.device.type, enabled=False):
        batch, time, key_heads, key_width = q.shape
        value_heads, value_width = v.shape[2:]
        repeats = value_heads // key_heads
        dtype = compute_dtype(q)
        if cu_seqlens is None:
            layout = _rows_layout(batch, time, chunk_size)
        else:
            layout = _packed_layout(read_boundaries(cu_seqlens, time), chunk_size, q.device)

        def chunked(x: Tensor) -> Tensor:
            """`[B, T, heads, width]` to `[M, H, heads / H, C, width]` in the compute dtype."""
            x = _to_chunks(x, layout)
            return x.unflatten(2, (key_heads, -1)).permute(0, 2, 3, 1, 4).to(dtype)

        q_, k_, v_ = chunked(q) * scale, chunked(k), chunked(v)
        x_ = k_ if erase is None else chunked(erase)
        beta_ = chunked(beta.unsqueeze(-1))
        g_ = None if g is None else chunked(g.unsqueeze(-1)).squeeze(-1)

        sequences = layout.counts[0]
        if initial_state is None:
            state = q_.new_zeros(sequences, key_heads, repeats, key_width, value_width)
        else:
            state = initial_state.to(dtype).unflatten(1, (key_heads, repeats))
            if layout.order is not None:
                state = state.index_select(0, layout.order)

        output, state = _scan(q_, k_, v_, x_, beta_, g_, state, layout.counts)

        output = output.permute(0, 3, 1, 2, 4).flatten(2, 3)
        state = state.flatten(1, 2)
        if layout.order is not None:
            state = torch.empty_like(state).index_copy(0, layout.order, state)
        return _from_chunks(output, layout, batch, time), state


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    counts: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The chunked delta rule over chunks that are laid out already.

    Args:
        q: `[M, H, 1, C, K]`, scaled.
        k: `[M, H, 1, C, K]`, write directions.
        v: `[M, H, R, C, V]`.
        x: `[M, H, 1 or R, C, K]`, erase directions.
        beta: `[M, H, R, C, 1]`.
        g: `[M, H, R, C]`, log decay, or `None`.
        state: `[sequences, H, R, K, V]`.
        counts: the sequences that still run, step by step.

    Returns:
        The output `[M, H, R, C, V]` and the final state `[sequences, H, R, K, V]`.
    """
    key_width = k.shape[-1]
    erased = beta * (x @ k.mT)
    read = q @ k.mT
    carried_x, carried_q, written_k, kept = beta * x, q, k, None
    if g is not None:
        total, within = _decays(g)
        from_start = total.exp().unsqueeze(-1)
        erased = erased * within
        read = read * within
        carried_x = carried_x * from_start
        carried_q = q * from_start
        # From each step to the end of the chunk; the last row of `within` is that, exactly.
        written_k = k * within[..., -1, :].unsqueeze(-1)
        kept = from_start[..., -1:, :]
    read = read.tril()

    solved = _inverse_of_unit_lower(erased.tril(-1)) @ torch.cat(
        ((beta * v), carried_x.expand(*v.shape[:-1], key_width)), dim=-1
    )
    fresh, carried = solved.split((v.shape[-1], key_width), dim=-1)
    written = written_k.mT

    starts, updates, finished = [], [], []
    first = 0
    for count in counts:
        if count < state.shape[0]:
            finished.append(state[count:])
            state = state[:count]
        part = slice(first, first + count)
        first += count
        update = fresh[part] - carried[part] @ state
        starts.append(state)
        updates.append(update)
        state = (state if kept is None else kept[part] * state) + written[part] @ update
    finished.append(state)

    output = carried_q @ torch.cat(starts) + read @ torch.cat(updates)
    return output, torch.cat(finished[::-1])


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Running log decay within each chunk, and the decay between its steps.

    The differences of the running sum cancel: after one strong decay (-50) they would carry its rounding error
    into every later pair. So the sum is kept in two parts, whose differences are exact where it matters.

    Args:
        g: `[..., C]`, never positive.

    Returns:
        The running sum `[..., C]`, and `exp(G_t - G_s)` as `[..., t, s]`, zero for s > t.
    """
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    total = g.double().cumsum(-1)
    high = total.to(g.dtype)
    low = (total - high.double()).to(g.dtype)
    between = (high.unsqueeze(-1) - high.unsqueeze(-2)) + (low.unsqueeze(-1) - low.unsqueeze(-2))
    # Masked before the exponential: above the diagonal the difference is positive and would overflow.
    return high, between.masked_fill(later, -torch.inf).exp()


def _inverse_of_unit_lower(strictly_lower: Tensor) -> Tensor:
    """`(I + A)^-1` for strictly lower triangular `A` `[..., C, C]`."""
    identity = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype, device=strictly_lower.device)
    return torch.linalg.solve_triangular(
        strictly_lower + identity, identity.expand_as(strictly_lower), upper=False, unitriangular=True
    )


def _rows_layout(batch: int, time: int, chunk_size: int) -> _Layout:
    chunk = min(chunk_size, time)
    return _Layout(chunk, (batch,) * -(-time // chunk), None, None, None)


def _packed_layout(bounds: list[int], chunk_size: int, device: torch.device) -> _Layout:
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    chunk = min(chunk_size, int(lengths.max()))
    order = torch.argsort(lengths, descending=True, stable=True)
    chunks = (lengths[order] + chunk - 1) // chunk
    counts = tuple(int((chunks > step).sum()) for step in range(int(chunks[0])))

    step = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    sequence = order[torch.cat([torch.arange(count) for count in counts])]
    offset = step.unsqueeze(1) * chunk + torch.arange(chunk)
    is_token = offset < lengths[sequence].unsqueeze(1)
    take = torch.where(is_token, starts[sequence].unsqueeze(1) + offset, bounds[-1]).flatten()
    put = torch.empty(bounds[-1], dtype=torch.long)
    put[take[is_token.flatten()]] = is_token.flatten().nonzero().squeeze(1)
    return _Layout(chunk, counts, take.to(device), put.to(device), order.to(device))


def _to_chunks(x: Tensor, layout: _Layout) -> Tensor:
    """`[B, T, ...]` to `[M, C, ...]`; places without a token hold zeros, which decay, erase and write nothing."""
    if layout.take is not None:
        ended = torch.cat((x[0], x.new_zeros(1, *x.shape[2:])))
        return ended.index_select(0, layout.take).unflatten(0, (-1, layout.chunk))
    steps = len(layout.counts)
    missing = steps * layout.chunk - x.shape[1]
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (steps, layout.chunk)).transpose(0, 1).flatten(0, 1)


def _from_chunks(x: Tensor, layout: _Layout, batch: int, time: int) -> Tensor:
    """The inverse of `_to_chunks`."""
    if layout.put is not None:
        return x.flatten(0, 1).index_select(0, layout.put).unsqueeze(0)
    return x.unflatten(0, (len(layout.counts), batch)).transpose(0, 1).flatten(1, 2)[:, :time]
