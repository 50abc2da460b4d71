"""An evaluation as cells of text, for whoever draws the table."""

import math
from dataclasses import dataclass

from lapcli.evaluation.results import Difference, Evaluation, Row, Score

_LARGE = 1e6
_ARROWS = {True: "\N{UPWARDS ARROW}", False: "\N{DOWNWARDS ARROW}", None: ""}


@dataclass(frozen=True)
class Table:
    """What to draw.

    Attributes:
        columns: headings; the first two hold text, the others numbers.
        rows: cells, one a column.
        better: for each row, for each model from the second on: whether it is better than the base, `None` where
            that cannot be said.
        notes: lines to put below.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    better: tuple[tuple[bool | None, ...], ...]
    notes: tuple[str, ...]


def evaluation_table(evaluation: Evaluation) -> Table:
    """One line a task, metric and length: each model's value and standard error, then the differences."""
    labels = [model.label for model in evaluation.models]
    rows = evaluation.rows()
    columns = ["task", "metric", *labels, *(f"{label} - {labels[0]}" for label in labels[1:])]
    notes = [note for row in rows for note in row.refusals]
    about = {(row.task, note): None for row in rows for score in row.scores if score for note in score.notes}
    notes += [f"{task}: {note}" for task, note in about]
    if any(score is not None and score.estimate.stderr is not None for row in rows for score in row.scores):
        notes.insert(0, "\N{PLUS-MINUS SIGN} one standard error; differences are taken item by item")
    return Table(
        columns=tuple(columns),
        rows=tuple(_cells(row) for row in rows),
        better=tuple(tuple(found.better if found else None for found in row.differences) for row in rows),
        notes=tuple(notes),
    )


def format_value(value: float, stderr: float | None, *, signed: bool = False) -> str:
    """A number with as many digits as its standard error supports (two of the error's), and the error.

    Args:
        value: the number.
        stderr: its standard error, or `None`.
        signed: whether a positive number gets its sign.
    """
    sign = "+" if signed else ""
    if not math.isfinite(value):
        return f"{value:{sign}}"
    if abs(value) >= _LARGE:
        error = "" if stderr is None else f" \N{PLUS-MINUS SIGN} {stderr:.1e}"
        return f"{value:{sign}.3e}{error}"
    if stderr is None or not math.isfinite(stderr) or stderr <= 0:
        # Four significant digits.
        return f"{value:{sign}.{_decimals(value, 4)}f}"
    digits = _decimals(stderr, 2)
    return f"{value:{sign}.{digits}f} \N{PLUS-MINUS SIGN} {stderr:.{digits}f}"


def _decimals(value: float, significant: int) -> int:
    if value == 0:
        return significant - 1
    return max(0, significant - 1 - math.floor(math.log10(abs(value))))


def _cells(row: Row) -> tuple[str, ...]:
    task = row.task if row.length is None else f"{row.task} {row.length}"
    metric = f"{row.metric} {_ARROWS[row.higher_is_better]}".rstrip()
    return (task, metric, *map(_score_cell, row.scores), *map(_difference_cell, row.differences))


def _score_cell(score: Score | None) -> str:
    return "" if score is None else format_value(score.estimate.value, score.estimate.stderr)


def _difference_cell(difference: Difference | None) -> str:
    return "" if difference is None else format_value(difference.gap.value, difference.gap.stderr, signed=True)
