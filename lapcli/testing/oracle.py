"""The masked-activation oracle: what a sliced model must compute, without any of the slicing code.

The *unsliced* model with each head's q and k, after convolution and activation, multiplied by a 0/1 mask of the kept
channels, and with the read scale pinned to the sliced model's `K'^-1/2`, is the same function as the sliced model:
a channel that is always zero adds nothing to a norm, a product or the state. The scale must be pinned, since the eps
inside the L2 norm does not scale with it. Activations are masked, not filters: elu + 1 of zero is not zero.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lapcli.families.base import Family, StatefulLayer
from lapkernels.testing import relative_error

__all__ = ["masked", "relative_error"]


class _Mask:
    """An `Observer` that zeroes the dropped channels."""

    def __init__(self, kept: Tensor, key_width: int):
        self.mask = torch.zeros(kept.shape[0], key_width).scatter_(1, kept, 1.0)

    def mixer_input(self, hidden: Tensor) -> None:
        """Let it pass."""

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Mask `[B, T, H, K]`."""
        mask = self.mask.to(q)
        return q * mask, k * mask


@contextmanager
def masked(
    model: Any, family: Family, layers: tuple[StatefulLayer, ...], kept: Mapping[int, Tensor]
) -> Generator[None]:
    """Make an unsliced model compute what its slice must, for the time of the context.

    Args:
        model: the unsliced model.
        family: its family.
        layers: its stateful layers.
        kept: by layer, the kept channels of each head, `[H, K']`.
    """
    handles: list[Any] = []
    try:
        for layer in layers:
            indices = kept[layer.index]
            handles += family.attach(model, layer, _Mask(indices, layer.key_width))
            family.pin_read_scale(model, layer, indices.shape[1] ** -0.5)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            family.pin_read_scale(model, layer, layer.key_width**-0.5)
