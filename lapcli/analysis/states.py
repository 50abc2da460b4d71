"""Models walked side by side over the same text, a stretch at a time; their states are read out of their own caches.

So the recurrence is each library's own, whatever the family, and only one stretch's outputs and one state a layer are
in memory at a time. Keys come through the family's taps (`Family.attach`), outputs from hooks on the mixers.
"""

import inspect
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lapcli.analysis.spectra import KeyBound, Spectrum, key_bound, spectrum
from lapcli.errors import ModelError
from lapcli.families.base import Family, StatefulLayer
from lapcli.families.taps import CACHES
from lapcli.selectors.lapack import one_blas_thread

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
        if self._own:
            found = self.own.cache.get(layer.index).recurrent
        else:
            found = self.own.cache.layers[layer.index].recurrent_states[0]
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


@dataclass
class LayerFindings:
    """What is found of one layer of one model, `N` samples at `P` positions. The tensors are fp64 on the CPU.

    They are there from the start: small results that are left between large matrices keep the memory of those from
    being given back.

    Attributes:
        rank: effective rank, `[N, P, HV]`.
        kappa: of the states, `[N, P, HV]`; see `Spectrum.kappa`.
        key_kappa: of the keys so far, `[N, P, H]`; infinite where they do not span all channels.
        key_margin: see `KeyBound.margin`, `[N, P, HV]`.
        spectrum: sum over samples and positions of the normalised singular values, `[HV, min(K, V)]`.
        floored: how many of `kappa` are lower limits.
        squares: of the errors of the mixer's output, and of the base's output: on its own inputs, and on the base's.
    """

    rank: Tensor
    kappa: Tensor
    key_kappa: Tensor
    key_margin: Tensor
    spectrum: Tensor
    floored: int = 0
    squares: dict[str, list[float]] = field(default_factory=lambda: {"own": [0.0, 0.0], "base": [0.0, 0.0]})

    @classmethod
    def of(cls, layer: StatefulLayer, samples: int, positions: int) -> "LayerFindings":
        """Nothing found yet."""

        def room(heads: int) -> Tensor:
            return torch.full((samples, positions, heads), torch.nan, dtype=torch.float64)

        least = min(layer.key_width, layer.value_width)
        values = torch.zeros(layer.value_heads, least, dtype=torch.float64)
        return cls(room(layer.value_heads), room(layer.value_heads), room(layer.heads), room(layer.value_heads), values)

    def add(self, rows: slice, position: int, found: Spectrum, bound: KeyBound) -> None:
        """Add the states of a batch at one position."""
        self.rank[rows, position] = found.effective_rank.cpu()
        self.kappa[rows, position] = found.kappa.cpu()
        self.key_kappa[rows, position] = bound.kappa.cpu()
        self.key_margin[rows, position] = bound.margin.cpu()
        self.spectrum += found.normalised.sum(0).cpu()
        self.floored += int(found.floored.sum())

    def add_error(self, inputs: str, output: Tensor, base: Tensor) -> None:
        """Add the errors of a stretch's outputs `[B, T, D]`."""
        wanted = base.double()
        self.squares[inputs][0] += float((output.to(base.device).double() - wanted).square().sum())
        self.squares[inputs][1] += float(wanted.square().sum())

    def error(self, inputs: str) -> float | None:
        """`||o - o_base|| / ||o_base||` over all tokens; `None` where there was nothing to compare."""
        wrong, whole = self.squares[inputs]
        return (wrong / whole) ** 0.5 if whole > 0 else None


Findings = dict[str, dict[int, LayerFindings]]
"""By model and layer."""


def bytes_per_sample(layers: Sequence[StatefulLayer]) -> int:
    """What one document takes in memory while it is under way: states, and Gram matrices of the keys in fp64."""
    return sum(layer.state_bytes() + 8 * layer.heads * layer.key_width**2 for layer in layers)


def walk(
    walkers: Mapping[str, Walker], ids: Tensor, positions: Sequence[int], *, batch: int, advance: Any = None
) -> Findings:
    """Take all models over the text and measure their states.

    Args:
        walkers: by label; outputs of the others are compared with those of the first.
        ids: `[N, T]`, without padding. What is after the last position is not looked at.
        positions: ascending: after how many tokens states are measured.
        batch: documents at a time.
        advance: called with the tokens that one model has taken in.

    Raises:
        ModelError: a state is NaN or infinite (the layer is named), or the cache holds none.
    """
    base = next(iter(walkers))
    found: Findings = {
        label: {layer.index: LayerFindings.of(layer, len(ids), len(positions)) for layer in walker.layers}
        for label, walker in walkers.items()
    }
    device = walkers[base].body.device
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    with ExitStack() as stack:
        for walker in walkers.values():
            stack.enter_context(walker.attached())
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        for first in range(0, len(ids), batch):
            rows = ids[first : first + batch].to(device)
            for walker in walkers.values():
                walker.restart()
            batch_rows = slice(first, first + len(rows))
            for number, (start, stop) in enumerate(zip([0, *positions[:-1]], positions, strict=True)):
                stretch = rows[:, start:stop]
                for label, walker in walkers.items():
                    walker.step(stretch)
                    if label != base:
                        walker.step_alongside(stretch, walkers[base].own.inputs)
                        _compare(walker, walkers[base], found[label])
                    for index, (measured, bound) in _measure(walker, pool, label).items():
                        found[label][index].add(batch_rows, number, measured, bound)
                    if advance is not None:
                        advance(stretch.numel())
    return found


def _compare(walker: Walker, base: Walker, found: dict[int, LayerFindings]) -> None:
    for index, layer in found.items():
        layer.add_error("own", walker.own.outputs[index], base.own.outputs[index])
        layer.add_error("base", walker.alongside.outputs[index], base.own.outputs[index])


def _measure(walker: Walker, pool: ThreadPoolExecutor, label: str) -> dict[int, tuple[Spectrum, KeyBound]]:
    """Measure all layers, a thread each: LAPACK takes the matrices of a batch one after the other."""

    def measure(layer: StatefulLayer) -> tuple[Spectrum, KeyBound]:
        state = walker.state(layer)
        if not bool(torch.isfinite(state).all()):
            raise ModelError(
                f"the state of layer {layer.index} ({layer.mixer}) of {label} is NaN or infinite",
                "try --dtype float32; if it stays so, the checkpoint is damaged",
            )
        with torch.inference_mode():
            measured = spectrum(state)
            return measured, key_bound(state, measured.effective_rank, walker.gram(layer))

    indices = [layer.index for layer in walker.layers]
    with one_blas_thread():
        return dict(zip(indices, pool.map(measure, walker.layers), strict=True))
