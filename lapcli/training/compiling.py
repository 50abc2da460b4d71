"""Decoder blocks of a model through `torch.compile`, in place, so that names and hooks stay what they were."""

from typing import Any

import torch

from lapcli.training.distributed import decoder_blocks


def compile_blocks(model: Any) -> None:
    """Let every decoder block's forward pass be compiled when it first runs; blocks of one shape share the code.

    The forward method is compiled, not the module: what wraps a block (hooks that shard it, gradient checkpointing)
    stays outside, as it is. Shapes are taken as constants, so rows should all have one length and no boundaries.

    Args:
        model: a causal language model, out of any wrapper; changed in place.

    Raises:
        ModelError: its decoder blocks are not found.
    """
    for block in decoder_blocks(model):
        forward: Any = torch.compile(block.forward, dynamic=False, options=_options())
        # Not by name: modules let an instance have a method of its own.
        block.forward = forward


def _options() -> dict[str, Any]:
    """The compiler's settings.

    One fusion of its GPU backend, of sums over rows and over columns in one kernel, is wrong for what models here
    compute (`kernels/lapkernels/delta_rule/README.md`, "Compiled"); older versions do not have it.
    """
    from torch._inductor import config

    name = "mix_order_reduction"
    return {f"triton.{name}": False} if hasattr(config.triton, name) else {}
