"""Softmax attention layers of a hybrid: the library's own module, whose cache is a pool and whose attention reads it.

transformers lets an attention function be registered by name and asks a cache object to `update` itself. So a module's
norms, rotary embedding, gates and multipliers stay the library's; only where keys and values lie is ours.
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lapcli.runtime.layers import Rows
from lapcli.runtime.pages import PAGE, AttentionPool
from lapcli.runtime.prefill import cache_argument
from lapkernels.attend_step import attend_step, read_tokens, write_tokens

_NAME = "lapcli_rows"


class RowCache:
    """What an attention module takes for a cache during a step of one token a row.

    Args:
        pools: of each attention layer.
        impl: which `attend_step`.

    Attributes:
        rows: of the step under way.
    """

    is_compileable = False

    def __init__(self, pools: Mapping[int, AttentionPool], impl: str = "auto"):
        self.pools, self.impl = pools, impl
        self.rows: Rows | None = None
        self._pool: AttentionPool | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the new token of each row, `[B, heads, 1, width]` each.

        Returns:
            The same, which `attend` will keep. Of latents, which the module has yet to expand, all that a row has,
            and whatever follows: `[B, 1, L, width]`, zero where there is no token.
        """
        self._pool = self.pools[layer_idx]
        if not self._pool.latent:
            return keys, values
        rows, pool = self._now()
        new = keys.squeeze(2), values.squeeze(2)
        write_tokens(pool.tensors(), new, pool.pages, rows.positions, rows.slots)
        length = pool.pages.shape[1] * PAGE if rows.longest is None else rows.longest
        there = seen(rows, length)[:, None, :, None]
        found = (read_tokens(tensor, pool.pages, rows.slots, length) for tensor in pool.tensors())
        whole_keys, whole_values = (torch.where(there, tensor, 0.0).to(keys.dtype) for tensor in found)
        return whole_keys, whole_values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Attend from the new token of each row, `[B, heads, 1, width]`, to all of its tokens; `[B, heads, width]`."""
        rows, pool = self._now()
        if not pool.latent:
            return attend_step(
                query.squeeze(2),
                key.squeeze(2),
                value.squeeze(2),
                pool.keys,
                pool.values,
                pages=pool.pages,
                position=rows.positions,
                slots=rows.slots,
                scale=scaling,
                window=window,
                longest=rows.longest,
                impl=self.impl,
            )
        there = seen(rows, key.shape[2])
        grouped = query.squeeze(2).unflatten(1, (key.shape[1], -1))
        scores = (grouped @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = scores.masked_fill(~there[:, None, None], -torch.inf).softmax(dim=-1)
        return (weights.to(value.dtype) @ value).flatten(1, 2)

    def _now(self) -> tuple[Rows, AttentionPool]:
        assert self.rows is not None
        assert self._pool is not None
        return self.rows, self._pool


def seen(rows: Rows, length: int) -> Tensor:
    """`[B, length]`, bool: the positions that each row has, this step's own included."""
    name = f"seen {length}"
    if name not in rows.kept:
        places = torch.arange(length, device=rows.positions.device)
        rows.kept[name] = places <= rows.positions.unsqueeze(1)
    return rows.kept[name]


_under_way: list[RowCache] = []


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token a row, in the form of transformers' attention functions.

    Args:
        module: the attention module.
        query: `[B, heads, 1, width]`.
        key: as `RowCache.update` returned it.
        value: likewise.
        attention_mask: not read: a row sees all of its tokens.
        scaling: factor on the scores; `None` for `width ** -0.5`.
        dropout: not read.
        sliding_window: tokens that are seen at most, the new one counted; `None` for all.

    Returns:
        `[B, 1, heads, value width]` and nothing.
    """
    return _under_way[-1].attend(query, key, value, scaling, sliding_window).unsqueeze(1), None


@contextmanager
def attending(config: Any, cache: RowCache, rows: Rows) -> Generator[None]:
    """Let modules of a config attend to a step's rows, each to its own tokens."""
    from transformers import AttentionInterface

    # At each entry: the registry is global, and an entry costs nothing.
    AttentionInterface.register(_NAME, attend)
    before, cache.rows = config._attn_implementation, rows
    config._attn_implementation = _NAME
    _under_way.append(cache)
    try:
        yield
    finally:
        _under_way.pop()
        config._attn_implementation, cache.rows = before, None


class Attention:
    """A library's attention module on pools.

    Args:
        module: from transformers.
        cache: over the pools of all attention layers.
        rotary: gives what the module takes as `position_embeddings`; `None` where it takes none.
        arguments: further ones of the module.
    """

    def __init__(self, module: Any, cache: RowCache, rotary: Callable[[Rows], Any] | None = None, **arguments: Any):
        self.module, self.cache, self.rotary = module, cache, rotary
        names = inspect.signature(module.forward).parameters
        self.arguments = {**arguments, cache_argument(module.forward): cache}
        if "attention_mask" in names:
            self.arguments["attention_mask"] = None
        self.positions = "position_embeddings" in names

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to the same."""
        extra = {}
        if self.positions:
            extra["position_embeddings"] = None if self.rotary is None else self.rotary(rows)
        with attending(self.module.config, self.cache, rows):
            found = self.module(hidden_states=hidden.unsqueeze(1), **self.arguments, **extra)
        return found[0].squeeze(1)


class Rotary:
    """A rotary embedding as a table over all positions that a row may have.

    Args:
        module: the library's, from hidden states and positions to cosines and sines.
        length: positions.
        hidden: anything of the model's dtype and device.
    """

    def __init__(self, module: Any, length: int, hidden: Tensor):
        positions = torch.arange(length, device=hidden.device).unsqueeze(0)
        if hasattr(module, "mrope_section"):
            # One position for each axis of an image; text has the same on all.
            positions = positions.expand(3, 1, -1)
        with torch.no_grad():
            cosines, sines = module(hidden.reshape(1, 1, -1), position_ids=positions)
        self.cosines, self.sines = cosines[0], sines[0]

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a step's positions, `[B, 1, width]`."""
        if "rotary" not in rows.kept:
            rows.kept["rotary"] = tuple(table[rows.positions].unsqueeze(1) for table in (self.cosines, self.sines))
        return rows.kept["rotary"]
