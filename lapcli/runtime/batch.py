"""Continuous batching: rows join when there is room and leave when they are done, and the steps never stop for it."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapcli.errors import UsageError
from lapcli.runtime.engine import Engine, Filling, Prefilled
from lapcli.runtime.pages import PAGE
from lapcli.runtime.sampling import Choices, Mode, choose, mode_of, rows_together
from lapcli.runtime.settings import Event, GenerationSettings, Reason, TokenScores
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
        configuration: how the model runs for it, by name; `None` for the engine's first.
    """

    number: int
    prompt: list[int]
    settings: GenerationSettings
    text: TextStream | None
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None
    configuration: str | None = None

    @property
    def sequence(self) -> list[int]:
        """All that the model has to know before it can go on."""
        return [*self.prompt, *self.tokens]


@dataclass
class _Flight:
    """A step under way: its rows in order, and where their tokens will be, and the scores of those that want them."""

    rows: list[Row]
    tokens: Tensor
    done: Any
    scores: "_Scores | None"

    def landed(self) -> list[tuple[int, tuple[TokenScores, ...]]]:
        """Each row's token, and its scores if it wants them."""
        if self.done is not None:
            self.done.synchronize()
        tokens = self.tokens.tolist()
        scores = {} if self.scores is None else self.scores.landed()
        return [(token, scores.get(row, ())) for row, token in enumerate(tokens)]


@dataclass
class _Scores:
    """Log-probabilities of a step, on the device: of which rows, of their tokens, and of the likeliest."""

    rows: list[int]
    wanted: list[int]
    tokens: Tensor
    chosen: Tensor
    values: Tensor
    ids: Tensor

    def landed(self) -> dict[int, tuple[TokenScores, ...]]:
        found = zip(
            self.rows,
            self.wanted,
            self.tokens.tolist(),
            self.chosen.tolist(),
            self.ids.tolist(),
            self.values.tolist(),
            strict=True,
        )
        return {
            row: (TokenScores(token, chosen, tuple(zip(ids, values, strict=True))[:count]),)
            for row, count, token, chosen, ids, values in found
        }


class Batch:
    """Decodes rows, each with its own settings, on one engine.

    On a GPU a step is under way while the host reads the one before; so a row that ends by its own token has run one
    step too many, whose token is dropped.

    Args:
        engine: where the rows live; rows that it holds otherwise are left alone.
        tokenizer: for text and stop texts.
        together: the most prompt tokens that go through the model between two steps, unless one prompt has more.
        piece: the most where one prompt has more: it goes through piece by piece, between steps of the other rows;
            `None` lets it go through at once.

    Attributes:
        together: may be changed at any time.
        piece: may be changed at any time.
        most: rows under way at most, however many the engine has room for; may be changed at any time.
        failed: rows of the step that the last `advance` could not do; 0 where it raised nothing, or before the step.
        switches: rows under way that were handed over to another configuration so far.
        mixed_steps: steps so far whose rows were of several configurations.
        set_back: rows so far that had to wait again, since no page was left for what they had to keep.
    """

    def __init__(self, engine: Engine, tokenizer: Any = None, *, together: int = 8192, piece: int | None = None):
        self.engine, self.tokenizer, self.together, self.piece = engine, tokenizer, together, piece
        self.most = engine.max_rows
        self.failed = self.switches = self.mixed_steps = self.set_back = 0
        self._short = False
        self._filling: tuple[Row, Filling] | None = None
        self._kept: list[Event] = []
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
        return bool(self._waiting or self._active or self._filling or self._kept)

    @property
    def active(self) -> int:
        """Rows under way."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Rows that wait for room, one whose prompt is on its way included."""
        return len(self._waiting) + (self._filling is not None)

    @property
    def room(self) -> int:
        """Rows that may be under way together: `most`, or what there is where the next one waits for pages."""
        under_way = len(self._active) + (self._filling is not None)
        return max(1, min(self.most, under_way)) if self._short else self.most

    @property
    def first_waiting(self) -> int | None:
        """The number of the row that gets the next room; `None` where none waits."""
        if self._filling is not None:
            return self._filling[0].number
        return self._waiting[0].number if self._waiting else None

    def add(self, prompt: Sequence[int], settings: GenerationSettings, configuration: str | None = None) -> int:
        """Let a row wait for room.

        Args:
            prompt: its tokens.
            settings: how it is continued.
            configuration: how the model runs for it, the name of one of the engine's; `None` for the first.

        Returns:
            Its number.

        Raises:
            UsageError: the prompt has no token or a foreign one, a stop text is given without a tokenizer, or there is
                no such configuration.
            ModelError: the prompt alone is longer than a row may be.
        """
        prompt = list(prompt)
        self.engine.check_prompt(prompt)
        self.engine.converted(configuration)
        if settings.stop and self.tokenizer is None:
            raise UsageError("a stop text needs a tokenizer")
        text = None if self.tokenizer is None else TextStream(self.tokenizer, settings.stop, prompt)
        self._waiting.append(Row(self._next, prompt, settings, text, configuration=configuration))
        self._next += 1
        return self._next - 1

    @property
    def taking_in(self) -> bool:
        """Whether a prompt is on its way, piece by piece."""
        return self._filling is not None

    @property
    def in_line(self) -> list[int]:
        """The numbers of rows that wait and of whose prompt nothing has been taken in, in their order."""
        return [row.number for row in self._waiting]

    def under_way(self, number: int) -> bool:
        """Whether a row takes part in steps."""
        return any(row.number == number for row in self._active)

    def tokens_of(self, number: int) -> int:
        """Tokens of a row, of its prompt and chosen; 0 for a row that ended, or never was."""
        row = self._row(number)
        return 0 if row is None else len(row.prompt) + len(row.tokens)

    def configuration_of(self, number: int) -> str | None:
        """The name of a row's configuration; `None` for a row that ended, or never was."""
        row = self._row(number)
        return None if row is None else row.configuration or self.engine.configurations[0].name

    def switch(self, number: int, configuration: str) -> bool:
        """Hand a row over to another configuration.

        A row under way waits, before all others, until its tokens have gone through the model in the new configuration,
        as any prompt does; what follows is what a row of that configuration with these tokens would be given.

        Returns:
            Whether it was; not a row that ended or never was, nor one that has this configuration.

        Raises:
            UsageError: there is no such configuration.
        """
        self.engine.converted(configuration)
        row = self._row(number)
        if row is None or self.configuration_of(number) == configuration:
            return False
        if row in self._active:
            # The step under way may be its last.
            self._land(self._kept)
            if row.reason is not None:
                return False
            self._set_back([row])
            self.switches += 1
        elif row not in self._waiting:
            self._set_back_filling()
            self.switches += 1
        row.configuration = configuration
        return True

    def cancel(self, number: int) -> list[Event]:
        """End a row now.

        Returns:
            Its last event; nothing if it had ended, or never was.
        """
        if self._filling is not None and self._filling[0].number == number:
            self._set_back_filling()
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
        self._set_back_filling()
        for number in [row.number for row in (*self._waiting, *self._active)]:
            self.cancel(number)
        self._flight, self._kept = None, []

    @torch.no_grad()
    def advance(self) -> list[Event]:
        """Do one step, take in prompts that there is room for, and return what came of the step before.

        Whatever this raises, no row is lost and no event: rows whose states may be half a step further go back to
        waiting and are taken in again with the tokens that they have, and the next call goes on.
        """
        events, self._kept = self._kept, []
        self.failed = 0
        try:
            self._advance(events)
        except BaseException:
            self._kept = events
            raise
        return events

    def _advance(self, events: list[Event]) -> None:
        self._take_in(events)
        ending = self._flight is not None and any(self._ends_by_count(row, pending=1) for row in self._flight.rows)
        if self._changed or ending:
            self._land(events)
        self._make_room(events)
        if not self._active:
            return
        before, self._flight = self._flight, None
        try:
            self._flight = self._launch()
        except BaseException:
            self.failed = len(self._active)
            self._read(before, events)
            self._set_back(list(self._active))
            raise
        self._read(before, events)
        if self.engine.device.type == "cpu":
            # The step is done already, so that nothing is gained by looking at it later.
            self._land(events)

    def _row(self, number: int) -> Row | None:
        """A row that has not ended."""
        filling = [] if self._filling is None else [self._filling[0]]
        return next((row for row in (*self._active, *filling, *self._waiting) if row.number == number), None)

    def _take_in(self, events: list[Event]) -> None:
        """Run prompts of waiting rows, and let those that are through join the next step."""
        if self._filling is None:
            rows = self._next_rows()
            if not rows:
                return
            if self.piece is None or len(rows[0].sequence) <= self.piece:
                # New rows join the next step, which therefore has to know what the last one chose.
                self._land(events)
                self._join(rows, self._prefilled(rows), events)
                return
            self._filling = rows[0], self.engine.begin(rows[0].sequence, rows[0].configuration)
            self._waiting.popleft()
        row, filling = self._filling
        try:
            done = self.engine.fill(filling, self.piece or len(row.sequence))
        except BaseException:
            self._set_back_filling()
            raise
        if done is not None:
            self._land(events)
            self._filling = None
            self._join([row], [done], events)

    def _next_rows(self) -> list[Row]:
        """The waiting rows whose prompts go through the model next; they still wait."""
        engine = self.engine
        room = min(engine.slots.free, self.most - len(self._active))
        budget = self.together if self.piece is None else min(self.together, self.piece)
        # Each row that is there may need another page of each layer before this one is through.
        pages, blocks = engine.pages.free - engine.pages.growth, engine.pages.whole
        rows: list[Row] = []
        self._short = False
        for row in itertools.islice(self._waiting, max(0, room)):
            tokens = len(row.sequence)
            budget -= tokens
            # With the token that comes next; a row of full length gets none.
            states = engine.blocks_of(row.configuration)
            self._short = engine.pages_of(min(tokens + 1, engine.max_length), row.configuration) > pages
            # States need neighbours: whole blocks, of which single pages break no more than those counted above.
            self._short = self._short or states > blocks
            if self._short or (rows and budget < 0):
                break
            pages -= engine.pages_of(tokens + 1 + PAGE, row.configuration)
            blocks -= states
            rows.append(row)
        return rows

    def _make_room(self, events: list[Event]) -> None:
        """Let there be a page for the next token of each row; where none is left, who joined last waits again."""
        pages, rows = self.engine.pages, self._grown()
        if pages.lacking(rows) > 0:
            # Rows that have ended give back theirs, and no token of one that is set back is lost.
            self._land(events)
            rows = self._grown()
        while pages.lacking(rows) > 0 and (self._filling is not None or len(self._active) > 1):
            self.set_back += 1
            if self._filling is not None:
                self._set_back_filling()
            else:
                self._set_back(self._active[-1:])
            rows = self._grown()
        pages.grow(rows)

    def _grown(self) -> dict[int, int]:
        """Tokens that each row has after the next step, by slot."""
        held = self.engine.slots.positions
        return {row.slot: held[row.slot] + 1 for row in self._active if row.slot is not None}

    def _prefilled(self, rows: Sequence[Row]) -> list[Prefilled]:
        """Run the prompts of rows that wait, who wait no longer unless this fails."""
        done = self.engine.prefill_rows(
            [row.sequence for row in rows], configurations=[row.configuration for row in rows]
        )
        for _ in rows:
            self._waiting.popleft()
        return done

    def _join(self, rows: Sequence[Row], done: Sequence[Prefilled], events: list[Event]) -> None:
        """Let rows take part in steps, and choose their first tokens."""
        for row, found in zip(rows, done, strict=True):
            row.slot = found.slot
        self._active += rows
        self._changed = True
        try:
            first = self._first_tokens(rows, done)
        except BaseException:
            self._set_back(rows)
            raise
        for row, (token, scores) in zip(rows, first, strict=True):
            self._take(row, token, scores, events)

    def _set_back(self, rows: Sequence[Row]) -> None:
        """Let rows under way wait again, before all others; what they have is taken in anew."""
        for row in rows:
            self._active.remove(row)
            if row.slot is not None:
                self.engine.release(row.slot)
            row.slot = None
        self._waiting.extendleft(reversed(rows))
        self._changed = True

    def _set_back_filling(self) -> None:
        """Let the row whose prompt is on its way wait again."""
        if self._filling is not None:
            row, filling = self._filling
            self._filling = None
            self.engine.release(filling.slot)
            self._waiting.appendleft(row)

    def _first_tokens(
        self, rows: Sequence[Row], done: Sequence[Prefilled]
    ) -> list[tuple[int, tuple[TokenScores, ...]]]:
        """Choose what follows the prompts, by the same rule as a step does; each with its scores."""
        device = self.engine.device
        choices = Choices(len(rows), device, self.engine.steps.choices.scores)
        _fill(choices, rows)
        positions = torch.tensor([len(row.sequence) for row in rows], device=device)
        logits = torch.stack([found.logits for found in done])
        tokens = choose(logits, positions, choices, _mode(rows))
        return _Flight(list(rows), tokens, None, _scores(rows, logits, tokens, choices)).landed()

    def _launch(self) -> _Flight:
        """Start a step for all active rows."""
        engine, rows = self.engine, list(self._active)
        if self._changed:
            slots = [row.slot for row in rows if row.slot is not None]
            engine.set_rows([row.tokens[-1] for row in rows], slots)
            _fill(engine.steps.choices, rows)
            self._mode = _mode(rows)
            self._changed = False
        longest = max(engine.slots.positions[row.slot] for row in rows if row.slot is not None) + 1
        logits = engine.steps.run(len(rows), self._mode, longest=longest)
        scores = _scores(rows, logits, engine.steps.tokens, engine.steps.choices)
        for row in rows:
            assert row.slot is not None
            engine.slots.positions[row.slot] += 1
        self.mixed_steps += engine.steps.mixed
        self._turn = 1 - self._turn
        host = self._hosts[self._turn][: len(rows)]
        host.copy_(engine.steps.tokens[: len(rows)], non_blocking=True)
        done = None
        if engine.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(engine.device))
        return _Flight(rows, host, done, scores)

    def _land(self, events: list[Event]) -> None:
        """Wait for the step under way, if any."""
        flight, self._flight = self._flight, None
        self._read(flight, events)

    def _read(self, flight: _Flight | None, events: list[Event]) -> None:
        """Hand out the tokens of a step; those of rows that ended meanwhile are dropped."""
        if flight is None:
            return
        for row, (token, scores) in zip(flight.rows, flight.landed(), strict=True):
            if row.reason is None:
                self._take(row, token, scores, events)

    def _take(self, row: Row, token: int, scores: tuple[TokenScores, ...], events: list[Event]) -> None:
        """Add a token to a row."""
        row.tokens.append(token)
        reason: Reason | None = None
        shown = ""
        if token in row.settings.eos:
            reason = "eos"
        else:
            shown = "" if row.text is None else row.text.push(token)
            if row.text is not None and row.text.stopped:
                reason = "stop"
            elif self._ends_by_count(row):
                reason = "full" if len(row.tokens) < row.settings.max_new_tokens else "length"
        event = Event(row.number, (token,), shown) if reason is None else self._end(row, reason, (token,), shown)
        events.append(event._replace(scores=scores))

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


def _scores(rows: Sequence[Row], logits: Tensor, tokens: Tensor, choices: Choices) -> _Scores | None:
    """Log-probabilities of what was chosen and of the likeliest, of the rows that want them; `None` if none does.

    As many rows are looked at together as where tokens are drawn, which takes more memory than this.
    """
    asking = {number: row.settings.logprobs for number, row in enumerate(rows) if row.settings.logprobs is not None}
    if not asking:
        return None
    numbers = torch.tensor(list(asking), device=logits.device)
    chosen, most = tokens[numbers], min(max(asking.values()), logits.shape[-1])
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for some in numbers.split(rows_together(logits.shape[-1], choices.scores)):
        found = logits[some].float().log_softmax(dim=-1)
        likeliest = found.topk(most, dim=-1)
        own = found.gather(-1, tokens[some].unsqueeze(-1)).squeeze(-1)
        parts.append((own, likeliest.values, likeliest.indices))
    own, values, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    return _Scores(list(asking), list(asking.values()), chosen, own, values, ids)


def _mode(rows: Sequence[Row]) -> Mode:
    """The least that is enough for every row."""
    needed: list[Mode] = [mode_of(row.settings.temperature, row.settings.top_k, row.settings.top_p) for row in rows]
    return max(needed, key=_MODES.index)
