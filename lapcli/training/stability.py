"""Whether a delta rule contracts, watched while a model runs: `beta k.x` of every token, layer and value head.

One step multiplies the mixed error `v - S^T x` by exactly `1 - beta k.x` (Q-Delta, arXiv 2606.08804, Lemma 3.1; `x = k`
without query feedback), so it shrinks while that product lies in (0, 2). In a Q-Delta of one's own it always does
(`docs/q-delta.md`); a share outside is an error there, or a released recurrence with negative eigenvalues.

    with stability_of(model) as watch:
        model(input_ids)                 # one pass or several, trained or not
    log(watch.figures())                 # {"contraction/mean": ..., "contraction/outside": ..., "contraction/rho": ...}
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapcli.models.mixer import DeltaRuleMixer, RuleInputs
from lapkernels.delta_rule import l2_normalise

_KEPT = 1 << 18
"""Values of a layer, at most, that percentiles are taken of; the other figures are of all."""


@dataclass(frozen=True)
class Contraction:
    """How `beta k.x` is distributed.

    Attributes:
        count: tokens times value heads.
        mean: of the product.
        p01: its 1st percentile.
        p50: its median.
        p99: its 99th percentile.
        least: its smallest value.
        greatest: its largest value.
        outside: the share that is not within (0, 2).
        rho: the largest `|1 - beta k.x|`; below 1 every error shrinks by at least that factor.
    """

    count: int
    mean: float
    p01: float
    p50: float
    p99: float
    least: float
    greatest: float
    outside: float
    rho: float


@dataclass
class _Sums:
    """Of one layer, on the device that it runs on; nothing waits for it before the figures are asked for."""

    count: int = 0
    total: Tensor | float = 0.0
    outside: Tensor | float = 0.0
    extremes: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    room: int = field(default_factory=lambda: _KEPT)

    def add(self, values: Tensor) -> None:
        """Add products, of any shape."""
        values = values.flatten()
        if not len(values):
            return
        self.count += len(values)
        self.total = self.total + values.double().sum()
        self.outside = self.outside + (~((values > 0) & (values < 2))).sum()
        self.extremes = [torch.stack(torch.cat([values, *self.extremes]).aminmax())]
        if self.room:
            taken = values[:: max(1, -(-len(values) // self.room))]
            self.kept.append(taken.clone())
            self.room -= min(self.room, len(taken))


def contraction(given: RuleInputs) -> Tensor:
    """`beta k.x` of what a mixer hands to the delta rule.

    Args:
        given: q, k, v, write strength and feedback (see `RuleInputs`).

    Returns:
        `[tokens, HV]`, padding left out, in fp32 or wider.
    """
    dtype = torch.promote_types(given.beta.dtype, torch.float32)
    q, k = given.q.detach().to(dtype), given.k.detach().to(dtype)
    if given.normalise:
        q, k = l2_normalise(q), l2_normalise(k)
    repeats = given.beta.shape[2] // k.shape[2]
    aligned = (k * k).sum(-1).repeat_interleave(repeats, dim=2)
    if given.lamb is not None:
        aligned = aligned + given.lamb.detach().to(dtype) * (k * q).sum(-1).repeat_interleave(repeats, dim=2)
    products = given.beta.detach().to(dtype) * aligned
    return products.flatten(0, 1) if given.padding is None else products[given.padding.is_token]


class StabilityWatch:
    """What was seen of each layer; made by `stability_of`."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def add(self, layer: int, given: RuleInputs) -> None:
        """See what a layer hands to its delta rule."""
        with torch.no_grad():
            self._sums.setdefault(layer, _Sums()).add(contraction(given))

    def layers(self) -> dict[int, Contraction]:
        """The figures of each layer that ran, by its number. Waits for the device."""
        return {layer: _figures([sums]) for layer, sums in sorted(self._sums.items())}

    def overall(self) -> Contraction:
        """The figures of all layers together. Waits for the device.

        Raises:
            ValueError: no layer ran.
        """
        if not self._sums:
            raise ValueError("no layer with a delta rule ran while it was watched")
        return _figures(list(self._sums.values()))

    def figures(self) -> dict[str, float]:
        """The figures of all layers together as a training log takes them, `contraction/NAME`. Waits for the device."""
        found = asdict(self.overall())
        del found["count"]
        return {f"contraction/{name}": value for name, value in found.items()}


@contextmanager
def stability_of(model: Any) -> Generator[StabilityWatch]:
    """Watch the delta rule of every layer of one of lapcli's own models for as long as the context lasts.

    It adds a few elementwise operations over `[B, T, H, K]` to each layer's pass and keeps 2^18 numbers a layer, at
    most. Gradients, results and what is saved stay as they are. Blocks that are compiled are compiled once more for
    watched passes. With gradient checkpointing a pass within the context counts again in its backward pass. Figures are
    of this process's tokens.

    Args:
        model: a model, or anything around it that has it among its modules (DDP, FSDP2, `torch.compile`).

    Yields:
        What is seen; ask it for figures during the context or after.

    Raises:
        ValueError: the model has no layer with a delta rule of lapcli's own.
    """
    mixers = [module for module in model.modules() if isinstance(module, DeltaRuleMixer)]
    if not mixers:
        raise ValueError(f"a {type(model).__name__} has no delta rule of lapcli's own to watch")
    watch, before = StabilityWatch(), [(mixer.watch, mixer.watched) for mixer in mixers]
    for mixer in mixers:
        mixer.watch, mixer.watched = partial(_outside_of_graphs, watch, mixer.layer_idx), True
    try:
        yield watch
    finally:
        for mixer, held in zip(mixers, before, strict=True):
            mixer.watch, mixer.watched = held


class Watching:
    """`stability_of` during validations, as `lapcli.training.engine.train` takes it.

    Args:
        model: that is trained.

    Attributes:
        found: figures of the last validation: `{"contraction": {"mean": ...}}`; empty where this process had no part
            in it.
    """

    def __init__(self, model: Any):
        self._model = model
        self.found: dict[str, Any] = {}

    @contextmanager
    def __call__(self) -> Generator[Callable[[], Mapping[str, Any]]]:
        """Watch for as long as a validation lasts; what is yielded gives the figures."""
        with stability_of(self._model) as watch:
            yield lambda: self._figures(watch)

    def _figures(self, watch: StabilityWatch) -> Mapping[str, Any]:
        self.found = {}
        if watch.layers():
            named = watch.figures().items()
            self.found = {"contraction": {name.removeprefix("contraction/"): round(value, 6) for name, value in named}}
        return self.found


def _see(watch: StabilityWatch, layer: int, given: RuleInputs) -> None:
    watch.add(layer, given)


_outside_of_graphs: Any = torch.compiler.disable(_see)
"""What is kept is no part of a compiled block."""


def _figures(parts: list[_Sums]) -> Contraction:
    count = sum(sums.count for sums in parts)
    if not count:
        raise ValueError("no token was seen")
    extremes = torch.stack([each.detach().double().cpu() for sums in parts for each in sums.extremes])
    least, greatest = float(extremes.min()), float(extremes.max())
    kept = torch.cat([each.double().cpu() for sums in parts for each in sums.kept])
    p01, p50, p99 = torch.quantile(
        kept[:: max(1, len(kept) >> 23)], torch.tensor([0.01, 0.5, 0.99], dtype=kept.dtype)
    ).tolist()
    return Contraction(
        count=count,
        mean=float(sum(float(sums.total) for sums in parts)) / count,
        p01=p01,
        p50=p50,
        p99=p99,
        least=least,
        greatest=greatest,
        outside=sum(float(sums.outside) for sums in parts) / count,
        rho=max(abs(1 - least), abs(1 - greatest)),
    )
