"""Models without a fused step: the library's forward pass and its own cache, one row after the other."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapcli.runtime.layers import Rows
from lapcli.runtime.pages import AttentionPool
from lapcli.runtime.pools import RecurrentPool
from lapcli.runtime.prefill import cache_argument

_FIELDS = ("cache", "past_key_values", "cache_params")


@dataclass
class _Held:
    """What a model remembers of one row: whatever it returned last."""

    cache: Any = None


class EagerPlan:
    """Decodes by the model's own forward pass, and keeps a cache for each slot.

    It has the interface of a `Plan` and is its own `Prefiller`.

    Args:
        model: any language model that returns a cache and takes it back.

    Attributes:
        recurrent: none; nothing lies in pools.
        attention: none.
        together: rows of a prefill.
    """

    together = 1

    def __init__(self, model: Any):
        self.model = model
        self.name = cache_argument(model.forward)
        self.recurrent: dict[int, RecurrentPool] = {}
        self.attention: dict[int, AttentionPool] = {}
        self.held: dict[int, _Held] = {}
        self.prefiller = self

    def __call__(self, tokens: Tensor, rows: Rows) -> Tensor:
        """One step: tokens `[B]` to logits `[B, vocabulary]`. Waits for the device."""
        slots = rows.slots.tolist()
        found = [self.forward(tokens[row].view(1, 1), self.held[slot], 0)[0] for row, slot in enumerate(slots)]
        return torch.stack(found)

    def cache(self) -> _Held:
        """What remembers nothing yet."""
        return _Held()

    def forward(self, tokens: Tensor, cache: _Held, seen: int) -> Tensor:
        """Run `[1, T]` tokens on from a cache, which then has seen them, and return the last logits."""
        found = self.model(input_ids=tokens, use_cache=True, **{self.name: cache.cache})
        cache.cache = next(found[name] for name in _FIELDS if name in found)
        return found.logits[:, -1]

    def store(self, cache: _Held, row: int, slot: int, position: int) -> None:
        """Keep a cache."""
        self.held[slot] = cache

    def restore(self, slot: int, position: int) -> _Held:
        """The cache of a slot."""
        return self.held[slot]

    def prefiller_of(self, converted: int) -> "EagerPlan":
        """Itself: there is one configuration."""
        return self

    def forget(self, slot: int) -> None:
        """Drop the cache of a slot."""
        self.held.pop(slot, None)

    def copy(self, source: int, target: int) -> None:
        """Let a slot remember what another does."""
        self.held[target] = deepcopy(self.held[source])

    def clear(self, slot: int) -> None:
        """Let a slot remember nothing."""
        self.held[slot] = _Held()
