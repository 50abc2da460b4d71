"""One number of several cells that differ in nothing but their seed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Any

from lapcli.evaluation.table import format_value
from lapcli.reports.collect import Entry
from lapcli.sweeps.headline import Column, interval_of, value_of

_Z95 = 1.959963984540054
"""Standard deviations of a normal variable that 95 % lie within."""


@dataclass(frozen=True)
class Pooled:
    """A mean over seeds.

    Attributes:
        value: the mean.
        stderr: its standard error; `None` where one of the scores has none.
        interval: 95 %, of shares; `None` where one of the scores has none.
    """

    value: float
    stderr: float | None
    interval: tuple[float, float] | None = None

    def text(self) -> str:
        """For a table."""
        return format_value(self.value, self.stderr)


def pool(scores: Sequence[tuple[float, float | None]]) -> Pooled:
    """The mean of scores (at least one), each with its standard error.

    All seeds are measured on the same items, so that what a measurement owes to them does not average out: its mean
    square stays, and the variance of the seeds' scores over their number is added to it.
    """
    values = [value for value, _error in scores]
    errors = [error for _value, error in scores if error is not None]
    error = None
    if len(errors) == len(scores):
        error = math.sqrt(fmean(each * each for each in errors) + _spread(values))
    return Pooled(fmean(values), error)


def pool_intervals(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The 95 % interval of a mean of shares (at least one): on each side made of theirs as `pool` does errors.

    Of one share it is its own; it never leaves 0 to 1.
    """
    if len(values) == 1:
        return intervals[0]
    centre, spread = fmean(values), _Z95**2 * _spread(values)
    pairs = list(zip(values, intervals, strict=True))
    below = math.sqrt(fmean((value - low) ** 2 for value, (low, _high) in pairs) + spread)
    above = math.sqrt(fmean((high - value) ** 2 for value, (_low, high) in pairs) + spread)
    return max(0.0, centre - below), min(1.0, centre + above)


def _spread(values: Sequence[float]) -> float:
    """What the seeds add to the variance of their mean."""
    return variance(values) / len(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def pooled(entries: Iterable[Entry], label: str, column: Column) -> Pooled | None:
    """A score of a model of several entries; `None` where none has it."""
    rows = [entry.rows for entry in entries]
    found = [(value_of(each, label, column), interval_of(each, label, column)) for each in rows]
    scores = [score for score, _interval in found if score is not None]
    intervals = [interval for score, interval in found if score is not None and interval is not None]
    if not scores:
        return None
    mean = pool(scores)
    if len(intervals) < len(scores):
        return mean
    return replace(mean, interval=pool_intervals([value for value, _error in scores], intervals))


def grouped(entries: Iterable[Entry], *axes: str) -> dict[tuple[Any, ...], list[Entry]]:
    """Entries by their places on some axes, in order; `budget` is the ratio or the kept width."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(tuple(place(entry, axis) for axis in axes), []).append(entry)
    return groups


def place(entry: Entry, axis: str) -> Any:
    """Where an entry lies on an axis."""
    if axis == "budget":
        ratio, keep = entry.axes.get("ratio"), entry.axes.get("keep")
        return f"{ratio}" if ratio is not None else "" if keep is None else f"K' = {keep}"
    if axis == "score_from":
        return entry.axes.get(axis, "both")
    return entry.axes.get(axis)
