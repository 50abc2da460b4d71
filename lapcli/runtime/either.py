"""A layer that is attention for some rows of a step and states for the others: they part before it and join behind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lapcli.runtime.layers import ROTATION, Norm, Rows


class Kind(Protocol):
    """What a row may go through: a part that can also do its norm and sum within its products, or leave a sum."""

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to the same."""
        ...

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same times `scale`, or `[S, B, D]`, whose sum that is."""
        ...

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """From the stream `[B, D]` to the stream with what the part adds to it."""
        ...


class Either:
    """Attention for rows with so few converted layers that this is none of them, states for the others.

    Where all rows agree, only their kind runs. Otherwise each kind runs over its own rows; or, where nothing may wait
    for the host, over all of them, with those of the other kind as padding, which reads and writes nothing.

    Args:
        attention: one kind.
        states: the other.
        rank: of the layer in the order of conversion, from 0: a row with more converted layers has states here.
        prepare: makes what both kinds need of a step's rows, once a step; `None` for nothing.

    Attributes:
        by_index: whether rows of either kind are gathered, which waits for the device.
    """

    def __init__(
        self, attention: Kind, states: Kind, rank: int, device: torch.device, prepare: Callable[[Rows], Any] | None
    ):
        self.attention, self.states, self.rank, self.prepare = attention, states, rank, prepare
        self.by_index = device.type == "cpu"

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to the same."""
        return self._run(hidden, rows, lambda kind, x, own: kind(x, own))

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same times `scale`, the sum of the last product left to what reads it where all rows agree."""
        kind = self._only(rows)
        return self(hidden, rows) * scale if kind is None else kind.split(hidden, rows, scale)

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """The same with norm and sum."""
        return self._run(x, rows, lambda kind, part, own: kind.direct(part, norm, scale, own))

    def _only(self, rows: Rows) -> Kind | None:
        """The kind of all rows, where they agree."""
        assert rows.mix is not None
        if rows.mix.most <= self.rank:
            return self.attention
        return self.states if rows.mix.least > self.rank else None

    def _run(self, x: Tensor, rows: Rows, run: Callable[[Kind, Tensor, Rows], Tensor]) -> Tensor:
        if (only := self._only(rows)) is not None:
            return run(only, x, rows)
        assert rows.mix is not None
        if self.prepare is not None:
            self.prepare(rows)
        converted = rows.mix.converted > self.rank
        if not self.by_index:
            attended = run(self.attention, x, _with_slots(rows, rows.slots.masked_fill(converted, -1)))
            read = run(self.states, x, _with_slots(rows, rows.slots.masked_fill(~converted, -1)))
            return torch.where(converted.unsqueeze(1), read, attended)
        found: Tensor | None = None
        for kind, chosen in ((self.attention, ~converted), (self.states, converted)):
            index = chosen.nonzero().squeeze(1)
            part = run(kind, x[index], _gathered(rows, index))
            found = part.new_empty(len(x), part.shape[1]) if found is None else found
            found[index] = part
        assert found is not None
        return found


def _with_slots(rows: Rows, slots: Tensor) -> Rows:
    """The same rows, some of them padding; of blocks a row has none anyway where it is not states."""
    return replace(rows, slots=slots, kept={ROTATION: rows.kept[ROTATION]} if ROTATION in rows.kept else {})


def _gathered(rows: Rows, index: Tensor) -> Rows:
    """Some of the rows."""
    kept = {}
    if ROTATION in rows.kept:
        kept[ROTATION] = tuple(table[index] for table in rows.kept[ROTATION])
    return replace(
        rows, slots=rows.slots[index], positions=rows.positions[index], blocks=rows.blocks[:, index], kept=kept
    )
