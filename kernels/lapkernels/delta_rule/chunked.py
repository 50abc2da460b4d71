"""The operator as matrix products over chunks of the time axis; plain PyTorch, differentiable, any length.

The derivation is in this folder's README. All chunks of all sequences are worked on at once; only the hand-over
of the state from chunk to chunk is a loop. Chunks lie along one axis `M`, ordered by their number within their
sequence and then by sequence, with longer sequences first: step `n` of the loop is then one slice of `M`, for rows
of one length and for packed sequences alike. `R = HV / H` value heads read one key head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapkernels.chunk_layout import from_chunks, packed_layout, rows_layout, to_chunks
from lapkernels.delta_rule.chunked_channels import decayed_by_channel
from lapkernels.delta_rule.reference import compute_dtype
from lapkernels.delta_rule.validation import read_boundaries


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
    lamb: Tensor | None = None,
    released: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the chunked form. Arguments as `delta_rule` has checked and completed them; `erase` `None` means `k`.

    With `lamb` the erase direction `k + lamb q` is not made: its products with k are those of k and of q, which are
    there for all value heads of a key head, and what it reads of the state is made with the write strength in it.

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
            layout = rows_layout(batch, time, chunk_size)
        else:
            layout = packed_layout(tuple(read_boundaries(cu_seqlens, time)), chunk_size, q.device)

        def chunked(x: Tensor) -> Tensor:
            """`[B, T, heads, width]` to `[M, H, heads / H, C, width]` in the compute dtype, by one copy."""
            x = to_chunks(x, layout).unflatten(-2, (key_heads, -1)).movedim(-4, -2)
            x = x.contiguous() if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)
            return x.flatten(0, -5)

        def cleared(x: Tensor) -> Tensor:
            """`[B, T, HV]` to `[M, H, R, C, 1]`, zero where there is no token: nothing decays, nothing is written.

            What is of each key channel has a last axis of K.
            """
            x = chunked(x if x.ndim == 4 else x.unsqueeze(-1))
            if layout.is_token is None:
                return x
            return x.where(layout.is_token.view(-1, 1, 1, layout.chunk, 1), 0.0)

        q_, k_, v_ = chunked(q), chunked(k), chunked(v)
        x_ = None if erase is None else chunked(erase)
        beta_, g_ = cleared(beta), None if g is None else cleared(g)
        if g is not None and g.ndim == 3:
            g_ = g_.squeeze(-1)  # pyright: ignore[reportOptionalMemberAccess] -- there where g is
        lamb_ = None if lamb is None else cleared(lamb)

        sequences = layout.counts[0]
        if initial_state is None:
            state = q_.new_zeros(sequences, key_heads, repeats, key_width, value_width)
        else:
            state = initial_state.to(dtype).unflatten(1, (key_heads, repeats))
            if layout.order is not None:
                state = state.index_select(0, layout.order)

        output, state = _chunks(q_, k_, v_, x_, beta_, g_, lamb_, scale, state, layout.counts, released)

        state = state.flatten(1, 2)
        if layout.order is not None:
            state = torch.empty_like(state).index_copy(0, layout.order, state)
        return from_chunks(output.permute(0, 3, 1, 2, 4).flatten(2, 3), layout, batch, time), state


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    beta: Tensor,
    g: Tensor | None,
    lamb: Tensor | None,
    scale: float,
    state: Tensor,
    counts: tuple[int, ...],
    released: bool,
) -> tuple[Tensor, Tensor]:
    """The chunked delta rule over chunks that are laid out already.

    Args:
        q: `[M, H, 1, C, K]`.
        k: `[M, H, 1, C, K]`, write directions.
        v: `[M, H, R, C, V]`.
        x: `[M, H, 1 or R, C, K]`, erase directions; `None` for `k`, or `k + lamb q`.
        beta: `[M, H, R, C, 1]`.
        g: `[M, H, R, C]`, log decay, `[M, H, R, C, K]` of each channel, or `None`.
        lamb: `[M, H, R, C, 1]`, query feedback, or `None`.
        scale: factor on q where it reads.
        state: `[sequences, H, R, K, V]`.
        counts: the sequences that still run, step by step.
        released: whether the products within a chunk pair the earlier step's erase direction with the later one's
            write direction, as released kernels have it.

    Returns:
        The output `[M, H, R, C, V]` and the final state `[sequences, H, R, K, V]`.
    """
    leading = v.shape[:3]

    def flat(x: Tensor) -> Tensor:
        """`[M, H, 1 or R, ...]` to `[M H R, ...]`."""
        return x.expand(*leading, *x.shape[3:]).flatten(0, 2)

    read_q, carried_x = q * scale, beta * (k if x is None else x)
    if g is not None and g.ndim == 5:
        # Products are made with the decays in them, for each value head.
        if lamb is not None:
            carried_x = torch.addcmul(carried_x, beta * lamb, q)
        carried_q, carried_x, written_k, kept, erased, read = decayed_by_channel(
            flat(g), flat(read_q), flat(carried_x), flat(k)
        )
    else:
        read = read_q @ k.mT
        erased = carried_x @ k.mT
        if lamb is not None:
            # The same products with q, of which `scale` is taken out again. Feedback of zero changes no bit.
            mix, pairs = (lamb / scale, read) if scale else (lamb, q @ k.mT)
            erased = erased + beta * ((mix * pairs).mT if released else mix * pairs)
            carried_x = torch.addcmul(carried_x, beta * lamb, q)
        carried_q, written_k, kept = read_q, k, None
        erased, read = flat(erased), flat(read)
        if g is None:
            read = read.tril()
        else:
            from_start, to_end, erased, read = _Decayed.apply(flat(g), erased, read)
            carried_x = carried_x * from_start.view_as(beta)
            carried_q = read_q * from_start.view_as(beta)
            written_k = k * to_end.view_as(beta)
            kept = from_start[:, -1:, None]
        carried_q, carried_x, written_k = flat(carried_q), flat(carried_x), flat(written_k)

    inverse = _InverseOfUnitLower.apply(erased)
    starts, updates, state = _HandOver.apply(
        inverse @ flat(beta * v),
        inverse @ carried_x,
        written_k,
        kept,
        state.flatten(0, 2),
        tuple(count * leading[1] * leading[2] for count in counts),
    )
    output = torch.baddbmm(carried_q @ starts, read, updates)
    return output.unflatten(0, leading), state.unflatten(0, (-1, *leading[1:]))


class _HandOver(torch.autograd.Function):
    """The state from chunk to chunk: one product a chunk in the loop, forward and backward; the rest in batches.

    With `U = W_v - W_x S` the state after a chunk, `kept S + K^T U`, is `(kept I - K^T W_x) S + K^T W_v`, and neither
    the matrix nor the term added knows of S. `N` counts chunks times heads.

    Args:
        fresh: `W_v` `[N, C, V]`.
        carried: `W_x` `[N, C, K]`.
        written: `K` `[N, C, K]`, decayed to the end of the chunk.
        kept: `[N, 1, 1]`, the decay over the chunk, `[N, K, 1]` of each channel; `None` for 1.
        state: `[sequences times heads, K, V]`.
        counts: sequences times heads that still run, step by step.

    Returns:
        The states before the chunks `[N, K, V]`, the updates U `[N, C, V]`, the final state in the shape of `state`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fresh: Tensor,
        carried: Tensor,
        written: Tensor,
        kept: Tensor | None,
        state: Tensor,
        counts: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        identity = torch.eye(written.shape[-1], dtype=state.dtype, device=state.device)
        unchanged = identity.expand(written.shape[0], -1, -1) if kept is None else kept * identity
        transition = torch.baddbmm(unchanged, written.mT, carried, alpha=-1)
        starts, finished = [], []
        terms = torch.bmm(written.mT, fresh)
        for matrix, term in zip(transition.split(counts), terms.split(counts), strict=True):
            if matrix.shape[0] < state.shape[0]:
                finished.append(state[matrix.shape[0] :])
                state = state[: matrix.shape[0]]
            starts.append(state)
            state = torch.baddbmm(term, matrix, state)
        starts = torch.cat(starts)
        updates = torch.baddbmm(fresh, carried, starts, alpha=-1)
        ctx.save_for_backward(carried, written, kept, transition, starts, updates)
        ctx.counts = counts
        return starts, updates, torch.cat((state, *finished[::-1])) if finished else state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_starts, d_updates, d_final = gradients
        carried, written, kept, transition, starts, updates = ctx.saved_tensors
        direct = torch.baddbmm(d_starts, carried.mT, d_updates, alpha=-1)
        d_state = d_final[: ctx.counts[-1]]
        d_after = []
        steps = zip(transition.mT.split(ctx.counts), direct.split(ctx.counts), strict=True)
        for matrix, term in reversed(list(steps)):
            if matrix.shape[0] > d_state.shape[0]:
                d_state = torch.cat((d_state, d_final[d_state.shape[0] : matrix.shape[0]]))
            d_after.append(d_state)
            d_state = torch.baddbmm(term, matrix, d_state)
        d_after = torch.cat(d_after[::-1])
        d_fresh = torch.baddbmm(d_updates, written, d_after)
        d_carried = torch.baddbmm(carried, d_fresh, starts.mT, beta=0, alpha=-1)
        d_written = torch.bmm(updates, d_after.mT)
        d_kept = None if kept is None else (d_after * starts).sum_to_size(kept.shape)
        return d_fresh, d_carried, d_written, d_kept, d_state, None


class _Decayed(torch.autograd.Function):
    """The decays within each chunk, and products between its steps with the decay from one to the other.

    The differences of the running sum cancel: after one strong decay (-50) an fp32 sum would carry its rounding error
    into every later pair. So the sum and its differences are fp64; only what goes into the exponential is rounded.

    Args:
        g: `[N, C]`, log decay, never positive.
        erased: `[N, C, C]`, of the later step's erase direction with the earlier one's write direction.
        read: `[N, C, C]`, of the later step's read direction with the earlier one's write direction.

    Returns:
        The decay from the start of the chunk to each step and from each step to its end, both `[N, C]`, and the two
        products times `exp(G_t - G_s)`, zero for s > t.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, erased: Tensor, read: Tensor) -> tuple[Tensor, ...]:
        total = g.cumsum(-1, dtype=torch.float64)
        # Above the diagonal this may overflow; `tril` puts zeros there whatever it finds.
        within = erased.new_empty(erased.shape)
        torch.sub(total.unsqueeze(-1), total.unsqueeze(-2), out=within).exp_().tril_()
        # Not in place: see the README ("Compiled") of results that are.
        from_start, to_end = total.to(g.dtype).exp(), within[:, -1].clone()
        erased, read = erased * within, read * within
        ctx.save_for_backward(within, from_start, to_end, erased, read)
        return from_start, to_end, erased, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_from_start, d_to_end, d_erased, d_read = gradients
        within, from_start, to_end, erased, read = ctx.saved_tensors
        # By the logarithm of each decay, which is a difference of two running sums.
        logs = (d_erased * erased).addcmul_(d_read, read)
        logs[:, -1].addcmul_(d_to_end, to_end)
        # One sum, not one over rows less one over columns, which torch 2.11's compiler would put into one kernel: see
        # the README ("Compiled").
        d_total = (d_from_start * from_start).add_((logs - logs.mT).sum(-1))
        d_g = d_total.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1).to(d_total.dtype)
        return d_g, d_erased * within, d_read * within


class _InverseOfUnitLower(torch.autograd.Function):
    """`(I + A)^-1` for strictly lower triangular `A` `[N, C, C]`; what lies on its diagonal and above is not read."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        right = torch.bmm(gradients[0], inverse.mT)
        return torch.baddbmm(right, inverse.mT, right, beta=0, alpha=-1).tril_(-1)
