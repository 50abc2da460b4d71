"""A model walked over text, a stretch at a time; its states are read out of its own cache.

So the recurrence is each library's own, whatever the family, and only one stretch's outputs and one state a layer are
in memory at a time. Keys come through the family's taps (`Family.attach`), outputs from hooks on the mixers.
"""

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lapcli.errors import ModelError
from lapcli.families.base import Family, StatefulLayer
from lapcli.families.remote.lapcli_dual_state_cache import DualStateCacheLayer
from lapcli.families.taps import CACHES

_NORM_EPS = 1e-6


@dataclass
class _Keys:
    """The Gram matrix of a layer's keys so far, `[B, H, K, K]` in fp64; an `Observer`."""

    layer: StatefulLayer
    listening: bool = False
    gram: Tensor | None = None

    def mixer_input(self, hidden: Tensor) -> None:
        """Let it pass."""

    def queries_keys(self, q: Tensor, k: Tensor) -> None:
        """Add the keys `[B, T, H, K]`, or `[B, T, copies, H, K]`, as the state gets them."""
        if not self.listening:
            return
        # Copies of a head are so many more keys of it.
        wide = k.detach().double().flatten(1, -3)
        if self.layer.l2_normalised:
            wide = wide * (wide.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()
        heads = wide.transpose(1, 2)
        gram = heads.mT @ heads
        self.gram = gram if self.gram is None else self.gram.add_(gram)


@dataclass
class _Pass:
    """A way through the text: its cache, and what the mixers took and gave on the last stretch, by layer."""

    cache: Any = None
    seen: int = 0
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)


class Walker:
    """A model on its way over documents, stretch after stretch.

    Args:
        model: loaded by `lapcli.families.loading.load_model`.
        family: of the model.
        layers: its stateful layers.

    Attributes:
        model: as it was given.
    """

    def __init__(self, model: Any, family: Family, layers: Sequence[StatefulLayer]):
        self.body: Any = model.get_decoder()
        self.layers = tuple(layers)
        self._mixers = {layer.index: model.get_submodule(layer.mixer) for layer in layers}
        self._own = hasattr(model, "mixers")
        names = inspect.signature(type(self.body).forward).parameters
        self._cache_name = next(name for name in CACHES if name in names)
        self._keys = {layer.index: _Keys(layer) for layer in layers}
        self._now = _Pass()
        self._given: Mapping[int, Tensor] | None = None
        self._handles: list[RemovableHandle] = []
        self._family, self.model = family, model
        self.restart()

    @contextmanager
    def attached(self) -> Generator[None]:
        """Look at keys, inputs and outputs within the context."""
        for layer in self.layers:
            self._handles += self._hook(layer)
            self._handles += self._family.attach(self.model, layer, self._keys[layer.index])
        try:
            yield
        finally:
            while self._handles:
                self._handles.pop().remove()

    def restart(self) -> None:
        """Begin with other documents."""
        self.own, self.alongside = _Pass(), _Pass()
        for keys in self._keys.values():
            keys.gram = None

    def step(self, ids: Tensor) -> None:
        """Take in the next tokens `[B, T]`."""
        self._run(self.own, ids, None)

    def step_alongside(self, ids: Tensor, inputs: Mapping[int, Tensor]) -> None:
        """Take in the next tokens with mixers that get another model's inputs, by layer, and states of their own."""
        self._run(self.alongside, ids, inputs)

    def state(self, layer: StatefulLayer) -> Tensor:
        """The state of a layer after the tokens so far, `[B, HV, K, V]`.

        Raises:
            ModelError: the cache holds none of that shape.
        """
        shape = (layer.value_heads, layer.key_width, layer.value_width)
        held: Any = self.own.cache.get(layer.index) if self._own else self.own.cache.layers[layer.index]
        if self._own:
            found = held.recurrent
        elif isinstance(held, DualStateCacheLayer):
            assert held.recurrent is not None
            # Its states lie before the key heads.
            found = held.recurrent.transpose(1, 2).flatten(1, 2)
        else:
            found = held.recurrent_states[0]
            # Mamba-2's lie V x K.
            found = found.mT if hasattr(self._mixers[layer.index], "ssm_state_size") else found
        if tuple(found.shape[1:]) != shape:
            raise ModelError(
                f"the cache of layer {layer.index} holds a state of {list(found.shape[1:])}, not {list(shape)}",
                "the installed library keeps its states in another way; use a version that lapcli names",
            )
        return found

    def gram(self, layer: StatefulLayer) -> Tensor:
        """`K K^T` of a layer's keys so far, fp64 `[B, H, K, K]`."""
        found = self._keys[layer.index].gram
        assert found is not None
        return found

    def _run(self, way: _Pass, ids: Tensor, given: Mapping[int, Tensor] | None) -> None:
        self._now, self._given = way, given
        for keys in self._keys.values():
            keys.listening = given is None
        options: dict[str, Any] = {} if way.cache is None else {self._cache_name: way.cache}
        if not self._own:
            # Some libraries count from 0 again in a cached pass that does not say them.
            positions = torch.arange(way.seen, way.seen + ids.shape[1], device=ids.device)
            options["position_ids"] = positions.expand(len(ids), -1)
        with torch.inference_mode():
            out = self.body(input_ids=ids, use_cache=True, **options)
        way.cache = next(out[name] for name in CACHES if out.get(name) is not None)
        way.seen += ids.shape[1]

    def _hook(self, layer: StatefulLayer) -> list[RemovableHandle]:
        index, mixer = layer.index, self._mixers[layer.index]

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._now.inputs[index] = hidden
            if self._given is None:
                return None
            other = self._given[index].to(hidden)
            return ((other, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": other})

        def after(_module: Any, _args: Any, output: Any) -> None:
            self._now.outputs[index] = output[0] if isinstance(output, tuple) else output

        return [
            mixer.register_forward_pre_hook(before, with_kwargs=True),
            mixer.register_forward_hook(after),
        ]


def bytes_per_sample(layers: Sequence[StatefulLayer]) -> int:
    """What one document takes in memory while it is under way: states, and Gram matrices of the keys in fp64."""
    return sum(layer.state_bytes() + 8 * layer.heads * layer.key_width**2 for layer in layers)
