"""Take keys and queries out of a stock model: from the output of its projections, which every library has as modules.

What follows them, a short depthwise convolution and an activation, is done again here for the key and query channels
alone. So it does not matter whether the library runs it as a module, as a function or inside one kernel with all the
rest, and no library function is replaced; it costs two small convolutions a layer and no memory beyond one layer's keys
and queries. Positions that the attention mask leaves out are zeros, which add nothing to any sum.

Passes that go on from a cache, without padding, give the keys and queries of one long pass: the last inputs of each
convolution are kept for as long as the same cache comes back.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2FN

from lapcli.families.base import Observer, StatefulLayer, Tap

CACHES = ("cache", "past_key_values", "cache_params")
"""What models and their mixers call their cache, by version of transformers."""


@dataclass
class _Taking:
    """One layer under observation, and what has come of its forward pass so far."""

    model: nn.Module
    layer: StatefulLayer
    observer: Observer
    mask: Tensor | None = None
    projected: dict[str, Tensor] = field(default_factory=dict)
    pasts: "weakref.WeakKeyDictionary[Any, dict[str, Tensor]]" = field(default_factory=weakref.WeakKeyDictionary)
    """By cache, the last outputs of each projection, which the convolution of the next pass over it begins with."""
    past: dict[str, Tensor] | None = None
    """Those of the cache that this pass is over; `None` without one."""

    def begin(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the mixer: remember which positions count, and whether the pass goes on from the last one."""
        mask = kwargs.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.projected.clear()
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        self.past = None if cache is None else self.pasts.setdefault(cache, {})

    def take(self, name: str, inputs: Tensor, output: Tensor) -> None:
        """After a projection: keep its output; when all are there, show the observer keys and queries."""
        keys, queries = self.layer.keys, self.layer.queries
        assert keys is not None
        assert queries is not None
        if not self.projected:
            self.observer.mixer_input(self._counted(self._padded(inputs)))
        self.projected[name] = self._padded(output)
        if {keys.projection, queries.projection} <= self.projected.keys():
            q, k = (self._channels(tap) for tap in (queries, keys))
            self._keep_past()
            self.projected.clear()
            self.observer.queries_keys(q, k)

    def _channels(self, tap: Tap) -> Tensor:
        """`[B, T, H, K]`, or with copies `[B, T, copies, H, K]`, after convolution and activation."""
        layer, projected = self.layer, self.projected[tap.projection]
        earlier = (self.past or {}).get(tap.projection)
        if earlier is not None:
            projected = torch.cat((earlier.to(projected), projected), 1)
        values = _heads(projected, tap.offset, tap.stride, tap, layer)
        if tap.convolution is not None:
            values = _convolved(values, self.model.get_submodule(tap.convolution), tap, layer)
        if earlier is not None:
            values = values[:, earlier.shape[1] :]
        return self._counted(ACT2FN[tap.feature_map](ACT2FN[tap.activation](values)))

    def _keep_past(self) -> None:
        """Keep as many outputs of each projection as a convolution looks back."""
        if self.past is None or self.layer.convolution is None:
            return
        for name, output in self.projected.items():
            earlier = self.past.get(name)
            whole = output if earlier is None else torch.cat((earlier.to(output), output), 1)
            # A copy: a view would keep the whole output alive.
            self.past[name] = whole[:, max(0, whole.shape[1] - self.layer.convolution.taps + 1) :].clone()

    def _padded(self, values: Tensor) -> Tensor:
        """`[B, T, D]` again where the library took the padding out and laid the rows one after the other (fla)."""
        if self.mask is None or self.mask.shape == values.shape[:2]:
            return values
        counts = self.mask.to(values.device).bool()
        if values.shape[:2] != (1, int(counts.sum())):
            return values
        whole = values.new_zeros((*counts.shape, *values.shape[2:]))
        whole[counts] = values[0]
        return whole

    def _counted(self, values: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape != values.shape[:2]:
            return values
        shape = (*self.mask.shape, *(1,) * (values.ndim - 2))
        return torch.where(self.mask.bool().view(shape).to(values.device), values, 0)


def attach_taps(model: nn.Module, layer: StatefulLayer, observer: Observer) -> list[RemovableHandle]:
    """Let an observer see a layer of a stock model through its taps.

    Args:
        model: the stock model.
        layer: with `keys` and `queries`.
        observer: called once a forward pass.

    Returns:
        Handles that end it.
    """
    assert layer.keys is not None
    assert layer.queries is not None
    taking = _Taking(model, layer, observer)
    handles = [model.get_submodule(layer.mixer).register_forward_pre_hook(taking.begin, with_kwargs=True)]
    for name in dict.fromkeys((layer.keys.projection, layer.queries.projection)):

        def after(_module: nn.Module, args: tuple[Any, ...], output: Tensor, name: str = name) -> None:
            taking.take(name, args[0], output)

        handles.append(model.get_submodule(name).register_forward_hook(after))
    return handles


def _heads(values: Tensor, offset: int, stride: int, tap: Tap, layer: StatefulLayer) -> Tensor:
    """The channels of every head out of the last axis: `[..., H, K]`, or with copies `[..., copies, H, K]`."""
    length = (layer.heads - 1) * stride + layer.key_width
    firsts = [offset + copy * tap.copy_stride for copy in range(tap.copies)]
    copies = [values[..., first : first + length].unfold(-1, layer.key_width, stride) for first in firsts]
    return copies[0] if tap.copies == 1 else torch.stack(copies, -3)


def _convolved(values: Tensor, convolution: Any, tap: Tap, layer: StatefulLayer) -> Tensor:
    """The causal depthwise convolution over time of `[B, T, H, K]`, with the filters of just these channels."""
    place = (tap.convolution_offset, tap.convolution_stride, tap, layer)
    filters = _heads(convolution.weight.squeeze(1).T, *place).flatten(1).T.unsqueeze(1)
    bias = None if convolution.bias is None else _heads(convolution.bias, *place).flatten()
    channels = values.flatten(2).transpose(1, 2).to(filters.dtype)
    past = F.pad(channels, (filters.shape[-1] - 1, 0))
    return F.conv1d(past, filters, bias, groups=len(filters)).transpose(1, 2).unflatten(-1, values.shape[2:])
