"""Keys and values of all attention layers, in pages that rows take as they grow and give back when they end.

States of layers that may be attention as well lie among them, each in a block of neighbouring pages.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lapcli.errors import ModelError
from lapcli.runtime.pools import PagedStates
from lapkernels.attend_step import read_tokens

PAGE = 64
"""Tokens of a page: as many as a program of the attention step takes at a time. A row wastes half a page a layer."""


def pages_of(tokens: int) -> int:
    """Pages that so many tokens take in one layer."""
    return -(-tokens // PAGE)


class Kind(NamedTuple):
    """What a row goes through.

    Attributes:
        attention: its attention layers; `None` for all.
        states: its layers whose states lie in pages.
    """

    attention: Collection[int] | None = None
    states: Collection[int] = ()


ALL = Kind()
"""All attention layers, and no states in pages."""


class Ends(NamedTuple):
    """Where the tokens of rows of unlike lengths stand, which end together.

    Attributes:
        tokens: places that each row has.
        rows: of each token, its row.
        columns: its place in it.
        slots: its row's slot.
        at: its position.
    """

    tokens: int
    rows: Tensor
    columns: Tensor
    slots: Tensor
    at: Tensor

    @classmethod
    def of(cls, slots: Sequence[int], positions: Sequence[int], tokens: int, device: torch.device) -> "Ends":
        """Rows that have seen `positions` tokens, of which the last ones, `tokens` at most, are there."""
        counts = torch.tensor([min(position, tokens) for position in positions])
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        # Counted down from the end, where all rows have theirs.
        back = counts.cumsum(0)[rows] - torch.arange(len(rows))
        at, columns, of = torch.tensor(positions)[rows] - back, tokens - back, torch.tensor(slots)[rows]
        return cls(tokens, *(each.to(device) for each in (rows, columns, of, at)))


class AttentionPool:
    """Keys and values of one attention layer, in pages that all layers share.

    Args:
        heads: of keys.
        key_width: of a key head.
        value_width: of a value head.
        latent: whether keys and values are compressed, and expanded by the layer each time.

    Attributes:
        keys: `[pages, heads, PAGE, key_width]`, once the pages are there.
        values: `[pages, heads, PAGE, value_width]`.
        pages: `[slots, pages of a row]`, int32, on the device: which are whose, as `attend_step` takes it.
    """

    keys: Tensor
    values: Tensor
    pages: Tensor

    def __init__(self, heads: int, key_width: int, value_width: int, *, latent: bool = False):
        self.heads, self.key_width, self.value_width, self.latent = heads, key_width, value_width, latent

    @property
    def page_numbers(self) -> int:
        """How many numbers a page of this layer holds."""
        return self.heads * PAGE * (self.key_width + self.value_width)

    def lie_in(self, content: Tensor, pages: Tensor) -> None:
        """Say where the pages are, `[pages, numbers]`, and which are whose: keys lie first, then values."""
        sizes = [self.heads * PAGE * self.key_width, self.heads * PAGE * self.value_width]
        keys, values, _ = content.split([*sizes, content.shape[1] - sum(sizes)], dim=1)
        self.keys = keys.unflatten(1, (self.heads, PAGE, self.key_width))
        self.values = values.unflatten(1, (self.heads, PAGE, self.value_width))
        self.pages = pages

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept, of other layers too."""
        return self.keys, self.values

    def write(self, slot: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Set the last tokens before `position` of a slot, which has pages for them: `[heads, tokens, width]` each.

        A layer with a sliding window remembers no others.
        """
        at = torch.arange(position - keys.shape[1], position, device=keys.device)
        page, place = self.pages[slot, at // PAGE].long(), at % PAGE
        for pool, new in ((self.keys, keys), (self.values, values)):
            pool[page, :, place] = new.transpose(0, 1).to(pool.dtype)

    def write_rows(
        self, slots: Sequence[int], positions: Sequence[int], keys: Tensor, values: Tensor, where: "Ends | None" = None
    ) -> "Ends":
        """Do as `write` does for many slots at once, whose tokens stand at the end of `[B, heads, tokens, width]`.

        Args:
            slots: which, each once.
            positions: tokens that each has seen, of which those before the ones that are here are left out.
            keys: of the last tokens; before those of a shorter row stands anything.
            values: likewise.
            where: what another layer was given back for these rows.

        Returns:
            Where the tokens are, for a layer that remembers as many.
        """
        if where is None or where.tokens != keys.shape[2]:
            where = Ends.of(slots, positions, keys.shape[2], keys.device)
        page, place = self.pages[where.slots, where.at // PAGE].long(), where.at % PAGE
        for pool, new in ((self.keys, keys), (self.values, values)):
            pool[page, :, place] = new[where.rows, :, where.columns].to(pool.dtype)
        return where

    def read(self, slot: int, position: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot's first `position` tokens, as `write` takes them; copies."""
        row = torch.tensor([slot], device=self.pages.device)
        keys, values = (read_tokens(pool, self.pages, row, position)[0] for pool in self.tensors())
        return keys, values


class Pages:
    """Says which row has which pages.

    A page holds `PAGE` tokens of one layer of one row, so that a row takes pages by its tokens and by the attention
    layers that it goes through. Layers of other shapes than the largest use the first part of a page.

    A block is as many neighbouring pages as the states of one layer take; nobody else has a page of it meanwhile.
    Single pages are taken from blocks of which others have pages already, if there are any.

    Args:
        pools: of the attention layers, which will lie in the pages.
        slots: places of rows.
        length: tokens of a row, at most.
        nbytes: that all pages may take; `None` for as much as all rows at full length need, which is the most.
        dtype: of keys and values.
        device: where.
        states: of layers that are attention for other rows, which will lie in blocks.
        kinds: that rows may be of.

    Attributes:
        content: `[pages, numbers]`.
        block: pages of one.
        table: `[layers, slots, pages of a row]`, int32, on the device; it stays where it is. Behind a row's pages there
            may be the number of any.
        count: how many pages there are.
        least_free: the fewest that were free at any time; set it anew, and it counts from then on.

    Raises:
        ModelError: there are too few for one row of full length.
    """

    def __init__(
        self,
        pools: Mapping[int, AttentionPool],
        slots: int,
        length: int,
        *,
        nbytes: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
        states: Mapping[int, PagedStates] | None = None,
        kinds: Sequence[Kind] = (ALL,),
    ):
        states = states or {}
        self.layers = list(pools)
        size = max((pool.block_bytes for pool in states.values()), default=0)
        # Where nothing is attention a page is what states take.
        numbers = max((pool.page_numbers for pool in pools.values()), default=-(-size // dtype.itemsize))
        self.page_bytes = numbers * dtype.itemsize
        self.block = max(1, -(-size // self.page_bytes)) if numbers else 1
        row = max(self.need(length, kind) for kind in kinds)
        self.count = slots * row
        if nbytes is not None and self.page_bytes:
            self.count = min(self.count, nbytes // self.page_bytes)
        if self.count < row:
            raise ModelError(
                f"{nbytes} bytes hold {self.count} pages of keys and values; a row of {length} tokens needs {row}, "
                f"{row * self.page_bytes} bytes",
                "give more memory, or make the engine with a smaller max_length",
            )
        self.content = torch.zeros(self.count, numbers, dtype=dtype, device=device)
        self.table = torch.zeros(len(pools), slots, pages_of(length), dtype=torch.int32, device=device)
        for pool, table in zip(pools.values(), self.table, strict=True):
            pool.lie_in(self.content, table)
        blocks = self.count // self.block
        for number, pool in enumerate(states.values()):
            whole = self.content[: blocks * self.block]
            pool.lie_in(whole.view(blocks, self.block * numbers), number)
        self.states = dict(states)
        # Blocks of which nobody has a page; the free pages of others; and how many of them each such block has.
        self._free = list(range(blocks - 1, -1, -1))
        self._loose = dict.fromkeys(range(blocks * self.block, self.count))
        self._left: dict[int, int] = {}
        # A row's pages in the order of its tokens: the first of each layer, the second of each, ….
        self._held: dict[int, list[int]] = {}
        self._places: dict[int, list[int]] = {}
        # Tokens that these have room for.
        self._room: dict[int, float] = {}
        self.least_free = self.count

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._free) * self.block + len(self._loose)

    @property
    def whole(self) -> int:
        """Blocks of which nobody has a page."""
        return len(self._free)

    @property
    def growth(self) -> int:
        """Pages that all rows together take at most within their next `PAGE` tokens."""
        return sum(map(len, self._places.values()))

    def need(self, tokens: int, kind: Kind = ALL) -> int:
        """Pages of a row of so many tokens, those of its states included."""
        layers = self.layers if kind.attention is None else kind.attention
        return pages_of(tokens) * len(layers) + self.block * len(kind.states)

    def open(self, slot: int, kind: Kind = ALL) -> None:
        """Let a row begin, with blocks for its states.

        Raises:
            ModelError: there are too few; it has begun all the same, and is to be closed.
        """
        chosen = self.layers if kind.attention is None else kind.attention
        self._held[slot], self._places[slot] = [], [self.layers.index(layer) for layer in chosen]
        self._room[slot] = 0 if chosen else math.inf
        if len(kind.states) > self.whole:
            raise ModelError(
                f"{len(kind.states)} layers' states are wanted, and {self.whole} blocks of {self.block} pages are free",
                "release rows, or make the engine with more kv_bytes",
            )
        for layer in kind.states:
            self.states[layer].blocks[slot] = self._free.pop()
        self.least_free = min(self.least_free, self.free)

    def close(self, slot: int) -> None:
        """Let a row end; its pages are free."""
        for page in reversed(self._held.pop(slot)):
            self._give_back(page)
        for pool in self.states.values():
            block = pool.blocks.pop(slot, None)
            if block is not None:
                self._free.append(block)
        del self._places[slot], self._room[slot]

    def blocks_of(self, slots: Sequence[int]) -> list[list[int]]:
        """For each layer whose states lie in pages the block of each row; -1 where it has none."""
        return [[pool.blocks.get(slot, -1) for slot in slots] for pool in self.states.values()]

    def layers_of(self, slot: int) -> list[int]:
        """The attention layers that a row goes through."""
        return [self.layers[place] for place in self._places[slot]]

    def lacking(self, rows: Mapping[int, int]) -> int:
        """How many pages too few are free for rows to have so many tokens; not above 0 if there are enough."""
        return sum(self._wanting(rows).values()) - self.free

    def grow(self, rows: Mapping[int, int]) -> None:
        """Let rows have room for so many tokens; those that have it get nothing.

        Args:
            rows: tokens by slot.

        Raises:
            ModelError: there are too few free pages; no row got any.
        """
        wanting = self._wanting(rows)
        if (wanted := sum(wanting.values())) > self.free:
            raise ModelError(
                f"{wanted} more pages of keys and values are wanted; {self.free} of {self.count} are free",
                "release rows, or make the engine with more kv_bytes",
            )
        indices: list[int] = []
        numbers: list[int] = []
        _, slots, length = self.table.shape
        for slot, more in wanting.items():
            held, places = self._held[slot], self._places[slot]
            for number in range(len(held), len(held) + more):
                index, place = divmod(number, len(places))
                indices.append((places[place] * slots + slot) * length + index)
                numbers.append(self._take())
            held += numbers[len(numbers) - more :]
            self._room[slot] = len(held) // len(places) * PAGE
        if indices:
            self.least_free = min(self.least_free, self.free)
            self._tell(indices, numbers)

    def clear(self, slot: int) -> None:
        """Set what lies in a row's pages to zero."""
        self.content[self._all_of(slot)] = 0

    def copy(self, source: int, target: int) -> None:
        """Let a row hold what another holds, which goes through the same layers and has as many pages."""
        self.content[self._all_of(target)] = self.content[self._all_of(source)]

    def _all_of(self, slot: int) -> list[int]:
        """A row's pages, those of its states last."""
        blocks = [pool.blocks[slot] for pool in self.states.values() if slot in pool.blocks]
        return [*self._held[slot], *(block * self.block + page for block in blocks for page in range(self.block))]

    def _take(self) -> int:
        """A free page, of a block that is not whole if there is any."""
        if self._loose:
            page, _ = self._loose.popitem()
            if page // self.block in self._left:
                self._left[page // self.block] -= 1
            return page
        block = self._free.pop()
        if self.block == 1:
            return block
        first = block * self.block
        self._loose.update(dict.fromkeys(range(first + self.block - 1, first, -1)))
        self._left[block] = self.block - 1
        return first

    def _give_back(self, page: int) -> None:
        """Let a page be free, and its block whole again if it was the last one that somebody had of it."""
        block = page // self.block
        if self.block == 1:
            self._free.append(page)
            return
        self._loose[page] = None
        # Pages behind the last whole block are of none.
        if block not in self._left:
            return
        self._left[block] += 1
        if self._left[block] == self.block:
            del self._left[block]
            for number in range(block * self.block, (block + 1) * self.block):
                del self._loose[number]
            self._free.append(block)

    def _wanting(self, rows: Mapping[int, int]) -> dict[int, int]:
        """Pages that rows need beside those that they have, of rows that need any: of few, in most steps."""
        room = self._room
        return {
            slot: pages_of(tokens) * len(self._places[slot]) - len(self._held[slot])
            for slot, tokens in rows.items()
            if tokens > room[slot]
        }

    def _tell(self, indices: list[int], numbers: list[int]) -> None:
        """Write into the table, which steps under way go on reading: behind them, and without waiting for them."""
        device = self.table.device
        both = torch.tensor([indices, numbers], pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self.table.view(-1)[both[0]] = both[1].int()
