"""From the arguments of `delta_step` to a launch of its kernel."""

from typing import Any

import torch
from torch import Tensor

from lapkernels.decoding.configs import StepConfig, choose_config, key_parts, power_of_two
from lapkernels.decoding.rows import ConvState, check_kept_dtype
from lapkernels.decoding.workspace import Workspace, meeting_place
from lapkernels.delta_step.triton_step import delta_step_kernel


def delta_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    b: Tensor | None,
    a: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    decay_lower_bound: float | None,
    conv: ConvState | None,
    position: Tensor | None,
    slots: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    gate_activation: str,
    lamb: Tensor | None,
    strength: float,
    scale: float,
    qk_l2norm: bool,
    silu: tuple[bool, bool, bool],
    commit: Tensor | None,
    rounding_seed: Tensor | None,
    config: StepConfig | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Run the step. Arguments as `delta_step` has checked and completed them; returns `[B, T, HV, V]`."""
    batch, time, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    heads = batch * value_heads
    contiguous = state.stride(3) == 1
    if config is None:
        config = choose_config(
            key_width, value_width, heads, state.element_size(), q.device, columns_contiguous=contiguous
        )
    tiles = config.tiles(value_width)
    check_kept_dtype(state)
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

    def strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
        return (0,) * axes if tensor is None else tensor.stride()[:axes]

    def pointer(tensor: Tensor | None) -> Tensor:
        return none if tensor is None else tensor

    launch: Any = delta_step_kernel[(heads * config.splits,)]
    with torch.cuda.device(q.device.index if q.is_cuda else -1):
        launch(
            q, k, v, pointer(b), pointer(a), pointer(lamb), pointer(gate), out, state, inputs, weight, pointer(bias),
            pointer(A_log), pointer(dt_bias), pointer(norm_weight), pointer(position), pointer(slots), pointer(commit),
            pointer(rounding_seed), counters, scratch,
            *strides(q, 3), *strides(k, 3), *strides(v, 3), *strides(b, 2), *strides(a, 3), *strides(lamb, 2),
            *strides(gate, 3), *state.stride()[:2], *inputs.stride()[:2], *weight.stride()[:2],
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
            EVICT=config.evict,
            num_warps=config.warps, maxnreg=config.registers,
        )  # fmt: skip
    return out
