"""From the arguments of `ssd_step` to a launch of its kernel."""

from typing import Any

import torch
from torch import Tensor

from lapkernels.decoding.configs import StepConfig, choose_config, key_parts, power_of_two
from lapkernels.decoding.rows import ConvState, check_kept_dtype
from lapkernels.decoding.workspace import Workspace, meeting_place
from lapkernels.ssd_step.triton_step import ssd_step_kernel


def ssd_step_triton(
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
    config: StepConfig | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Run the step. Arguments as `ssd_step` has checked and completed them; returns `[batch, T, heads, P]`."""
    batch, time, heads, head_width = x.shape
    groups, state_width = B.shape[2:]
    check_kept_dtype(state)
    contiguous = state.stride(2) == 1
    if config is None:
        config = choose_config(
            state_width, head_width, batch * heads, state.element_size(), x.device, columns_contiguous=contiguous
        )
    config = config._replace(splits=-(-head_width // config.tile))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # A pointer that is never followed, where an argument is absent.
    none = counters = scratch = out
    if norm_weight is not None:
        counters, scratch = meeting_place(workspace, batch * norm_groups, out.numel(), x.device)
    inputs, weight, bias = (none, none, None) if conv is None else (conv.inputs, conv.weight, conv.bias)
    parts = key_parts(state_width)
    rows = config.rows_at_once(parts, state.element_size(), contiguous)
    normed = heads // norm_groups * head_width
    chunk = min(power_of_two(normed), 1024)

    def pointer(tensor: Tensor | None) -> Tensor:
        return none if tensor is None else tensor

    launch: Any = ssd_step_kernel[(batch * heads * config.splits,)]
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        launch(
            x, B, C, dt, pointer(gate), out, state, inputs, weight, pointer(bias), A_log, pointer(D), pointer(dt_bias),
            pointer(norm_weight), pointer(position), pointer(slots), pointer(commit), pointer(rounding_seed), counters,
            scratch, *x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *dt.stride()[:2],
            *((0, 0, 0) if gate is None else gate.stride()[:3]), *state.stride()[:2], *inputs.stride()[:2],
            *weight.stride()[:2], norm_eps, *(dt_limit or (0.0, 0.0)),
            HEADS=heads, GROUPS=groups, N=state_width, P=head_width, T=time,
            W=0 if conv is None else conv.width, R=1 if conv is None else conv.ring,
            STRIDE_N=state.stride(3), STRIDE_P=state.stride(2), N0=parts[0], N1=parts[1], N2=parts[2],
            ROWS0=rows[0], ROWS1=rows[1], ROWS2=rows[2], NN=power_of_two(state_width), BP=config.tile,
            SPLITS=config.splits, NORM_HEADS=heads // norm_groups, CHUNK=chunk, CHUNKS=-(-normed // chunk),
            BIAS=bias is not None, SILU=silu, SKIP=D is not None, DT_BIAS=dt_bias is not None,
            LIMITED=dt_limit is not None, NORM=norm_weight is not None, GATE=gate is not None, GATE_FIRST=gate_first,
            POSITION=position is not None, SLOTS=slots is not None, COMMIT=commit is not None,
            STOCHASTIC=rounding_seed is not None, GATHER=config.gathers(state_width), EVICT=config.evict,
            num_warps=config.warps, maxnreg=config.registers,
        )  # fmt: skip
    return out
