"""Continuous batching: rows join when there is room and leave when they are done, and the steps never stop for it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapcli.errors import UsageError
from lapcli.runtime.engine import Engine, Prefilled
from lapcli.runtime.sampling import Choices, Mode, choose, mode_of
from lapcli.runtime.settings import Event, GenerationSettings, Reason
from lapcli.runtime.text import TextStream

_MODES: tuple[Mode, ...] = ("greedy", "draw", "filtered")


@dataclass
class Row:
    """One row.

    Attributes:
        number: by which events name it.
        prompt: its tokens.
        settings: how it is continued.
        text: its text so far, with a tokenizer.
        slot: where its state lies, once it has one.
        tokens: what was chosen so far.
        reason: why it ended.
    """

    number: int
    prompt: list[int]
    settings: GenerationSettings
    text: TextStream | None
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None


@dataclass
class _Flight:
    """A step under way: its rows in order, and where their tokens will be."""

    rows: list[Row]
    tokens: Tensor
    done: Any

    def landed(self) -> list[int]:
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()


class Batch:
    """Decodes rows, each with its own settings, on one engine.

    A step is under way on the device while the host reads the one before; so a row that ends by its own token has
    run one step too many, whose token is dropped.

    Args:
        engine: where the rows live; rows that it holds otherwise are left alone.
        tokenizer: for text and stop texts.
        together: the most prompt tokens that go through the model between two steps, unless one prompt has more.
    """

    def __init__(self, engine: Engine, tokenizer: Any = None, *, together: int = 8192):
        self.engine, self.tokenizer, self.together = engine, tokenizer, together
        self._waiting: deque[Row] = deque()
        self._active: list[Row] = []
        self._flight: _Flight | None = None
        self._changed = True
        self._mode: Mode = "greedy"
        self._next = 0
        on_gpu = engine.device.type == "cuda"
        # Two, since one is read while the other is written.
        self._hosts = [torch.empty(engine.max_rows, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._turn = 0

    @property
    def unfinished(self) -> bool:
        """Whether any row waits or is under way."""
        return bool(self._waiting or self._active)

    @property
    def active(self) -> int:
        """Rows under way."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Rows that wait for room."""
        return len(self._waiting)

    def add(self, prompt: Sequence[int], settings: GenerationSettings) -> int:
        """Let a row wait for room.

        Returns:
            Its number.

        Raises:
            UsageError: the prompt has no token or a foreign one, or a stop text is given without a tokenizer.
            ModelError: the prompt alone is longer than a row may be.
        """
        prompt = list(prompt)
        self.engine.check_prompt(prompt)
        if settings.stop and self.tokenizer is None:
            raise UsageError("a stop text needs a tokenizer")
        text = None if self.tokenizer is None else TextStream(self.tokenizer, settings.stop, prompt)
        self._waiting.append(Row(self._next, prompt, settings, text))
        self._next += 1
        return self._next - 1

    def cancel(self, number: int) -> list[Event]:
        """End a row now.

        Returns:
            Its last event; nothing if it had ended, or never was.
        """
        for row in list(self._waiting):
            if row.number == number:
                self._waiting.remove(row)
                row.reason = "cancelled"
                return [Event(number, (), "", "cancelled")]
        for row in self._active:
            if row.number == number:
                return [self._end(row, "cancelled", ())]
        return []

    def close(self) -> None:
        """End all rows."""
        for number in [row.number for row in (*self._waiting, *self._active)]:
            self.cancel(number)
        self._flight = None

    @torch.no_grad()
    def advance(self) -> list[Event]:
        """Do one step, admit rows that there is room for, and return what came of the step before."""
        events: list[Event] = []
        if self._waiting and self.engine.slots.free:
            # New rows join the next step, which therefore has to know what the last one chose.
            events += self._land()
            events += self._admit()
        ending = self._flight is not None and any(self._ends_by_count(row, pending=1) for row in self._flight.rows)
        if self._changed or ending:
            events += self._land()
        if not self._active:
            return events
        before, self._flight = self._flight, self._launch()
        if before is not None:
            events += self._read(before)
        return events

    def _admit(self) -> list[Event]:
        """Run the prompts of waiting rows for which there are slots, and choose their first tokens."""
        rows: list[Row] = []
        budget = self.together
        while (
            self._waiting
            and len(rows) < self.engine.slots.free
            and (not rows or len(self._waiting[0].prompt) <= budget)
        ):
            row = self._waiting.popleft()
            budget -= len(row.prompt)
            rows.append(row)
        try:
            done = self.engine.prefill_rows([row.prompt for row in rows])
        except BaseException:
            # They are still waiting, if somebody makes room and goes on.
            self._waiting.extendleft(reversed(rows))
            raise
        for row, found in zip(rows, done, strict=True):
            row.slot = found.slot
        self._active += rows
        self._changed = True
        first = self._first_tokens(rows, done)
        return [event for row, token in zip(rows, first, strict=True) for event in self._take(row, token)]

    def _first_tokens(self, rows: Sequence[Row], done: Sequence[Prefilled]) -> list[int]:
        """Choose what follows the prompts, by the same rule as a step does."""
        device = self.engine.device
        choices = Choices(len(rows), device)
        _fill(choices, rows)
        positions = torch.tensor([len(row.prompt) for row in rows], device=device)
        logits = torch.stack([found.logits for found in done])
        return choose(logits, positions, choices, _mode(rows)).tolist()

    def _launch(self) -> _Flight:
        """Start a step for all active rows."""
        engine, rows = self.engine, list(self._active)
        if self._changed:
            slots = [row.slot for row in rows if row.slot is not None]
            engine.steps.set_rows([row.tokens[-1] for row in rows], slots, [engine.slots.positions[s] for s in slots])
            _fill(engine.steps.choices, rows)
            self._mode = _mode(rows)
            self._changed = False
        longest = max(engine.slots.positions[row.slot] for row in rows if row.slot is not None) + 1
        engine.steps.run(len(rows), self._mode, longest=longest)
        for row in rows:
            assert row.slot is not None
            engine.slots.positions[row.slot] += 1
        self._turn = 1 - self._turn
        host = self._hosts[self._turn][: len(rows)]
        host.copy_(engine.steps.tokens[: len(rows)], non_blocking=True)
        done = None
        if engine.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(engine.device))
        return _Flight(rows, host, done)

    def _land(self) -> list[Event]:
        """Wait for the step under way, if any."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._read(flight)

    def _read(self, flight: _Flight) -> list[Event]:
        """Hand out the tokens of a step; those of rows that ended meanwhile are dropped."""
        return [
            event
            for row, token in zip(flight.rows, flight.landed(), strict=True)
            if row.reason is None
            for event in self._take(row, token)
        ]

    def _take(self, row: Row, token: int) -> list[Event]:
        """Add a token to a row."""
        row.tokens.append(token)
        if token in row.settings.eos:
            return [self._end(row, "eos", (token,))]
        shown = "" if row.text is None else row.text.push(token)
        if row.text is not None and row.text.stopped:
            return [self._end(row, "stop", (token,), shown)]
        if self._ends_by_count(row):
            full = len(row.tokens) < row.settings.max_new_tokens
            return [self._end(row, "full" if full else "length", (token,), shown)]
        return [Event(row.number, (token,), shown)]

    def _ends_by_count(self, row: Row, pending: int = 0) -> bool:
        """Whether a row has all tokens that it may have, once so many more have come."""
        count = len(row.tokens) + pending
        # The last token is never taken in, so it needs no room.
        no_room = self.engine.limited and len(row.prompt) + count > self.engine.max_length
        return count >= row.settings.max_new_tokens or no_room

    def _end(self, row: Row, reason: Reason, tokens: tuple[int, ...], shown: str = "") -> Event:
        """End a row and free its slot."""
        row.reason = reason
        if row.text is not None and reason != "stop":
            shown += row.text.finish()
        self._active.remove(row)
        if row.slot is not None:
            self.engine.release(row.slot)
        self._changed = True
        return Event(row.number, tokens, shown, reason)


def _fill(choices: Choices, rows: Sequence[Row]) -> None:
    """Say how the tokens of rows are chosen."""
    for tensor, values in zip(
        choices.tensors(),
        zip(*((s.temperature, s.top_k, s.top_p, s.seed) for s in (row.settings for row in rows)), strict=True),
        strict=True,
    ):
        tensor[: len(rows)].copy_(torch.tensor(values, dtype=tensor.dtype))


def _mode(rows: Sequence[Row]) -> Mode:
    """The least that is enough for every row."""
    needed: list[Mode] = [mode_of(row.settings.temperature, row.settings.top_k, row.settings.top_p) for row in rows]
    return max(needed, key=_MODES.index)
