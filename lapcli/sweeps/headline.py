"""The scores by which cells are shown side by side: of each task one metric, at each length."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lapcli.evaluation.table import format_value
from lapcli.sweeps.record import SweepRecord

_PREFERRED = ("token_perplexity", "word_perplexity", "perplexity", "exact_match", "acc_norm", "acc")


@dataclass(frozen=True)
class Column:
    """One score.

    Attributes:
        task: as in `Score`.
        metric: as in `Score`.
        length: as in `Score`.
        higher_is_better: the direction; `None` where nobody says.
    """

    task: str
    metric: str
    length: int | None
    higher_is_better: bool | None

    @property
    def title(self) -> str:
        """As a table's heading has it."""
        name = self.task.split(":", 1)[0] if self.task.startswith("text:") else self.task
        return name if self.length is None else f"{name} {self.length}"

    def of(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of `evaluation.json` is this score's."""
        return (row["task"], row["metric"], row["length"]) == (self.task, self.metric, self.length)


def columns_of(record: SweepRecord) -> list[Column]:
    """The headline scores of all that was measured."""
    rows = [row for entry in (record.base, *record.cells.values()) for row in entry.get("rows", ())]
    return headline(rows)


def headline(rows: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Of each task the metric that is preferred, else the one that comes first; tasks in the order of the rows."""
    found: dict[str, dict[tuple[str, int | None], bool | None]] = {}
    for row in rows:
        found.setdefault(row["task"], {}).setdefault((row["metric"], row["length"]), row["higher_is_better"])
    columns: list[Column] = []
    for task, measures in found.items():
        metrics = list(dict.fromkeys(metric for metric, _length in measures))
        chosen = next((metric for metric in _PREFERRED if metric in metrics), metrics[0])
        lengths = sorted((length for metric, length in measures if metric == chosen), key=lambda length: length or 0)
        columns += [Column(task, chosen, length, measures[chosen, length]) for length in lengths]
    return columns


def value_of(rows: Iterable[Mapping[str, Any]], label: str, column: Column) -> tuple[float, float | None] | None:
    """Value and standard error of a score; `None` where it was not measured."""
    for row in rows:
        found = row["values"].get(label) if column.of(row) else None
        if found is not None:
            return float(found["value"]), found["stderr"]
    return None


def interval_of(rows: Iterable[Mapping[str, Any]], label: str, column: Column) -> tuple[float, float] | None:
    """The 95 % interval of a share that was measured; `None` where there is none."""
    for row in rows:
        found = row["values"].get(label) if column.of(row) else None
        if found is not None and found.get("interval") is not None:
            low, high = found["interval"]
            return low, high
    return None


def score_cells(entry: Mapping[str, Any], label: str, columns: Iterable[Column]) -> list[str]:
    """A table's cells."""
    found = [value_of(entry.get("rows", ()), label, column) for column in columns]
    return ["\N{EN DASH}" if each is None else format_value(*each) for each in found]


def summary(entry: Mapping[str, Any]) -> str:
    """The headline scores of a cell's last model (or of the base), in a line; empty where there are none."""
    rows = entry.get("rows", ())
    label = next(
        (label for label in ("recovered", "sliced", "base") if any(label in row["values"] for row in rows)), ""
    )
    columns = headline(rows)
    cells = score_cells(entry, label, columns)
    return ", ".join(f"{column.title}: {cell}" for column, cell in zip(columns, cells, strict=True))
