"""Gradients of models that a library runs, where that library's backward pass is wrong."""

from typing import Any

import torch

from lapcli.errors import FamilyError
from lapcli.families.library_kernels import differentiate_without, kernels_of
from lapcli.reporting import Reporter

_BY_CHANNEL = frozenset({"chunk_kda", "fused_recurrent_kda"})


def use_right_gradients(model: Any, device: torch.device, reporter: Reporter) -> None:
    """Keep a library's model from fla's gated backward pass where it is wrong; lapcli's own models see to it.

    Raises:
        FamilyError: the model is fla's own, so that nothing else can run it.
    """
    from lapkernels.delta_rule.fla_backend import why_wrong

    wrong = why_wrong(device, gated=True, needs_gradient=True) if device.type == "cuda" else None
    if wrong is None or hasattr(model, "kernel_choice"):
        return
    if type(model).__module__.startswith("fla."):
        # fla's models of gates a channel (GLA, KDA) do not go through the kernel that is wrong.
        if getattr(model.config, "model_type", None) == "gated_deltaproduct":
            raise FamilyError(wrong, "pip install tilelang (with nvcc), or triton 3.7.1 or newer")
        return
    # Nor do those of transformers.
    by_channel = why_wrong(device, gated=True, needs_gradient=True, by_channel=True)
    replaced = differentiate_without(model, "fla", keeping=frozenset() if by_channel else _BY_CHANNEL)
    # Whose step by step function is of decoding, which nobody differentiates.
    if replaced and "lapkernels" not in kernels_of(model, device, needs_gradient=True).values():
        reporter.warn(
            f"{wrong}: transformers' PyTorch functions run instead of {', '.join(replaced)}. That is right and much "
            "slower; install tilelang (with nvcc), or triton 3.7.1 or newer, for fla's"
        )
