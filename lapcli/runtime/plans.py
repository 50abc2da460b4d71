"""From a model in memory to its decoding step: which parts follow which, and where each layer's state lies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapcli.errors import ModelError
from lapcli.runtime.layers import DirectPart, Head, LayerNorm, Norm, Part, Rows, SplitPart
from lapcli.runtime.pages import AttentionPool
from lapcli.runtime.pools import RecurrentPool
from lapcli.runtime.prefill import Prefiller
from lapkernels.delta_rule import Choice
from lapkernels.delta_step import select_impl as select_delta

if TYPE_CHECKING:
    from lapcli.runtime.configurations import Convertible


@dataclass(frozen=True)
class Room:
    """What a plan's pools are made for.

    Attributes:
        rows: slots.
        length: tokens of a row that attention layers are in the way of.
        state_dtype: of recurrent states.
        impl: which implementation of the state's step: `auto`, `reference` or `triton`.
        convertible: the model's configurations, where it comes in several.
    """

    rows: int
    length: int
    state_dtype: torch.dtype
    impl: str = "auto"
    convertible: "Convertible | None" = None


@dataclass
class Sublayer:
    """`x + scale * after(part(norm(x)))`; either norm may be missing."""

    part: Part
    norm: Norm | None
    after: Norm | None = None
    scale: float = 1.0


@dataclass
class Plan:
    """A model's step.

    Attributes:
        embed: tokens `[B]` to `[B, D]`.
        sublayers: what follows, in order.
        final: the last norm.
        head: from the stream to logits.
        prefiller: the model's own forward pass.
        recurrent: the pools of layers with a state, by layer.
        attention: the pools of layers with keys and values, by layer.
        residual_dtype: of the stream between sublayers; `None` for the embedding's.
        together: rows of one prefill, at most.
        thin: rows of a step, at most, whose norms and sums are done within products.
        few: rows of a step, at most, whose products are those of `lapkernels.few_linear`; `None`: those that were
            measured to be faster.
        kernels: of each operator that keeps something of a row, what chooses its implementation.
        prefillers: those of configurations, by their converted layers, where the model comes in several.
    """

    embed: Callable[[Tensor], Tensor]
    sublayers: list[Sublayer]
    final: Norm
    head: Head
    prefiller: Prefiller
    recurrent: dict[int, RecurrentPool]
    attention: dict[int, AttentionPool] = field(default_factory=dict)
    residual_dtype: torch.dtype | None = None
    together: int = 256
    thin: int = 0
    few: int | None = None
    kernels: tuple[Callable[[torch.device, torch.dtype], Choice], ...] = (select_delta,)
    prefillers: Mapping[int, Prefiller] = field(default_factory=dict)

    def __call__(self, tokens: Tensor, rows: Rows) -> Tensor:
        """One step: tokens `[B]` to logits `[B, vocabulary]`."""
        x = self.embed(tokens)
        dtype = x.dtype
        rows.kept["embedding"] = x
        x = x if self.residual_dtype is None else x.to(self.residual_dtype)
        change: Tensor | None = None
        thin = len(tokens) <= self.thin
        rows.few = None if self.few is None else len(tokens) <= self.few
        for sub in self.sublayers:
            if thin and sub.norm is not None and sub.after is None and isinstance(sub.part, DirectPart):
                x = x if change is None else _sum(x, change)
                x, change = sub.part.direct(x, sub.norm, sub.scale, rows), None
                continue
            x, hidden = _normed(x, change, sub.norm, dtype)
            if sub.after is None and isinstance(sub.part, SplitPart):
                change = sub.part.split(hidden, rows, sub.scale)
                continue
            change = sub.part(hidden, rows)
            if sub.after is not None:
                change = sub.after(change, dtype)
            if sub.scale != 1.0:
                change = change * sub.scale
        if thin and not isinstance(self.final, LayerNorm):
            return self.head.direct(x if change is None else _sum(x, change), self.final)
        _, hidden = _normed(x, change, self.final, dtype)
        return self.head(hidden, rows)

    def prefiller_of(self, converted: int) -> Prefiller:
        """The forward pass of a configuration; of the model, where it has one."""
        return self.prefillers.get(converted, self.prefiller)

    def forget(self, slot: int) -> None:
        """A row ended. What lies in its slot is written over by the next one, or never read."""

    def copy(self, source: int, target: int) -> None:
        """Let a slot have the states of another."""
        for pool in self.recurrent.values():
            for tensor in pool.tensors():
                tensor[target] = tensor[source]

    def clear(self, slot: int) -> None:
        """Set the states of a slot to zero."""
        for pool in self.recurrent.values():
            for tensor in pool.tensors():
                tensor[slot].zero_()


def _sum(x: Tensor, change: Tensor) -> Tensor:
    """The stream with what was computed added, which may be in parts `[S, B, D]`."""
    return x + change if change.ndim == x.ndim else (x + change.sum(0)).to(x.dtype)


def _normed(x: Tensor, change: Tensor | None, norm: Norm | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The stream with what was computed added, and what the next part reads."""
    if norm is None:
        x = x if change is None else _sum(x, change)
        return x, x.to(dtype)
    if change is not None and change.ndim > x.ndim and isinstance(norm, LayerNorm):
        x, change = _sum(x, change), None
    return (x, norm(x, dtype)) if change is None else norm.after(x, change, dtype)


def why_no_plan(model: Any) -> str | None:
    """Why a model's steps cannot be fused, or `None` where they can."""
    found = _planner(model)
    return found if isinstance(found, str) else None


def make_plan(model: Any, room: Room) -> Plan:
    """The plan of a model. Its projections become views of fused ones, which changes no value.

    Raises:
        ModelError: there is none for such a model.
    """
    found = _planner(model)
    if isinstance(found, str):
        raise ModelError(f"no fused step for this model: {found}")
    return found(model, room)


def _planner(model: Any) -> Callable[[Any, Room], Plan] | str:
    """What makes the plan of a model, or why nothing does."""
    from lapcli.models.decoder import RecurrentForCausalLM
    from lapcli.runtime.library_models import text_config
    from lapcli.runtime.own_models import own_plan, why_not_own
    from lapcli.runtime.planned import PLANS, why_not_library

    if isinstance(model, RecurrentForCausalLM):
        return why_not_own(model) or own_plan
    return why_not_library(model) or PLANS[text_config(model).model_type]
