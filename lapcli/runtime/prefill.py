"""Prompts go through the model's own forward pass; what it remembers then moves into the pools, or back out of them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lapcli.models.cache import LayerState, RecurrentCache
from lapcli.models.tokens import PaddedEnd
from lapcli.runtime.pages import AttentionPool, Ends
from lapcli.runtime.pieces import Pieces
from lapcli.runtime.pools import RecurrentPool


class Prefiller(Protocol):
    """A model's own forward pass and its own cache."""

    def forward(self, tokens: Tensor, cache: Any, seen: int) -> Tensor:
        """Run `[B, T]` tokens on from a cache that has seen so many, and return the last logits `[B, vocabulary]`."""
        ...

    def forward_together(self, prompts: Sequence[Sequence[int]], cache: Any) -> Tensor:
        """Run prompts of any lengths in one pass, the shorter ones padded, and return the logits behind each."""
        ...

    def cache(self) -> Any:
        """A cache that has seen nothing."""
        ...

    def store(self, cache: Any, row: int, slot: int, position: int) -> None:
        """Put one row of a cache, which has seen `position` tokens, into a slot of the pools."""
        ...

    def store_rows(self, cache: Any, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put all rows of a cache that `forward_together` filled into slots of the pools."""
        ...

    def restore(self, slot: int, position: int) -> Any:
        """A cache of one row with what lies in a slot."""
        ...


class OwnPrefiller:
    """For lapcli's own models.

    Args:
        model: one of them.
        recurrent: the pool of each layer.

    Attributes:
        pieces: what runs prompts of one row by captured passes; `None` for the model's own pass over all of them.
    """

    def __init__(self, model: Any, recurrent: Mapping[int, RecurrentPool]):
        self.model, self.recurrent = model, recurrent
        self.pieces: Pieces | None = None

    def cache(self) -> RecurrentCache:
        """A cache that has seen nothing."""
        return RecurrentCache()

    def forward(self, tokens: Tensor, cache: RecurrentCache, seen: int) -> Tensor:
        """Run tokens on from a cache."""
        if self.pieces is not None and len(tokens) == 1:
            return self.pieces.run(tokens, cache)
        return self.model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def forward_together(self, prompts: Sequence[Sequence[int]], cache: RecurrentCache) -> Tensor:
        """Run prompts of any lengths in one pass; behind a shorter one nothing is written and nothing decays."""
        device, lengths = self.model.device, [len(prompt) for prompt in prompts]
        longest = max(lengths)
        if min(lengths) == longest:
            tokens = torch.tensor([list(prompt) for prompt in prompts], device=device)
            return self.model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        ends = sorted({length - 1 for length in lengths})
        hidden = self.model.model(
            input_ids=tokens,
            attention_mask=PaddedEnd.behind(torch.tensor(lengths, device=device), longest),
            cache=cache,
            use_cache=True,
            kept=torch.tensor(ends, device=device),
        ).last_hidden_state
        own = torch.tensor([ends.index(length - 1) for length in lengths], device=device)
        return self.model.lm_head(hidden[torch.arange(len(prompts), device=device), own])

    def store(self, cache: RecurrentCache, row: int, slot: int, position: int) -> None:
        """Put one row of a cache into a slot."""
        for layer, pool in self.recurrent.items():
            held = cache.get(layer)
            assert held is not None
            past = [part[row] for part in held.convolution]
            pool.write(slot, position, held.recurrent[row], torch.cat(past, dim=-1) if past else pool.inputs[slot, :0])

    def store_rows(self, cache: RecurrentCache, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put all rows of a cache into slots."""
        for layer, pool in self.recurrent.items():
            held = cache.get(layer)
            assert held is not None
            past = torch.cat(held.convolution, dim=-1) if held.convolution else pool.inputs[:0]
            pool.write_rows(slots, positions, held.recurrent, past)

    def restore(self, slot: int, position: int) -> RecurrentCache:
        """A cache of one row with what lies in a slot."""
        cache = RecurrentCache()
        for mixer in self.model.mixers():
            state, past = self.recurrent[mixer.layer_idx].read(slot, position)
            keys, values = mixer.shape.key_channels, mixer.shape.value_channels
            parts = past.unsqueeze(0).split([keys, keys, values], dim=-1) if mixer.use_short_conv else ()
            cache.put(mixer.layer_idx, LayerState(state.unsqueeze(0).to(_wide(self.model.dtype)), tuple(parts)))
        cache.advance(position)
        return cache


class LibraryPrefiller:
    """For models of transformers, whose cache holds a list of layers.

    Args:
        model: one of them.
        recurrent: the pool of each layer with a state.
        attention: the pool of each layer with keys and values.
    """

    def __init__(self, model: Any, recurrent: Mapping[int, RecurrentPool], attention: Mapping[int, AttentionPool]):
        self.model, self.recurrent, self.attention = model, recurrent, attention
        self.cache_name = cache_argument(model.forward)
        # Said, since Bamba counts them from 0 again after a cache (transformers 5.24).
        self.positions = "position_ids" in inspect.signature(model.forward).parameters

    def cache(self) -> Any:
        """A cache that has seen nothing."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def forward(self, tokens: Tensor, cache: Any, seen: int) -> Tensor:
        """Run tokens on from a cache."""
        more = {self.cache_name: cache}
        if self.positions:
            more["position_ids"] = torch.arange(seen, seen + tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **more).logits[:, -1]

    def forward_together(self, prompts: Sequence[Sequence[int]], cache: Any) -> Tensor:
        """Run prompts of any lengths in one pass, padded on the left and masked, as the library's `generate` does."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        tokens = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts])
        tokens = tokens.to(self.model.device)
        if min(lengths) == longest:
            return self.forward(tokens, cache, 0)
        places = torch.arange(longest) - longest + torch.tensor(lengths).unsqueeze(1)
        more: dict[str, Any] = {self.cache_name: cache}
        if self.positions:
            more["position_ids"] = places.clamp(min=0).to(tokens.device)
        mask = (places >= 0).long().to(tokens.device)
        return self.model(
            input_ids=tokens, attention_mask=mask, use_cache=True, logits_to_keep=1, **more
        ).logits[:, -1]  # fmt: skip

    def store(self, cache: Any, row: int, slot: int, position: int) -> None:
        """Put one row of a cache into a slot."""
        for layer in self.recurrent:
            self.store_state(cache, layer, row, slot, position)
        for layer, pool in self.attention.items():
            held = cache.layers[layer]
            pool.write(slot, position, held.keys[row], held.values[row])

    def store_rows(self, cache: Any, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put all rows of a cache into slots."""
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            for layer in self.recurrent:
                self.store_state(cache, layer, row, slot, position)
        where: Ends | None = None
        for layer, pool in self.attention.items():
            held = cache.layers[layer]
            where = pool.write_rows(slots, positions, held.keys, held.values, where)

    def store_state(self, cache: Any, layer: int, row: int, slot: int, position: int) -> None:
        """Put one row's state of a layer into a slot."""
        pool, held = self.recurrent[layer], cache.layers[layer]
        past = held.conv_states[0][row].transpose(0, 1)[-pool.shape.past :]
        pool.write(slot, position, held.recurrent_states[0][row], past)

    def restore(self, slot: int, position: int) -> Any:
        """A cache of one row with what lies in a slot."""
        cache = self.cache()
        for layer in self.recurrent:
            self.restore_state(cache, layer, slot, position)
        for layer, pool in self.attention.items():
            keys, values = pool.read(slot, position)
            cache.layers[layer].update(keys.unsqueeze(0), values.unsqueeze(0))
        return cache

    def restore_state(self, cache: Any, layer: int, slot: int, position: int) -> None:
        """Let a cache of one row hold a layer's state that lies in a slot."""
        pool = self.recurrent[layer]
        state, past = pool.read(slot, position)
        inputs = past.transpose(0, 1).unsqueeze(0)
        cache.layers[layer].update_conv_state(inputs, conv_kernel_size=pool.shape.past + 1)
        cache.layers[layer].update_recurrent_state(state.unsqueeze(0))


def cache_argument(forward: Any) -> str:
    """What a library's forward pass calls its cache: transformers 5.24 renamed it."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "past_key_values")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
