"""Who takes how much of an engine's memory, and how many requests that leaves room for: arithmetic on bytes alone.

What lies beside weights and requests was measured on the device (`lapcli.serving.trials`), or is estimated by shapes
(`lapcli.serving.estimates`); both are `Needs`, and what follows from them is the same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lapcli.errors import ModelError
from lapcli.serving.settings import DEFAULT_CPU_ROWS, MOST_ROWS

SMALLEST_PIECE = 64
"""Prompt tokens between two steps, where memory is short: fewer would hardly take less, and much longer."""
_PASS_SHARE = 4
"""Of what weights leave, the part that a pass may take, of a piece that nobody asked for."""
_DRAWING_SHARE = 16
"""Of what weights leave, the part that drawing tokens may take at a time."""
_USUAL = 8
"""Of a request's longest length, the part that a request is taken to have when slots are counted."""


class Needs(NamedTuple):
    """What an engine takes beside its weights and what requests keep.

    What it takes for a while is a pass of a prompt's piece or a step, not both at a time; a prompt that goes through in
    pieces lies beside both until it is in its pages, and graphs are there all the time.

    Attributes:
        kept: bytes of graphs that were measured, and of libraries' workspaces.
        pass_fixed: bytes of a pass, for a while.
        pass_token: more for each token of it.
        pass_states: the same where some of its layers are states that may be attention, if that is more.
        step_fixed: bytes of a step, for a while.
        step_row: more for each row that there is room for, in it or not.
        score: bytes for each score that is looked at when tokens are drawn.
        vocabulary: scores of a row.
        pass_copies: how often a pass's bytes are there: twice where a graph keeps them, and others are not captured.
        step_copies: likewise of a step.
        measured: whether it was; else estimated.
    """

    kept: int = 0
    pass_fixed: int = 0
    pass_token: int = 0
    pass_states: int = 0
    step_fixed: int = 0
    step_row: int = 0
    score: int = 0
    vocabulary: int = 0
    pass_copies: int = 1
    step_copies: int = 1
    measured: bool = False

    def for_pass(self, piece: int, *, states: bool = True) -> int:
        """Bytes of a pass of so many tokens, for a while, in a model of which some layers may be states, or none."""
        return self.pass_fixed + piece * (max(self.pass_token, self.pass_states) if states else self.pass_token)

    def for_step(self, rows: int, scores: int) -> int:
        """Bytes of a step of so many rows, for a while, where so many scores are looked at together."""
        together = min(rows, max(1, scores // self.vocabulary)) if self.vocabulary else 0
        return self.step_fixed + rows * self.step_row + together * self.vocabulary * self.score


class RowBytes(NamedTuple):
    """What requests keep.

    Attributes:
        slot: bytes of a row whatever its length, which there are for each slot.
        usual: of a row of the usual length, in the configuration where they are fewest.
        longest: of a row of the longest length, where they are most.
    """

    slot: int
    usual: int
    longest: int


class Beside(NamedTuple):
    """What there is beside weights and requests, in bytes.

    Attributes:
        kept: of graphs and libraries.
        prompt: of a prompt of full length on its way.
        passing: of a pass or a step, for a while.
    """

    kept: int
    prompt: int
    passing: int


class Room(NamedTuple):
    """What memory is divided into.

    Attributes:
        rows: requests together.
        row_bytes: that pages may take; `None` for as much as all rows at full length take.
        piece: prompt tokens between two steps, at most.
        scores: that are looked at together where tokens are drawn; `None` for the usual number.
        beside: what else there is; nothing where memory has no limit.
    """

    rows: int
    row_bytes: int | None
    piece: int
    scores: int | None = None
    beside: Beside = Beside(0, 0, 0)


class Limits(NamedTuple):
    """What is given to be divided.

    Attributes:
        memory: bytes; `None` for no limit.
        weights: bytes of them.
        max_rows: rows that are wanted; `None` for as many as there is room for, and 256 at most.
        piece: tokens of a prompt between two steps, at most.
        easy: whether nobody asked for that piece, so that it may be shorter to leave more for requests.
        most: rows, where nobody says how many are wanted.
    """

    memory: int | None
    weights: int
    max_rows: int | None
    piece: int
    easy: bool = True
    most: int = MOST_ROWS


def usual_length(longest: int) -> int:
    """Tokens that a request is taken to have when rows are counted, by the most that one may have."""
    return longest // _USUAL


def beside(
    needs: Needs, longest: int, rows: int, piece: int, *, scores: int | None = None, states: bool = True
) -> Beside:
    """What there is beside weights and requests.

    Args:
        needs: of the engine.
        longest: bytes of a row of full length.
        rows: that there is room for.
        piece: tokens of a pass.
        scores: that are looked at together; `None` for the usual number.
        states: whether some layers are states that may be attention.
    """
    from lapcli.runtime.sampling import SCORES

    step = needs.for_step(rows, SCORES if scores is None else scores)
    passing = needs.for_pass(piece, states=states)
    kept = needs.kept + (needs.pass_copies - 1) * passing + (needs.step_copies - 1) * step
    return Beside(kept, longest, max(passing, step))


def scores_together(left: int, needs: Needs) -> int | None:
    """How many scores are looked at together where tokens are drawn; `None` for the usual number.

    Args:
        left: bytes that weights leave.
        needs: of the engine; where they were measured, that was done with a number.
    """
    from lapcli.runtime.sampling import SCORES

    if not needs.vocabulary * needs.score or left // _DRAWING_SHARE >= SCORES * needs.score:
        return None
    # A power of two; of one row all are looked at in any case.
    return 1 << max(needs.vocabulary, left // _DRAWING_SHARE // needs.score).bit_length() - 1


def rows_that_fit(limits: Limits, row: RowBytes, needs: Needs, *, states: bool = True, shorten: bool = True) -> Room:
    """How many rows there is memory for, how much of it their pages get, and how long a prompt's piece may be.

    There are as many slots as there would be rows if each had the usual length; pages get all the rest, and one row of
    full length has room in any case. Where memory is too short for that, pieces are halved.

    Args:
        limits: what is divided.
        row: what requests keep.
        needs: what lies beside.
        states: whether some layers are states that may be attention.
        shorten: whether pieces may be halved where memory is too short for whole ones.

    Raises:
        ModelError: there is no room for one, or not for as many as are wanted.
    """
    memory, weights = limits.memory, limits.weights
    if memory is None:
        return Room(limits.max_rows or DEFAULT_CPU_ROWS, None, limits.piece)
    division = _Division(memory, weights, row, needs, states)
    piece = limits.piece
    while limits.easy and piece > SMALLEST_PIECE and division.passing(piece) * _PASS_SHARE > memory - weights:
        piece = max(SMALLEST_PIECE, piece // 2)
    wanted, most = limits.max_rows or 1, limits.max_rows or limits.most
    while not division.holds(wanted, piece):
        if piece <= SMALLEST_PIECE or not shorten:
            raise _refused(limits, division, wanted, piece)
        piece = max(SMALLEST_PIECE, piece // 2)
    rows = division.most_rows(wanted, most, piece)
    return Room(
        rows, division.left(rows, piece) - rows * row.slot, piece, division.scores, division.beside(rows, piece)
    )


class _Division:
    """Memory with something in it."""

    def __init__(self, memory: int, weights: int, row: RowBytes, needs: Needs, states: bool):
        self.memory, self.weights, self.row, self.needs, self.states = memory, weights, row, needs, states
        self.scores = scores_together(memory - weights, needs)

    def passing(self, piece: int) -> int:
        return self.needs.for_pass(piece, states=self.states)

    def beside(self, rows: int, piece: int) -> Beside:
        return beside(self.needs, self.row.longest, rows, piece, scores=self.scores, states=self.states)

    def left(self, rows: int, piece: int) -> int:
        """What requests may take, rows of which there is room for."""
        return self.memory - self.weights - sum(self.beside(rows, piece))

    def least(self, rows: int) -> int:
        """What so many take at least: one of full length, and a slot of each other."""
        return self.row.longest + (rows - 1) * self.row.slot

    def holds(self, rows: int, piece: int) -> bool:
        return self.least(rows) <= self.left(rows, piece)

    def most_rows(self, wanted: int, most: int, piece: int) -> int:
        """As many as are held at the usual length, from those that are wanted to the most."""
        low, high = wanted, most
        while low < high:
            middle = (low + high + 1) // 2
            if max(self.least(middle), middle * self.row.usual) <= self.left(middle, piece):
                low = middle
            else:
                high = middle - 1
        return low


def _refused(limits: Limits, division: _Division, wanted: int, piece: int) -> ModelError:
    """Who takes how much, and what would do."""
    row, needs, (kept, prompt, passing) = division.row, division.needs, division.beside(wanted, piece)
    left = max(0, division.left(wanted, piece))
    each = f", and each of {wanted - 1} others {row.slot} at least, together {division.least(wanted)}"
    how = "as measured" if needs.measured else "as estimated"
    enough = _enough(limits, division, wanted, piece)
    fewer = f"--max-rows to {_most_held(division, wanted, piece)} or " if division.holds(1, piece) else ""
    return ModelError(
        f"{division.memory} bytes hold {division.weights} of weights; {how}, graphs and libraries keep {kept}, a "
        f"prompt of full length on its way takes {prompt}, and a pass of {piece} tokens or a step {passing}; that "
        f"leaves {left} for requests; the longest takes {row.longest}{each if wanted > 1 and row.slot else ''}",
        f"raise --memory to {enough}B at least, or lower {fewer}--max-length"
        + (" (lapcli serve: or --state-dtype)" if row.slot else ""),
    )


def _most_held(division: _Division, wanted: int, piece: int) -> int:
    """The most rows that are held, of fewer than are wanted; one is."""
    low, high = 1, wanted - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if division.holds(middle, piece) else (low, middle - 1)
    return low


def _enough(limits: Limits, division: _Division, wanted: int, piece: int) -> int:
    """The least memory that holds what is wanted: more memory may draw more at a time, which takes more."""
    memory = division.memory
    while True:
        tried = _Division(memory, limits.weights, division.row, division.needs, division.states)
        need = limits.weights + sum(tried.beside(wanted, piece)) + tried.least(wanted)
        if need <= memory:
            return memory
        memory = need


def said_of(room: Room, needs: Needs) -> Mapping[str, Any]:
    """What lies beside weights and requests, for whoever asks what a server would do."""
    kept, prompt, passing = room.beside
    named = {"graphs and libraries": kept, "a prompt on its way": prompt, "a pass or a step": passing}
    return {**named, "these are": "measured" if needs.measured else "estimated"}
