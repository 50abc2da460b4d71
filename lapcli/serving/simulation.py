"""A replay without a server: what an engine does, step by step, in the time that measured costs say."""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lapcli.serving.costs import StepCosts
from lapcli.serving.replay_results import Outcome
from lapcli.serving.replay_trace import Turn


@dataclass(eq=False)
class _Row:
    """A request in an engine: what of its prompt is not in yet, and what it has said."""

    outcome: Outcome
    left: int
    seen: int = 0

    @property
    def last(self) -> bool:
        """Whether its next token is the last."""
        return self.outcome.tokens + 1 == self.outcome.wanted

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
        self.seen += 1


class SimulatedEngine:
    """One engine, which admits, takes in and steps as `lapcli.runtime.Batch` does.

    Args:
        costs: of its work.
        waiting: requests that may wait; more are refused.

    Attributes:
        now: until when it is busy.
        steps: it did.
    """

    def __init__(self, costs: StepCosts, waiting: int):
        self.costs, self.limit = costs, waiting
        self.now, self.steps = 0.0, 0
        self._waiting: deque[_Row] = deque()
        self._active: list[_Row] = []
        self._filling: _Row | None = None
        self._load = 0

    @property
    def load(self) -> int:
        """Tokens that it has still to take in or to say."""
        return self._load

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self._waiting or self._active or self._filling)

    def add(self, outcome: Outcome, now: float) -> None:
        """Let a request come."""
        held = len(self._active) + (self._filling is not None)
        if len(self._waiting) >= self.limit + max(0, self.costs.rows - held):
            outcome.status, outcome.error, outcome.end = 429, "too many wait", now
            return
        outcome.status, outcome.sent = 200, now
        if self.idle:
            self.now = max(self.now, now)
        self._waiting.append(_Row(outcome, outcome.prompt))
        self._load += outcome.prompt + outcome.wanted

    def advance(self) -> None:
        """Do a step: prompts as there is room for them, then a token of each row under way."""
        joined = self._take_in()
        # A GPU says first tokens while the step runs; a CPU does one after the other.
        said = self.now
        stepping = [row for row in self._active if row not in joined or not row.last]
        if stepping:
            self.now += self.costs.step(len(stepping), sum(row.seen for row in stepping))
            self.steps += 1
        if self.costs.device == "cpu":
            said = self.now
        for row in joined:
            self._say(row, said)
        for row in stepping:
            self._say(row, self.now)

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
                # Prompts of one length go through together.
                for _, group in itertools.groupby(sorted(rows, key=lambda row: row.left), key=lambda row: row.left):
                    self.now += costs.prompt(sum(row.left for row in group), 0)
                return self._join(rows)
            self._filling = rows[0]
        row = self._filling
        tokens = min(costs.piece, row.left)
        self.now += costs.prompt(tokens, row.seen)
        row.left -= tokens
        row.seen += tokens
        self._load -= tokens
        if row.left:
            return []
        self._filling = None
        return self._join([row])

    def _next_rows(self) -> list[_Row]:
        room, budget = self.costs.rows - len(self._active), self.costs.piece
        rows: list[_Row] = []
        for row in itertools.islice(self._waiting, max(0, room)):
            budget -= row.left
            if rows and budget < 0:
                break
            rows.append(row)
        return rows

    def _join(self, rows: list[_Row]) -> list[_Row]:
        for row in rows:
            self._load -= row.left
            row.seen += row.left
            row.left = 0
        self._active += rows
        return rows

    def _say(self, row: _Row, now: float) -> None:
        self._load -= 1
        if row.last:
            self._active.remove(row)
        row.token(now)


def simulate(turns: Sequence[Turn], costs: StepCosts, *, replicas: int = 1, waiting: int = 1024) -> list[Outcome]:
    """Replay requests on engines that are only thought of.

    Each request goes to the engine that has the fewest tokens to do when it comes.

    Args:
        turns: in the order of time.
        costs: of each engine's work.
        replicas: engines.
        waiting: requests that may wait at each.
    """
    engines = [SimulatedEngine(costs, waiting) for _ in range(replicas)]
    busy: list[tuple[float, int]] = []
    outcomes: list[Outcome] = []

    def work(until: float) -> None:
        """Let all engines work that would begin a step before then."""
        while busy and busy[0][0] < until:
            _, number = heapq.heappop(busy)
            engines[number].advance()
            if not engines[number].idle:
                heapq.heappush(busy, (engines[number].now, number))

    for number, turn in enumerate(turns):
        work(turn.seconds)
        outcome = Outcome(number, turn.seconds, turn.prompt, turn.answer)
        outcomes.append(outcome)
        chosen = min(range(replicas), key=lambda each: engines[each].load)
        was_idle = engines[chosen].idle
        engines[chosen].add(outcome, turn.seconds)
        if was_idle and not engines[chosen].idle:
            heapq.heappush(busy, (engines[chosen].now, chosen))
    work(float("inf"))
    return outcomes
