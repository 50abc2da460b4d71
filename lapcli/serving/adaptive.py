"""The policy that converts by the length of prompts, more where memory is short, and back where it is not.

Source: arXiv 2506.09316, Sec. 4.3 and table 4, which leave open when a running request is switched and what by.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lapcli.errors import UsageError
from lapcli.serving.policy import Configuration, Decision, Load, RequestFacts, RunningFacts, Switch

BY_LENGTH, BY_PRESSURE, BY_QUALITY, RELIEVED = "prompt length", "memory is short", "quality limit", "memory is free"


class Cap(NamedTuple):
    """How much of the layers is converted for prompts of a length.

    Attributes:
        tokens: from which on.
        share: of the layers, 0 to 1.
    """

    tokens: int
    share: float


PAPER_CAPS = (Cap(0, 0.125), Cap(2048, 0.25), Cap(4096, 0.375), Cap(8192, 0.5))
"""Of arXiv 2506.09316, table 4."""


class Adaptive:
    """Converts the share of layers that a prompt's length asks for, and more while memory is short.

    Pressure is 0 while rows take less than `high` of the memory, and 1 when they take all of it. As it grows, first the
    longest class of requests is converted further, up to all that the quality limit allows, then the next: class k of K
    begins at pressure 1 - (k+1)/K. A running request is handed over by replaying its tokens, to what the pressure asks
    for that there will be as it ends if those that run go on and nobody else comes, so that it is handed over once; and
    only where that pays:
    memory that rows are short of is worth what the whole engine does in the time, so that freeing a share s of it
    for t seconds gains s t seconds, and the replay must take fewer. Back it goes once nobody waits and memory stays
    under `low` with it; that frees nothing, so the replay may take `patience` of what the rest of its answer takes.

    Args:
        caps: by length, ascending, the first from 0 on.
        most_increase: of perplexity over the unconverted model, as a share; what exceeds it is never used.
        refused: configurations that there would be without that limit, where an engine does not hold them.
        high: share of memory from which on it is short.
        low: share of memory under which it is free again.
        patience: see above.

    Raises:
        UsageError: caps or marks are not ascending, or no shares.
    """

    def __init__(
        self,
        caps: Sequence[Cap] = PAPER_CAPS,
        most_increase: float = math.inf,
        refused: Sequence[Configuration] = (),
        *,
        high: float = 0.85,
        low: float = 0.6,
        patience: float = 0.1,
    ):
        self.caps, self.most_increase, self.refused = tuple(caps), most_increase, tuple(refused)
        self.high, self.low, self.patience = high, low, patience
        lengths = [cap.tokens for cap in self.caps]
        if not lengths or lengths[0] != 0 or lengths != sorted(set(lengths)):
            raise UsageError(f"caps from {lengths} tokens on: ascending, the first from 0", "as 0:12.5%,2048:25%")
        if not all(0 <= cap.share <= 1 for cap in self.caps):
            raise UsageError("a cap is a share of the layers: 0 to 1, or 0% to 100%", "as 0:12.5%,2048:25%")
        if not 0 < low <= high < 1:
            raise UsageError(f"memory is free under {low} of it and short from {high} on: 0 < free <= short < 1")

    def choose(self, request: RequestFacts, load: Load) -> Decision:
        """By its prompt's length, and by what memory there is with it."""
        calm, why = self._at(request.prompt_tokens, 0.0, load)
        taken = calm.row_bytes(request.prompt_tokens)
        pressure = self.pressure(load, taken)
        pressed, _ = self._at(request.prompt_tokens, pressure, load)
        # What it will take in the middle of its answer: states of a short row may be larger than its keys and values.
        tokens = request.prompt_tokens + request.max_tokens // 2
        if pressed.converted > calm.converted and pressed.row_bytes(tokens) < calm.row_bytes(tokens):
            return Decision(pressed.name, BY_PRESSURE)
        return Decision(calm.name, why)

    def review(self, running: Sequence[RunningFacts], load: Load) -> list[Switch]:
        """Those whose replay pays: under pressure the longest first, after it the shortest. One replay at a time."""
        if not load.total_bytes:
            return []
        replaying = any(row.switching and not row.waits for row in running)
        rows = sorted((row for row in running if not row.switching), key=lambda row: row.tokens)
        if self.pressure(load) > 0:
            return self._raise(rows[::-1], load, replaying)
        return [] if load.waiting else self._lower(rows, load, replaying)

    def pressure(self, load: Load, more: int = 0) -> float:
        """How short memory is, 0 to 1, with so many bytes more."""
        if not load.total_bytes:
            return 0.0
        used = load.used + more / load.total_bytes
        return min(1.0, max(0.0, (used - self.high) / (1 - self.high)))

    def share(self, tokens: int, pressure: float) -> float:
        """Of the layers, whatever their quality, that are converted of a row of so many tokens."""
        place = max(place for place, cap in enumerate(self.caps) if cap.tokens <= tokens)
        behind = len(self.caps) - 1 - place
        raised = min(1.0, max(0.0, len(self.caps) * pressure - behind))
        return self.caps[place].share + (1 - self.caps[place].share) * raised

    def within(self, configurations: Sequence[Configuration]) -> list[Configuration]:
        """Those that the quality limit allows, by how much they convert; the unconverted model always."""
        allowed = [each for each in configurations if each.converted == 0 or each.increase <= self.most_increase]
        return sorted(allowed, key=lambda each: each.converted)

    def _at(self, tokens: int, pressure: float, load: Load) -> tuple[Configuration, str]:
        """What a row of so many tokens is to be."""
        share = self.share(tokens, pressure)
        allowed = self.within(load.configurations)
        assert allowed, "an engine without an allowed configuration is refused before it begins"
        found = most_within(allowed, share)
        cut = found.converted < most_within([*load.configurations, *self.refused], share).converted
        return found, BY_QUALITY if cut else BY_LENGTH

    @staticmethod
    def _growth(rows: Sequence[RunningFacts], runs_as: Mapping[str, Configuration], tokens: int) -> int:
        """Bytes that rows take more once each has so many more tokens, or all that it may have."""
        return sum(runs_as[row.name].token_bytes * min(row.left, tokens) for row in rows)

    def _raise(self, rows: Sequence[RunningFacts], load: Load, replaying: bool) -> list[Switch]:
        """Convert more of rows, given by falling length, until memory is not short."""
        runs_as = _running_as(rows, load)
        switches: list[Switch] = []
        for row in rows:
            if self.pressure(load) == 0:
                break
            # What is done by the little there is too much now would soon be done again.
            pressure = self.pressure(load, self._growth(rows, runs_as, row.left))
            is_now, (wanted, _) = runs_as[row.name], self._at(row.tokens, pressure, load)
            frees = is_now.row_bytes(row.tokens) - wanted.row_bytes(row.tokens)
            cost = 0.0 if row.waits else row.tokens * load.prefill_seconds
            gain = frees / load.total_bytes * row.left * load.step_seconds
            pays = row.waits or (gain > cost and not replaying)
            if wanted.converted > is_now.converted and frees > 0 and pays:
                switches.append(Switch(row.name, wanted.name, BY_PRESSURE, cost, frees))
                runs_as[row.name] = wanted
                load = load._replace(free_bytes=load.free_bytes + frees)
                replaying = replaying or not row.waits
        return switches

    def _lower(self, rows: Sequence[RunningFacts], load: Load, replaying: bool) -> list[Switch]:
        """Convert less of rows, given by rising length, as far as memory stays free."""
        runs_as = _running_as(rows, load)
        switches: list[Switch] = []
        for row in rows:
            is_now, (wanted, _) = runs_as[row.name], self._at(row.tokens, 0.0, load)
            # With what it is to become by its end, lest it goes to and fro.
            more = wanted.row_bytes(row.tokens + row.left) - is_now.row_bytes(row.tokens)
            cost = 0.0 if row.waits else row.tokens * load.prefill_seconds
            pays = row.waits or (cost <= self.patience * row.left * load.step_seconds and not replaying)
            if wanted.converted >= is_now.converted or load.used + more / load.total_bytes > self.low or not pays:
                continue
            becomes = {**runs_as, row.name: wanted}
            frees = is_now.row_bytes(row.tokens) - wanted.row_bytes(row.tokens)
            if self.pressure(load, self._growth(rows, becomes, row.left) - frees) == 0:
                switches.append(Switch(row.name, wanted.name, RELIEVED, cost, frees))
                runs_as = becomes
                load = load._replace(free_bytes=load.free_bytes - more)
                replaying = replaying or not row.waits
        return switches


def _running_as(rows: Sequence[RunningFacts], load: Load) -> dict[str, Configuration]:
    """What rows run as, by their names."""
    by_name = {each.name: each for each in load.configurations}
    return {row.name: by_name[row.configuration] for row in rows}


def most_within(configurations: Sequence[Configuration], share: float) -> Configuration:
    """The one that converts most without exceeding a share; the least of all where every one does."""
    # Shares are typed as decimals; what is meant to be a layer must not be lost to rounding.
    fitting = [each for each in configurations if each.converted <= share * each.layers + 1e-9]
    if not fitting:
        return min(configurations, key=lambda each: each.converted)
    return max(fitting, key=lambda each: each.converted)
