"""The operator through the Triton kernels of this folder: what they take, and the call, which imports triton."""

import torch
from torch import Tensor

from lapkernels import verdicts
from lapkernels._triton import is_interpreted, kernels_can_run, shared_memory
from lapkernels.delta_rule.gates import RawGates

WIDEST_KEY = 256
"""A program of the walk holds all of K; wider ones would not fit its registers."""
_SHARED = {128: 96 * 1024, 192: 113 * 1024, WIDEST_KEY: 121 * 1024}
"""Bytes of shared memory that the hungriest kernel takes, backward, with and without an erase direction, for K up to a
bound: compiled by triton 3.7.1 for capabilities 8.0 and 8.9. GPUs of 100 KB (8.6, 8.9, 12.0) have room for K = 128."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_unavailable(device: torch.device, dtype: torch.dtype, key_width: int) -> str | None:
    """Why the kernels cannot run a call, or `None`."""
    if not kernels_can_run(device):
        return (
            "triton is missing" if device.type == "cuda" else f"triton kernels need a GPU; the tensors are on {device}"
        )
    if dtype not in _DTYPES:
        return f"there is no Triton kernel of the delta rule for {dtype}"
    if is_interpreted() and dtype == torch.bfloat16:
        return "triton's interpreter multiplies bfloat16 wrongly"
    if dtype == torch.float32 and not is_interpreted():
        # Without tensor cores, spilled registers, 40 s of compiling: it is there so that the interpreter can be exact.
        return "compiled, the Triton kernels are for half precision; fp32 has the chunked form in PyTorch"
    if key_width > WIDEST_KEY:
        return f"the Triton kernels take keys up to {WIDEST_KEY} wide, not {key_width}"
    needed, there = next(size for widest, size in _SHARED.items() if key_width <= widest), shared_memory(device)
    if there is not None and there < needed:
        return (
            f"the Triton kernels need {needed // 1024} KiB of shared memory for keys {key_width} wide; this GPU has "
            f"{there // 1024}"
        )
    return None


def why_untried(*, by_channel: bool) -> str | None:
    """Why `auto` leaves the kernels to those who name them, or `None`."""
    if by_channel and not is_interpreted():
        return "lapkernels' Triton kernels of decays by channel were not measured on a GPU (impl='triton' runs them)"
    return None


def why_wrong(device: torch.device, *, variant: str, needs_gradient: bool) -> str | None:
    """Why the kernels were found wrong here, or `None`."""
    return verdicts.why_wrong("delta_rule", "triton", device, variant=variant, needs_gradient=needs_gradient)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    *,
    gates: RawGates,
    qk_l2norm: bool,
    norm_eps: float,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output and the final state; arguments as `delta_rule` has checked and completed them."""
    from lapkernels.delta_rule.triton_autograd import delta_rule_triton_with_gradients
    from lapkernels.delta_rule.triton_launch import delta_rule_triton

    with torch.autocast(q.device.type, enabled=False):
        if needs_gradient:
            return delta_rule_triton_with_gradients(
                q, k, v, beta, g, erase, scale, initial_state, cu_seqlens, gates=gates,
                qk_l2norm=qk_l2norm, norm_eps=norm_eps,
            )  # fmt: skip
        output, state, _ = delta_rule_triton(
            q, k, v, beta, g, erase, scale, initial_state, cu_seqlens,
            gates=gates, qk_l2norm=qk_l2norm, norm_eps=norm_eps, final_state=output_final_state,
        )  # fmt: skip
        return output, state
