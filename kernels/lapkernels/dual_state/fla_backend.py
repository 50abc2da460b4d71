"""The operator through fla's chunked GLA: all states in one call; imported lazily.

Source: flash-linear-attention 0.6, `fla.ops.gla.chunk_gla`.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from lapkernels import verdicts
from lapkernels._triton import kernels_can_run
from lapkernels.delta_rule.fla_backend import is_installed

_HALF = (torch.bfloat16, torch.float16)


def why_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why fla cannot run this call at all, or `None`."""
    if not is_installed("fla"):
        return "flash-linear-attention is not installed (pip install 'lapcli[gpu]')"
    if device.type != "cuda":
        return f"fla needs a GPU and the tensors are on {device}"
    if not kernels_can_run(device):
        return "triton kernels cannot run here"
    if dtype == torch.float64:
        return f"fla has no kernel of this operator for {dtype}"
    return None


def why_wrong(device: torch.device, *, needs_gradient: bool) -> str | None:
    """Why fla would run this call and be wrong, as far as was measured here, or `None`."""
    return verdicts.why_wrong("dual_state", "fla", device, needs_gradient=needs_gradient)


def why_imprecise(dtype: torch.dtype) -> str | None:
    """Why fla is right but less precise than the dtype promises, or `None`."""
    return None if dtype in _HALF else f"fla multiplies {dtype} in TF32"


def dual_state_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mixture: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run the operator by fla. Arguments as `dual_state` has checked and completed them.

    n states that share k and v are one state of n K key channels: k is repeated along its width, the gates lie side by
    side, and q is repeated times each state's share. So the mixture is read in one product, and v is loaded once.
    fla knows one query head for each state; query heads that share a key head become heads of their own, with copies.

    Returns:
        The output `[B, T, HQ, V]` in v's dtype, and the final state `[sequences, states, H, K, V]` in fp32 or `None`.
    """
    batch, time = q.shape[:2]
    heads, states = k.shape[2], g.shape[2]
    readers = q.shape[2] // heads
    packing: dict[str, Any] = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.to(q.device)}

    def as_heads(x: Tensor) -> Tensor:
        """`[B, T, H, 1 or R, 1 or states, width]` to `[B, T, H R, states width]`, or `[B, T, H R, width]`."""
        return x.expand(batch, time, heads, readers, *x.shape[4:]).flatten(2, 3).flatten(3).contiguous()

    shares = (q.unflatten(2, (heads, readers)).unsqueeze(4) * mixture.unsqueeze(1)).to(q.dtype)
    if initial_state is not None:
        held = initial_state.float().transpose(1, 2).flatten(2, 3)
        initial_state = held.repeat_interleave(readers, dim=1).contiguous()
    output, state = importlib.import_module("fla.ops.gla").chunk_gla(
        q=as_heads(shares),
        k=as_heads(k[:, :, :, None, None].expand(-1, -1, -1, -1, states, -1)),
        v=as_heads(v[:, :, :, None, None]),
        g=as_heads(g.float().transpose(2, 3).unsqueeze(3)),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=False,
        **packing,
    )
    if state is not None:
        state = state[:, ::readers].unflatten(2, (states, -1)).transpose(1, 2)
    return output, state
