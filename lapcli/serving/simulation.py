"""A replay without a server: what front and engine do, step by step, in the time that measured costs say."""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lapcli.serving.costs import StepCosts
from lapcli.serving.policy import (
    REVIEW_SECONDS,
    Configuration,
    Load,
    OneConfiguration,
    Policy,
    RequestFacts,
    RunningFacts,
)
from lapcli.serving.replay_results import Outcome
from lapcli.serving.replay_trace import Turn

PAGE = 64
"""Tokens of a page of keys and values, as in `lapcli.runtime.pages`."""


@dataclass(eq=False)
class _Row:
    """A request: what of its text is not in yet, what is, and what it runs as.

    Attributes:
        outcome: what comes of it.
        left: tokens that have to go through the model before it can go on.
        seen: tokens that have; what it said last goes through with the next step.
        runs_as: its configuration.
        ordered: when it was told to be handed over; `None` while it is not.
    """

    outcome: Outcome
    left: int
    seen: int
    runs_as: Configuration
    ordered: float | None = None

    @property
    def last(self) -> bool:
        """Whether its next token is the last."""
        return self.outcome.tokens + 1 == self.outcome.wanted

    @property
    def tokens(self) -> int:
        """Of its prompt and of what it has said."""
        return self.outcome.prompt + self.outcome.tokens

    def token(self, now: float) -> None:
        """Say a token."""
        outcome = self.outcome
        if outcome.first is None:
            outcome.first = now
        elif now > outcome.end:
            # What comes at one time comes in one piece.
            outcome.gaps.append(now - outcome.end)
        outcome.end = now
        outcome.tokens += 1


@dataclass
class Counted:
    """What engines did, beside answers.

    Attributes:
        steps: all of them.
        mixed_steps: of rows of several configurations.
        mixed_seconds: that these took.
        split_seconds: of these, for layers that ran in parts.
        set_back: rows that lost their place for want of memory.
        switches: by their reason.
        replays: of these, those that had begun.
        switch_tokens: that they replayed.
        switch_seconds: from orders to replay until these were done.
        peak_bytes: that rows took, of the engine where most were.
        began_as: requests, by the configuration that they began as.
        tokens_as: tokens of answers, by configuration.
    """

    steps: int = 0
    mixed_steps: int = 0
    mixed_seconds: float = 0.0
    split_seconds: float = 0.0
    set_back: int = 0
    switches: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    switch_tokens: int = 0
    switch_seconds: float = 0.0
    peak_bytes: int = 0
    began_as: Counter[str] = field(default_factory=Counter)
    tokens_as: Counter[str] = field(default_factory=Counter)


class SimulatedEngine:
    """One server, which queues as its front does, and admits, takes in and steps as `lapcli.runtime.Batch` does.

    Args:
        costs: of its work.
        waiting: requests that may wait; more are refused.
        policy: asked as a front asks it.
        total_bytes: that keys and values may take; 0 for any number.
        counted: where what it does is counted.
        configurations: that it holds; default: all that costs are known of.

    Attributes:
        now: until when it is busy.
    """

    def __init__(
        self,
        costs: StepCosts,
        waiting: int,
        policy: Policy | None = None,
        total_bytes: int = 0,
        counted: Counted | None = None,
        configurations: Sequence[Configuration] = (),
    ):
        self.configurations = tuple(configurations) or costs.configurations
        self.costs, self.limit, self.total_bytes = costs, waiting, total_bytes
        self.policy = policy or OneConfiguration(self.configurations[0].name)
        self.counted = counted or Counted()
        self.now = self._front = 0.0
        self._names = {each.name: each for each in self.configurations}
        self._most = max(each.converted for each in costs.configurations) or 1
        self._queue: deque[Outcome] = deque()
        self._waiting: deque[_Row] = deque()
        self._active: list[_Row] = []
        self._filling: _Row | None = None
        self._load = 0
        self._short = False
        self._reviewed = -math.inf

    @property
    def load(self) -> int:
        """Tokens that it has still to take in or to say."""
        return self._load

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self._queue or self._waiting or self._active or self._filling)

    def arrive(self, outcome: Outcome, now: float) -> float:
        """Let a request come to the front; when that is done with it."""
        outcome.sent = now
        self._load += outcome.prompt + outcome.wanted
        front = self.costs.front
        self._front = max(self._front, now) + front.request + front.prompt_token * outcome.prompt
        return self._front

    def add(self, outcome: Outcome, now: float) -> None:
        """Let a request that arrived wait for the engine."""
        room = 0 if self._queue else max(0, self._rows() - len(self._inside()))
        if len(self._queue) >= self.limit + room:
            outcome.status, outcome.error, outcome.end = 429, "too many wait", now
            self._load -= outcome.prompt + outcome.wanted
            return
        outcome.status = 200
        if self.idle:
            self.now = max(self.now, now)
        self._queue.append(outcome)
        self._pump()

    def advance(self) -> None:
        """Do a step: prompts as there is room for them, then a token of each row under way."""
        self._pump()
        joined = self._take_in()
        self._make_room()
        # A GPU says first tokens while the step runs; a CPU does one after the other.
        said = self.now
        joined = [row for row in joined if row in self._active]
        stepping = [row for row in self._active if row not in joined or not row.last]
        if stepping:
            self.now += self._step(stepping)
            for row in stepping:
                row.seen += 1
            # Those that end have a page for their last token before they give all back.
            self._free()
        if self.costs.device == "cpu":
            self._say([*joined, *stepping], self.now)
        else:
            self._say(joined, said)
            self._say(stepping, self.now)
        self._pump()
        self._review()

    def _step(self, rows: Sequence[_Row]) -> float:
        """Seconds of a step."""
        counted, converted = self.counted, [row.runs_as.converted for row in rows]
        least, most = min(converted), max(converted)
        split = self.costs.split_seconds * (most - least)
        shares = [number / self._most for number in converted]
        seen = [row.seen for row in rows]
        if self.costs.device == "cpu":
            # There texts are filled up to the longest.
            seen = [max(seen)] * len(seen)
        by_row = zip(seen, shares, strict=True)
        seconds = split + self.costs.step(
            len(rows), sum(seen), sum(shares), sum(tokens * share for tokens, share in by_row)
        )
        counted.steps += 1
        if least != most:
            counted.mixed_steps += 1
            counted.mixed_seconds += seconds
            counted.split_seconds += split
        return seconds

    def _bytes(self, row: _Row, tokens: int) -> int:
        """Bytes of whole pages."""
        return row.runs_as.fixed_bytes + row.runs_as.token_bytes * PAGE * -(-tokens // PAGE)

    def _free(self) -> int:
        """Bytes that nobody has."""
        held = sum(self._bytes(row, row.seen) for row in self._active)
        if self._filling is not None:
            # All that it will have was taken when it began.
            held += self._bytes(self._filling, self._filling.tokens)
        self.counted.peak_bytes = max(self.counted.peak_bytes, held)
        return self.total_bytes - held

    def _take_in(self) -> list[_Row]:
        """Take in a piece of a prompt, or several short ones; the rows that are through."""
        costs = self.costs
        if self._filling is None:
            rows = self._next_rows()
            if not rows:
                return []
            for _ in rows:
                self._waiting.popleft()
            if rows[0].left <= costs.piece:
                # Prompts of one length and configuration go through together.
                kinds = Counter((row.left, row.runs_as.converted) for row in rows)
                for (left, converted), count in kinds.items():
                    self.now += costs.prompt(left * count, 0, converted / self._most)
                return self._join(rows)
            self._filling = rows[0]
        row = self._filling
        tokens = min(costs.piece, row.left)
        self.now += costs.prompt(tokens, row.seen, row.runs_as.converted / self._most)
        row.left -= tokens
        row.seen += tokens
        self._load -= tokens
        if row.left:
            return []
        self._filling = None
        return self._join([row])

    def _next_rows(self) -> list[_Row]:
        room, budget = self.costs.rows - len(self._active), self.costs.piece
        free = self._free() - sum(row.runs_as.token_bytes * PAGE for row in self._active)
        rows: list[_Row] = []
        self._short = False
        for row in itertools.islice(self._waiting, max(0, room)):
            budget -= row.left
            self._short = self.total_bytes > 0 and self._bytes(row, min(row.left + 1, self.costs.window)) > free
            if self._short or (rows and budget < 0):
                break
            free -= self._bytes(row, row.left + 1 + PAGE)
            rows.append(row)
        return rows

    def _make_room(self) -> None:
        """Let there be a page for each row's next token; who joined last waits again where there is none."""
        while self.total_bytes and (self._filling is not None or len(self._active) > 1):
            growing = sum(self._bytes(row, row.seen + 1) - self._bytes(row, row.seen) for row in self._active)
            if growing <= self._free():
                return
            self.counted.set_back += 1
            if self._filling is not None:
                row, self._filling = self._filling, None
            else:
                row = self._active.pop()
            self._again(row)

    def _again(self, row: _Row) -> None:
        """Let a row wait before all others, all of its text to go through once more."""
        self._load += row.tokens - row.left
        row.left, row.seen = row.tokens, 0
        self._waiting.appendleft(row)

    def _join(self, rows: list[_Row]) -> list[_Row]:
        for row in rows:
            self._load -= row.left
            row.seen += row.left
            row.left = 0
            if row.ordered is not None:
                self.counted.switch_seconds += self.now - row.ordered
                row.ordered = None
        self._active += rows
        return rows

    def _say(self, rows: Sequence[_Row], now: float) -> None:
        """Say a token of each row, two of one that is there twice, and let the front tell the clients."""
        front, begun = self.costs.front, max(self._front, now)
        places: dict[_Row, int] = {}
        for row in rows:
            self._load -= 1
            if row.last:
                self._active.remove(row)
            # What comes at one time comes in one piece.
            place = places.setdefault(row, len(places))
            row.token(begun + front.message + front.token * place)
            self.counted.tokens_as[row.runs_as.name] += 1
        if rows:
            self._front = begun + front.token * len(places)

    def _inside(self) -> list[_Row]:
        filling = [] if self._filling is None else [self._filling]
        return [*self._active, *filling, *self._waiting]

    def _rows(self) -> int:
        """Rows that may be under way together, as the engine says."""
        under_way = len(self._active) + (self._filling is not None)
        return max(1, min(self.costs.rows, under_way)) if self._short else self.costs.rows

    def _facts(self) -> Load:
        """What the front would tell a policy."""
        inside = self._inside()
        free = 0
        if self.total_bytes:
            expected = sum(row.runs_as.row_bytes(row.tokens) for row in inside)
            free = min(self._free(), self.total_bytes - expected)
        rows = max(1, len(self._active))
        shares = sum(row.runs_as.converted for row in self._active) / self._most
        return Load(
            len(inside),
            len(self._queue),
            self._rows(),
            self.total_bytes,
            free,
            self.costs.prompt(self.costs.piece, 0) / self.costs.piece,
            self.costs.step(rows, sum(row.seen for row in self._active), shares),
            self.configurations,
        )

    def _pump(self) -> None:
        """Send what there is room for, and a little more, as a front does."""
        rows = self._rows()
        while self._queue and len(self._inside()) < rows + max(1, rows // 8):
            load = self._facts()
            if load.active and load.total_bytes and load.free_bytes <= 0:
                return
            outcome = self._queue.popleft()
            facts = RequestFacts(outcome.prompt, outcome.wanted)
            decision = self.policy.choose(facts, load._replace(waiting=len(self._queue)))
            self.counted.began_as[decision.configuration] += 1
            self._waiting.append(_Row(outcome, outcome.prompt, 0, self._names[decision.configuration]))

    def _review(self) -> None:
        """Let the policy look at what runs, as often as a front does."""
        if len(self._names) < 2 or self.now - self._reviewed < REVIEW_SECONDS:
            return
        self._reviewed = self.now
        rows = {str(row.outcome.number): row for row in self._inside()}
        running = [
            RunningFacts(
                name,
                row.runs_as.name,
                row.tokens,
                row.outcome.wanted - row.outcome.tokens,
                row in self._waiting and row.ordered is None,
                row is self._filling or row.ordered is not None,
            )
            for name, row in rows.items()
        ]
        for switch in self.policy.review(running, self._facts()):
            row = rows[switch.name]
            self.counted.switches[switch.reason] += 1
            row.runs_as = self._names[switch.configuration]
            if row in self._active:
                self._active.remove(row)
                self.counted.replays += 1
                self.counted.switch_tokens += row.tokens
                row.ordered = self.now
                self._again(row)


def simulate(
    turns: Sequence[Turn],
    costs: StepCosts,
    *,
    replicas: int = 1,
    waiting: int = 1024,
    policy: Policy | None = None,
    total_bytes: int = 0,
    counted: Counted | None = None,
    configurations: Sequence[Configuration] = (),
) -> list[Outcome]:
    """Replay requests on engines that are only thought of.

    Each request goes to the engine that has the fewest tokens to do when it comes.

    Args:
        turns: in the order of time.
        costs: of each engine's work.
        replicas: engines.
        waiting: requests that may wait at each.
        policy: of each; default: the costs' first configuration for all requests.
        total_bytes: that keys and values of each may take; 0 for any number.
        counted: where what they do beside answering is counted.
        configurations: that each holds; default: all that costs are known of.
    """
    counted = counted or Counted()
    engines = [SimulatedEngine(costs, waiting, policy, total_bytes, counted, configurations) for _ in range(replicas)]
    busy: list[tuple[float, int]] = []
    coming: list[tuple[float, int, int]] = []
    outcomes: list[Outcome] = []

    def work(until: float) -> None:
        """Let fronts hand on what they are done with before then, and engines do the steps that they would begin."""
        while min(coming[0][0] if coming else math.inf, busy[0][0] if busy else math.inf) < until:
            if coming and (not busy or coming[0][0] <= busy[0][0]):
                now, request, number = heapq.heappop(coming)
                was_idle = engines[number].idle
                engines[number].add(outcomes[request], now)
                if was_idle and not engines[number].idle:
                    heapq.heappush(busy, (engines[number].now, number))
                continue
            _, number = heapq.heappop(busy)
            engines[number].advance()
            if not engines[number].idle:
                heapq.heappush(busy, (engines[number].now, number))

    for number, turn in enumerate(turns):
        work(turn.seconds)
        outcome = Outcome(number, turn.seconds, turn.prompt, turn.answer)
        outcomes.append(outcome)
        chosen = min(range(replicas), key=lambda each: engines[each].load)
        heapq.heappush(coming, (engines[chosen].arrive(outcome, turn.seconds), number, chosen))
    work(float("inf"))
    return outcomes


def counted_figures(counted: Counted, configurations: Sequence[Configuration], total_bytes: int) -> dict[str, Any]:
    """What was counted, in the words of a served replay's results."""
    from lapcli.serving.replay_results import adapting_figures

    return adapting_figures(
        configurations,
        tokens_as=counted.tokens_as,
        began_as=counted.began_as,
        switches=counted.switches,
        replays=counted.replays,
        switch_tokens=counted.switch_tokens,
        switch_seconds=counted.switch_seconds,
        steps=counted.steps,
        mixed_steps=counted.mixed_steps,
        mixed_seconds=counted.mixed_seconds,
        split_seconds=counted.split_seconds,
        set_back=counted.set_back,
        peak_bytes=counted.peak_bytes,
        total_bytes=total_bytes,
    )
