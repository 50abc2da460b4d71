"""The Triton kernels of the chunked form as one differentiable call."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapkernels.decoding.configs import power_of_two
from lapkernels.delta_rule.gates import GIVEN, RawGates
from lapkernels.delta_rule.reference import compute_dtype
from lapkernels.delta_rule.triton_backward import channel_gradients, gate_gradients, pair_gradients, walk_back
from lapkernels.delta_rule.triton_channels_backward import gradients_by_channel
from lapkernels.delta_rule.triton_launch import (
    BY_CHANNEL,
    CHUNK,
    LEVELS,
    Kept,
    Tiles,
    choose_tiles,
    delta_rule_triton,
    empty,
    gate_flags,
    gate_parameters,
    key_blocks,
    key_tile,
    layout_of,
    on_device,
)


def delta_rule_triton_with_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    gates: RawGates = GIVEN,
    qk_l2norm: bool = False,
    norm_eps: float = 1e-6,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As `delta_rule_triton`, with gradients to all tensors: the output and the final state."""
    return _DeltaRule.apply(
        q, k, v, beta, g, erase, initial_state, gates.A_log, gates.dt_bias, cu_seqlens, gates.strength, scale,
        qk_l2norm, norm_eps, tiles,
    )  # fmt: skip


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        erase: Tensor | None,
        initial_state: Tensor | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        strength: float | None,
        scale: float,
        qk_l2norm: bool,
        norm_eps: float,
        tiles: Tiles | None,
    ) -> tuple[Tensor, Tensor]:
        output, final, kept = delta_rule_triton(
            q, k, v, beta, g, erase, scale, initial_state, cu_seqlens, gates=RawGates(strength, A_log, dt_bias),
            qk_l2norm=qk_l2norm, norm_eps=norm_eps, keep=True, tiles=tiles,
        )  # fmt: skip
        assert kept is not None
        assert final is not None
        ctx.save_for_backward(q, k, v, beta, g, erase, initial_state, A_log, dt_bias, cu_seqlens, *kept)
        ctx.settings = (strength, scale, qk_l2norm, norm_eps, tiles)
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, erase, initial_state, A_log, dt_bias, cu_seqlens, *kept = ctx.saved_tensors
        strength, scale, qk_l2norm, norm_eps, tiles = ctx.settings
        gates = RawGates(strength, A_log, dt_bias)
        d_output, d_final = gradients
        with on_device(q):
            found = _gradients(
                q, k, v, beta, g, erase, initial_state, gates, cu_seqlens, Kept(*kept), d_output, d_final, scale,
                qk_l2norm, norm_eps, tiles,
            )  # fmt: skip
        return (*found, None, None, None, None, None, None)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    gates: RawGates,
    cu_seqlens: Tensor | None,
    kept: Kept,
    d_output: Tensor,
    d_final: Tensor,
    scale: float,
    qk_l2norm: bool,
    norm_eps: float,
    tiles: Tiles | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta, g, erase, the initial state, A_log and dt_bias, in the order of the arguments."""
    _, time, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    repeats = value_heads // key_heads
    by_channel = g is not None and g.ndim == 4
    if tiles is None:
        tiles = choose_tiles(key_width, value_width, q.dtype, erasing=erase is not None or by_channel)
    layout = layout_of(q, cu_seqlens)
    q_, k_, v_, d_o = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, d_output))
    x = k_ if erase is None else erase if erase.stride(-1) == 1 else erase.contiguous()
    per_value_head = erase is not None and erase.shape[2] == value_heads and repeats > 1
    block0, block1 = key_blocks(key_width)
    # With a decay of each channel more is held of each.
    channels = min(32, key_tile(key_width)) if by_channel else key_tile(key_width)
    blocks = -(-key_width // channels)
    all_chunks = layout.all_chunks
    wide = compute_dtype(q)

    ends = torch.empty_like(kept.starts)
    d_b = torch.empty_like(kept.updates)
    d_initial = empty(q, (layout.count, value_heads, key_width, value_width), dtype=wide)
    table, bounds, chunk_starts = (
        kept.total if each is None else each for each in (layout.table, layout.bounds, layout.chunk_starts)
    )
    shared: dict[str, Any] = {
        "H": key_heads, "R": repeats, "K": key_width, "V": value_width, "C": CHUNK, "ERASE": erase is not None,
        "ERASE_R": per_value_head, "PACKED": cu_seqlens is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    inputs = (*q_.stride()[:3], *k_.stride()[:3], *x.stride()[:3])
    walked, walk_inputs = (q_, k_, x), inputs
    if by_channel:
        read, erased, write = kept.decayed.unsqueeze(1)
        walked, walk_inputs = (read, write, erased), (*read.stride()[:3], *write.stride()[:3], *erased.stride()[:3])
    # What the walk had kept of it is by chunks; once more by steps is the least that can be done.
    written = gates.write_strength(beta)
    upstream = (*d_o.stride()[:3], *written.stride())
    # The walk back holds more at once.
    block = min(64, tiles.value_block)
    launch: Any = walk_back[(layout.count * value_heads * -(-value_width // block),)]
    launch(
        *walked, d_o, kept.pairs, kept.factors, kept.kept, d_final.contiguous(), d_initial, ends, d_b,
        bounds, chunk_starts, time, layout.chunks, *walk_inputs, *d_o.stride()[:3],
        **shared | (BY_CHANNEL if by_channel else {}),
        BK0=block0, BK1=block1, BV=block, INITIAL=initial_state is not None, BY_CHANNEL=by_channel,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip

    per_step = (all_chunks, value_heads, CHUNK)
    d_read, d_erased = (empty(q, (*per_step, CHUNK)) for _ in range(2))
    total_by_pairs, beta_by_pairs = (empty(q, per_step, dtype=wide) for _ in range(2))
    total_by_channels, beta_by_channels = (empty(q, (blocks, *per_step), dtype=wide) for _ in range(2))
    value_tile = min(64 if q.dtype != torch.float32 else 32, max(16, power_of_two(value_width)))
    launch = pair_gradients[(all_chunks * value_heads,)]
    launch(
        q_, k_, x, d_o, written, kept.total, kept.norms, kept.updates, d_b, d_read, d_erased, total_by_pairs,
        beta_by_pairs, table, bounds, scale, time, layout.chunks, all_chunks, *inputs, *upstream, **shared,
        GATED=g is not None, NORM=qk_l2norm, BK=channels, BV=value_tile, BY_CHANNEL=by_channel, num_warps=4,
    )  # fmt: skip
    # The normalisation needs all channels of a head: in the kernel where one block holds them, else afterwards.
    afterwards = qk_l2norm and blocks > 1
    d_q, d_k = (torch.empty(q.shape, dtype=wide if afterwards else q.dtype, device=q.device) for _ in range(2))
    d_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    d_x = d_q if erase is None else torch.empty(erase.shape, dtype=erase.dtype, device=q.device)
    d_beta = torch.empty(beta.shape, dtype=beta.dtype, device=q.device)
    d_g = d_beta if g is None else torch.empty(g.shape, dtype=g.dtype, device=q.device)
    inner = (
        q_, k_, x, v_, d_o, written, kept.total, kept.norms, kept.starts, ends, kept.updates, d_b, d_read, d_erased,
        d_q, d_k, d_x, d_v,
    )  # fmt: skip
    outer = (table, bounds, scale, time, layout.chunks, all_chunks)
    strides = (
        *inputs, *v_.stride()[:3], *upstream, *d_q.stride()[:3], *d_x.stride()[:3], *d_v.stride()[:3]
    )  # fmt: skip
    options = {**shared, "NORM": qk_l2norm, "BK": channels, "BV": value_tile, "UNNORM": qk_l2norm and not afterwards}
    if by_channel:
        launch = gradients_by_channel[(all_chunks * key_heads, blocks)]
        launch(
            *inner, d_g, beta_by_channels, *outer, *strides, *d_g.stride()[:3], **options, LEVELS=LEVELS, num_warps=8
        )
        # Its shares in the gradient of beta are all there is, and that of g is whole.
        beta_by_pairs, beta_by_channels = beta_by_channels[0], beta_by_channels[1:]
    else:
        launch = channel_gradients[(all_chunks * key_heads, blocks)]
        launch(
            *inner, total_by_channels, beta_by_channels, *outer, *strides, **options, GATED=g is not None, num_warps=8
        )
    gate, of_gate = (beta, d_beta) if g is None or by_channel else (g, d_g)
    rated, biased = gates.A_log is not None, gates.dt_bias is not None
    d_rates, d_biases = (empty(q, (all_chunks, value_heads) if each else (0,), dtype=wide) for each in (rated, biased))
    launch = gate_gradients[(all_chunks * value_heads,)]
    launch(
        total_by_pairs, total_by_channels, beta_by_pairs, beta_by_channels, gate, beta,
        *gate_parameters(gates, d_beta), of_gate, d_beta, d_rates, d_biases, table, bounds, gates.strength or 1.0,
        time, layout.chunks, all_chunks, *gate.stride(), *beta.stride(), *of_gate.stride(), *d_beta.stride(),
        HV=value_heads, C=CHUNK, BLOCKS=len(beta_by_channels), GATED=g is not None and not by_channel,
        PACKED=cu_seqlens is not None, **gate_flags(gates), num_warps=1,
    )  # fmt: skip
    if afterwards:
        d_q, d_k = (_through_norm(each, grad, norm_eps) for each, grad in ((q, d_q), (k, d_k)))
    return (
        d_q,
        d_k,
        d_v,
        d_beta,
        None if g is None else d_g,
        None if erase is None else d_x,
        None if initial_state is None else d_initial.to(initial_state.dtype),
        # One share a chunk, added up in a fixed order.
        None if gates.A_log is None else d_rates.sum(0).to(gates.A_log.dtype),
        None if gates.dt_bias is None else d_biases.sum(0).to(gates.dt_bias.dtype),
    )


def _through_norm(x: Tensor, gradient: Tensor, eps: float) -> Tensor:
    """The gradient of x from that of `x / sqrt(sum x^2 + eps)`."""
    wide = x.to(gradient.dtype)
    over = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)
    unit = wide * over
    return (over * (gradient - unit * (unit * gradient).sum(-1, keepdim=True))).to(x.dtype)
