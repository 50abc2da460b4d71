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
from lapcli.runtime.pools import AttentionPool
from lapcli.runtime.prefill import cache_argument

_NAME = "lapcli_rows"


class RowCache:
    """What an attention module takes for a cache during a step of one token a row.

    Args:
        pools: of each attention layer.

    Attributes:
        rows: of the step under way.
    """

    is_compileable = False

    def __init__(self, pools: Mapping[int, AttentionPool]):
        self.pools = pools
        self.rows: Rows | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the new token `[B, heads, 1, width]` of each row, and return all of its tokens, and whatever follows.

        Returns:
            `[B, heads, L, width]` each, L the longest row's tokens where known, else all that a row has room for;
            zero where a row has no token, since what lies there may be anything.
        """
        rows, pool = self.rows, self.pools[layer_idx]
        assert rows is not None
        pool.keys[rows.places, :, rows.positions] = keys.squeeze(2).to(pool.keys.dtype)
        pool.values[rows.places, :, rows.positions] = values.squeeze(2).to(pool.values.dtype)
        length = pool.length if rows.longest is None else rows.longest
        there = seen(rows, length)[:, None, :, None]
        # A copy of what the rows hold.
        found = (tensor[rows.places, :, :length] for tensor in (pool.keys, pool.values))
        whole_keys, whole_values = (torch.where(there, tensor, 0.0).to(keys.dtype) for tensor in found)
        return whole_keys, whole_values


def seen(rows: Rows, length: int) -> Tensor:
    """`[B, length]`, bool: the positions that each row has, this step's own included."""
    name = f"seen {length}"
    if name not in rows.kept:
        places = torch.arange(length, device=rows.positions.device)
        rows.kept[name] = places <= rows.positions.unsqueeze(1)
    return rows.kept[name]


_under_way: list[Rows] = []


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
        key: `[B, key heads, L, width]`, as `RowCache.update` returned it.
        value: `[B, key heads, L, value width]`.
        attention_mask: not read: a row sees all of its tokens.
        scaling: factor on the scores; `None` for `width ** -0.5`.
        dropout: not read.
        sliding_window: tokens that are seen at most; `None` for all.

    Returns:
        `[B, 1, heads, value width]` and nothing.
    """
    rows, (batch, heads, _one, width), length = _under_way[-1], query.shape, key.shape[2]
    there = seen(rows, length)
    if sliding_window is not None:
        there = there & (torch.arange(length, device=key.device) > rows.positions.unsqueeze(1) - sliding_window)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    scores = (grouped @ key.transpose(-1, -2)).float() * (width**-0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~there[:, None, None], -torch.inf).softmax(dim=-1)
    return (weights.to(value.dtype) @ value).reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def attending(config: Any, cache: RowCache, rows: Rows) -> Generator[None]:
    """Let modules of a config attend to a step's rows, each to its own tokens."""
    from transformers import AttentionInterface

    # At each entry: the registry is global, and an entry costs nothing.
    AttentionInterface.register(_NAME, attend)
    before, cache.rows = config._attn_implementation, rows
    config._attn_implementation = _NAME
    _under_way.append(rows)
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
        with torch.no_grad():
            cosines, sines = module(hidden.reshape(1, 1, -1), position_ids=positions)
        self.cosines, self.sines = cosines[0], sines[0]

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a step's positions, `[B, 1, width]`."""
        if "rotary" not in rows.kept:
            rows.kept["rotary"] = tuple(table[rows.positions].unsqueeze(1) for table in (self.cosines, self.sines))
        return rows.kept["rotary"]
