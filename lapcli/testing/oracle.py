"""The masked-activation oracle: what a sliced model must compute, without any of the slicing code.

The *unsliced* model with each head's q and k (C and B in Mamba-2), after convolution and activation, multiplied by a
0/1 mask of the kept channels, and with the read scale pinned to the sliced model's `K'^-1/2` in the delta family, is
the same function as the sliced model: a channel that is always zero adds nothing to a norm, a product or the state. The
scale must be pinned, since the eps inside the L2 norm does not scale with it. Activations are masked, not filters:
elu + 1 of zero is not zero.

lapcli's own models have a tap for it. In stock models the functions that run the recurrence are wrapped in the
namespace of the model's module, for the time of the context; which tensors are keys and queries is read off the
functions' own parameter names, so nothing is shared with an adapter's declarations but the kept channels. Whether a
function normalises them itself or not at all makes no difference, and the scale of the read is a factor on its output:
no caller passes one, so it is `K^-1/2` of the width that the function sees.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapcli.families.base import Family, StatefulLayer
from lapkernels.testing import relative_error

__all__ = ["masked", "relative_error", "seen_by_the_recurrence"]

_DELTA_PARAMETERS: tuple[set[str], ...] = ({"query", "key"}, {"q", "k"})
_MAMBA_PARAMETERS = {"B", "C"}


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
    own = hasattr(model, "mixers")
    with _masked_own(model, family, layers, kept) if own else _masked_stock(model, layers, kept):
        yield


class _Mask:
    """An `Observer` that zeroes the dropped channels."""

    def __init__(self, kept: Tensor, key_width: int):
        self.mask = torch.zeros(kept.shape[0], key_width).scatter_(1, kept, 1.0)

    def mixer_input(self, hidden: Tensor) -> None:
        """Let it pass."""

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Mask `[..., H, K]`, or as many heads as share each key head, side by side."""
        q_mask, k_mask = (self.mask.to(x).repeat_interleave(max(1, x.shape[-2] // len(self.mask)), 0) for x in (q, k))
        return q * q_mask, k * k_mask


@contextmanager
def _masked_own(
    model: Any, family: Family, layers: tuple[StatefulLayer, ...], kept: Mapping[int, Tensor]
) -> Generator[None]:
    handles: list[Any] = []
    mixers = [model.get_submodule(layer.mixer) for layer in layers]
    scales = [mixer.read_scale for mixer in mixers]
    try:
        for layer, mixer in zip(layers, mixers, strict=True):
            indices = kept[layer.index]
            handles += family.attach(model, layer, _Mask(indices, layer.key_width))
            mixer.read_scale = indices.shape[1] ** -0.5
        yield
    finally:
        for handle in handles:
            handle.remove()
        for mixer, scale in zip(mixers, scales, strict=True):
            mixer.read_scale = scale


Change = Callable[[StatefulLayer, Tensor, Tensor], tuple[Tensor, Tensor, float]]
"""Of a layer's queries and keys as its recurrence gets them: others, and a factor on the output."""


@contextmanager
def seen_by_the_recurrence(model: Any, layers: tuple[StatefulLayer, ...]) -> Generator[dict[int, Any]]:
    """Collect, by layer, the queries and keys `[B, T, H, K]` that a stock model's recurrence gets."""
    seen: dict[int, Any] = {}

    def look(layer: StatefulLayer, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, float]:
        seen[layer.index] = queries.detach(), keys.detach()
        return queries, keys, 1.0

    with _recurrence_changed(model, layers, look):
        yield seen


@contextmanager
def _masked_stock(model: Any, layers: tuple[StatefulLayer, ...], kept: Mapping[int, Tensor]) -> Generator[None]:
    masks = {layer.index: _Mask(kept[layer.index], layer.key_width) for layer in layers}

    def mask(layer: StatefulLayer, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, float]:
        scale = (layer.key_width / kept[layer.index].shape[1]) ** 0.5
        return *masks[layer.index].queries_keys(queries, keys), scale

    with _recurrence_changed(model, layers, mask):
        yield


@dataclass
class _Current:
    """The layer whose forward pass is under way, and how often a recurrence ran."""

    layer: StatefulLayer | None = None
    calls: int = 0


@contextmanager
def _recurrence_changed(model: Any, layers: tuple[StatefulLayer, ...], change: Change) -> Generator[None]:
    current = _Current()
    handles: list[Any] = []
    modules = {sys.modules[type(model.get_submodule(layer.mixer)).__module__] for layer in layers}
    wrapped = [
        (module, name, function)
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function) and _is_recurrence(function)
    ]
    assert wrapped, f"no function of {[module.__name__ for module in modules]} takes keys and queries"
    try:
        for module, name, function in wrapped:
            setattr(module, name, _changed(function, current, change))
        for layer in layers:

            def begin(_module: Any, _args: Any, layer: StatefulLayer = layer) -> None:
                current.layer = layer

            def end(_module: Any, _args: Any, _output: Any) -> None:
                current.layer = None

            mixer = model.get_submodule(layer.mixer)
            handles += [mixer.register_forward_pre_hook(begin), mixer.register_forward_hook(end)]
        yield
        assert current.calls, "no wrapped function was called"
    finally:
        for handle in handles:
            handle.remove()
        for module, name, function in wrapped:
            setattr(module, name, function)


def _names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _is_recurrence(function: Callable[..., Any]) -> bool:
    names = _names(function)
    gated = names & {"g", "gk", "beta", "decay"}
    return names >= _MAMBA_PARAMETERS or (bool(gated) and any(pair <= names for pair in _DELTA_PARAMETERS))


def _changed(function: Callable[..., Any], current: _Current, change: Change) -> Callable[..., Any]:
    """The function with other keys and queries; the delta family's output scaled, since its read depends on K."""
    parameters = _names(function)
    delta = next((pair for pair in _DELTA_PARAMETERS if pair <= parameters), None)
    query, key = ("C", "B") if delta is None else ("query", "key") if "query" in delta else ("q", "k")
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if current.layer is None:
            return function(*args, **kwargs)
        current.calls += 1
        bound = signature.bind(*args, **kwargs)
        values = bound.arguments
        values[query], values[key], scale = change(current.layer, values[query], values[key])
        found = function(*bound.args, **bound.kwargs)
        return found if delta is None else (found[0] * scale, *found[1:])

    return run
