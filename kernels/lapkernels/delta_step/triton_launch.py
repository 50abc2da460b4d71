"""From the arguments of `delta_step` to a launch of its kernel."""

from typing import Any

import torch
from torch import Tensor

from lapkernels._triton import may_begin_early
from lapkernels.decoding.configs import StepConfig, choose_apart, choose_config, key_parts, power_of_two
from lapkernels.decoding.rows import check_kept_dtype
from lapkernels.decoding.workspace import Workspace, meeting_place
from lapkernels.delta_step.arguments import StepArguments
from lapkernels.delta_step.triton_passes import delta_inputs_kernel, delta_outputs_kernel
from lapkernels.delta_step.triton_states import GATES, delta_states_kernel
from lapkernels.delta_step.triton_step import delta_step_kernel

_WIDEST = 256
"""Channels of v that a program filters at most, before the states' kernel."""

_GROUPED = 2
"""Rows, or heads, that a program of the kernels around the states takes, so that there are half as many."""

_KEPT = "evict_last"
"""How what one kernel hands the next passes the caches: it is to outlast the states."""


def delta_step_triton(
    arguments: StepArguments, config: StepConfig | None = None, workspace: Workspace | None = None
) -> Tensor:
    """Run the step; returns `[B, T, HV, V]`."""
    (
        q, k, v, state, b, a, A_log, dt_bias, decay_lower_bound, conv, position, slots, gate, norm_weight, norm_eps,
        gate_activation, lamb, strength, scale, qk_l2norm, silu, commit, rounding_seed,
    ) = arguments  # fmt: skip
    batch, time, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    heads = batch * value_heads
    contiguous = state.stride(3) == 1
    if config is None and contiguous and time == 1 and commit is None:
        config = choose_apart(key_width, value_width, heads, state.element_size())
    if config is None:
        config = choose_config(
            key_width, value_width, heads, state.element_size(), q.device, columns_contiguous=contiguous
        )
    tiles = config.tiles(value_width)
    check_kept_dtype(state)
    if config.apart and time == 1 and commit is None:
        return _three_kernels(arguments, config)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    counters = scratch = out
    held = norm_weight is not None and tiles > 1 and time == 1 and config.splits == 1
    if norm_weight is not None and tiles * config.splits > 1 and not held:
        counters, scratch = meeting_place(workspace, heads, out.numel(), q.device)
    # A pointer that is never followed, where an argument is absent.
    none = out
    inputs, weight, bias = (none, none, None) if conv is None else (conv.inputs, conv.weight, conv.bias)
    parts = key_parts(key_width)
    rows = config.rows_at_once(parts, state.element_size(), contiguous)
    early = may_begin_early(q.device)

    def pointer(tensor: Tensor | None) -> Tensor:
        return none if tensor is None else tensor

    launch: Any = delta_step_kernel[(heads * config.splits,)]
    with torch.cuda.device(q.device.index if q.is_cuda else -1):
        launch(
            q, k, v, pointer(b), pointer(a), pointer(lamb), pointer(gate), out, state, inputs, weight, pointer(bias),
            pointer(A_log), pointer(dt_bias), pointer(norm_weight), pointer(position), pointer(slots), pointer(commit),
            pointer(rounding_seed), counters, scratch,
            *_strides(q, 3), *_strides(k, 3), *_strides(v, 3), *_strides(b, 2), *_strides(a, 3), *_strides(lamb, 2),
            *_strides(gate, 3), *state.stride()[:2], *inputs.stride()[:2], *weight.stride()[:2],
            scale, strength, norm_eps, 0.0 if decay_lower_bound is None else decay_lower_bound,
            H=key_heads, HV=value_heads, K=key_width, V=value_width, T=time,
            W=0 if conv is None else conv.width, R=1 if conv is None else conv.ring,
            STRIDE_K=state.stride(2), STRIDE_V=state.stride(3), K0=parts[0], K1=parts[1], K2=parts[2],
            ROWS0=rows[0], ROWS1=rows[1], ROWS2=rows[2], KN=power_of_two(key_width), BV=config.tile, TILES=tiles,
            TILES2=power_of_two(tiles) if held else 1, SPLITS=config.splits, V2=power_of_two(value_width),
            BIAS=bias is not None, SILU_Q=silu[0], SILU_K=silu[1], SILU_V=silu[2], L2NORM=qk_l2norm,
            WRITE=b is not None, DECAY=0 if a is None else a.ndim - 2, RATED=A_log is not None,
            DT_BIAS=dt_bias is not None, BOUNDED=decay_lower_bound is not None, LAMBDA=lamb is not None,
            NORM=norm_weight is not None, GATE=gate is not None, SIGMOID=gate_activation == "sigmoid",
            POSITION=position is not None, SLOTS=slots is not None, COMMIT=commit is not None,
            STOCHASTIC=rounding_seed is not None, GATHER=config.gathers(key_width),
            EVICT=config.evict, EARLY=early, num_warps=config.warps, maxnreg=config.registers, launch_pdl=early,
        )  # fmt: skip
    return out


def _three_kernels(arguments: StepArguments, config: StepConfig) -> Tensor:
    """One token a row by the kernels of `triton_passes` and, between them, of `triton_states`."""
    (
        q, k, v, state, b, a, A_log, dt_bias, decay_lower_bound, conv, position, slots, gate, norm_weight, norm_eps,
        gate_activation, lamb, strength, scale, qk_l2norm, silu, _, rounding_seed,
    ) = arguments  # fmt: skip
    batch, _, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    heads, wide, wide_value = batch * value_heads, power_of_two(key_width), power_of_two(value_width)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    none = out
    decay = 0 if a is None else a.ndim - 2
    pairs, products, values, gates, factors = _scratch(
        q.device, 2 * batch * key_heads * key_width, batch * key_heads, heads * value_width, heads * int(GATES),
        heads * key_width if decay == 2 else 0,
    )  # fmt: skip
    inputs, weight, bias = (none, none, None) if conv is None else (conv.inputs, conv.weight, conv.bias)
    block = min(_WIDEST, wide_value)
    pieces = -(-value_width // block)
    splits = -(-value_width // config.tile)
    early = may_begin_early(q.device)
    shape = {"H": key_heads, "HV": value_heads, "K": key_width, "V": value_width}
    known = {"POSITION": position is not None, "SLOTS": slots is not None, "EARLY": early, "launch_pdl": early}

    def pointer(tensor: Tensor | None) -> Tensor:
        return none if tensor is None else tensor

    place = pointer(position), pointer(slots)
    first: Any = delta_inputs_kernel[(-(-batch // _GROUPED) * (key_heads + value_heads * pieces),)]
    second: Any = delta_states_kernel[(heads * splits,)]
    third: Any = delta_outputs_kernel[(-(-heads // _GROUPED),)]
    with torch.cuda.device(q.device.index if q.is_cuda else -1):
        first(
            q, k, v, pointer(b), pointer(a), pointer(lamb), inputs, weight, pointer(bias), pointer(A_log),
            pointer(dt_bias), *place, pairs, products, values, gates, factors,
            q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), *_strides(b, 1),
            *_strides(a, 3)[::2], *_strides(lamb, 1), *inputs.stride()[:2], *weight.stride()[:2],
            scale, strength, 0.0 if decay_lower_bound is None else decay_lower_bound, batch,
            **shape, KN=wide, BW=block, BLOCKS=pieces, G=_GROUPED,
            W=0 if conv is None else conv.width, R=1 if conv is None else conv.ring, BIAS=bias is not None,
            SILU_Q=silu[0], SILU_K=silu[1], SILU_V=silu[2], L2NORM=qk_l2norm, WRITE=b is not None, DECAY=decay,
            RATED=A_log is not None, DT_BIAS=dt_bias is not None, BOUNDED=decay_lower_bound is not None,
            LAMBDA=lamb is not None, KEPT=_KEPT, **known, num_warps=_warps(max(wide, block) * _GROUPED, 4),
        )  # fmt: skip
        second(
            state, pairs, products, values, gates, factors, *place, pointer(rounding_seed), *state.stride()[:2], 16,
            **shape, STRIDE_K=state.stride(2), STRIDE_V=state.stride(3),
            R=config.block(key_width, state.element_size()), BV=config.tile, SPLITS=splits, DECAY=decay,
            LAMBDA=lamb is not None, STOCHASTIC=rounding_seed is not None, TWO=_by_two(state, config.tile),
            EVICT=config.evict, KEPT=_KEPT, **known, num_warps=config.warps, maxnreg=config.registers,
        )  # fmt: skip
        third(
            values, pointer(gate), pointer(norm_weight), out, *place, *_strides(gate, 3)[::2], norm_eps, heads,
            HV=value_heads, V=value_width, V2=wide_value, G=_GROUPED, NORM=norm_weight is not None,
            GATE=gate is not None, SIGMOID=gate_activation == "sigmoid", **known,
            num_warps=_warps(wide_value * _GROUPED, 8),
        )  # fmt: skip
    return out


def _warps(numbers: int, most: int) -> int:
    """Of a program around the states that takes so many numbers: eight of them a thread."""
    return max(1, min(most, numbers // 256))


def _by_two(state: Tensor, tile: int) -> bool:
    """Whether a state's numbers can be loaded two at once: bf16, side by side along V, every pair aligned."""
    even = all(size % 2 == 0 for size in (tile, state.shape[3], *state.stride()[:3], state.data_ptr() // 2))
    return state.dtype == torch.bfloat16 and state.stride(3) == 1 and even


def _scratch(device: torch.device, *counts: int) -> list[Tensor]:
    """So many fp32 numbers each, every one aligned, in one allocation."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + -(-count // 32) * 32)
    whole = torch.empty(ends[-1], dtype=torch.float32, device=device)
    return [whole[start : start + count] for start, count in zip(ends, counts, strict=False)]


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if tensor is None else tensor.stride()[:axes]
