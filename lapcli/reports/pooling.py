"""One number of several cells that differ in nothing but their seed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from lapcli.evaluation.table import format_value
from lapcli.reports.collect import Entry
from lapcli.sweeps.headline import Column, value_of


@dataclass(frozen=True)
class Pooled:
    """A mean over seeds.

    Attributes:
        value: the mean.
        stderr: its standard error; `None` where one of the scores has none.
    """

    value: float
    stderr: float | None

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
        spread = variance(values) / len(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0
        error = math.sqrt(fmean(each * each for each in errors) + spread)
    return Pooled(fmean(values), error)


def pooled(entries: Iterable[Entry], label: str, column: Column) -> Pooled | None:
    """A score of a model of several entries; `None` where none has it."""
    found = [value_of(entry.rows, label, column) for entry in entries]
    there = [each for each in found if each is not None]
    return pool(there) if there else None


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
