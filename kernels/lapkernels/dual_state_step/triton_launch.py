"""From the arguments of `dual_state_step` to a launch of its kernel."""

from typing import Any

import torch
from torch import Tensor

from lapkernels.decoding.configs import StepConfig, choose_config, power_of_two
from lapkernels.decoding.rows import check_kept_dtype
from lapkernels.dual_state_step.arguments import StepArguments
from lapkernels.dual_state_step.triton_step import dual_state_step_kernel


def dual_state_step_triton(arguments: StepArguments, config: StepConfig | None = None) -> Tensor:
    """Run the step; returns `[batch, T, HQ, V]`."""
    q, k, v, state, gate, mixture, normaliser, floor, scale, position, slots, commit = arguments
    batch, time, query_heads, key_width = q.shape
    heads, value_width, states = k.shape[2], v.shape[3], len(mixture)
    check_kept_dtype(state)
    if config is None:
        config = choose_config(key_width, value_width, batch * heads, state.element_size(), q.device)
    splits = -(-value_width // config.tile)
    out = torch.empty(batch, time, query_heads, value_width, dtype=v.dtype, device=v.device)

    def pointer(tensor: Tensor | None) -> Tensor:
        """A pointer that is never followed, where an argument is absent."""
        return out if tensor is None else tensor

    launch: Any = dual_state_step_kernel[(batch * heads * splits,)]
    with torch.cuda.device(q.device.index if q.is_cuda else -1):
        launch(
            q, k, v, gate, mixture, out, state, pointer(position), pointer(slots), pointer(commit),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *gate.stride()[:4], state.stride(0),
            scale, normaliser, floor,
            HEADS=heads, READERS=query_heads // heads, STATES=states, K=key_width, V=value_width, T=time,
            BK=power_of_two(key_width), BV=config.tile, BS=power_of_two(states),
            BR=power_of_two(time * (query_heads // heads)), SPLITS=splits,
            POSITION=position is not None, SLOTS=slots is not None, COMMIT=commit is not None,
            num_warps=config.warps,
        )  # fmt: skip
    return out
