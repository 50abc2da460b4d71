"""Rows of a benchmark, written as each is made, and the time that is left for more."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch

from lapcli.artifacts import atomic_file, is_marked, refuse_unmarked
from lapcli.errors import ArtifactError
from lapkernels.timing import Timing

SCHEMA = 1
_MARK = b'"kind": "speed"'
Status = Literal["measured", "out of memory", "wrong", "failed", "not here", "no time"]


@dataclass(frozen=True)
class Cell:
    """What is measured, and by whom.

    Attributes:
        what: `decode`, `prefill`, `generate`, `latency`, `memory`; `decode operator`, `prefill operator`,
            `decode mixer`, `prefill mixer`.
        model: the name of its base; of an operator, of the layer's shape.
        ratio: removed fraction of the key width.
        way: what computes it, such as `lapcli` or `fla graph`.
        batch: rows.
        tokens: seen before a decode step; of a row, in prefill.
        key_heads: of a layer.
        value_heads: likewise.
        key_width: K.
        value_width: V.
        state_dtype: of recurrent states.
        backward: whether gradients are computed too.
    """

    what: str
    model: str
    ratio: float
    way: str
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    state_dtype: str = "float32"
    backward: bool = False


@dataclass(frozen=True)
class Row:
    """What came of a cell.

    Attributes:
        cell: which.
        status: `measured`; otherwise there are no figures.
        detail: why not, or what is to be known of the figures.
        seconds: of one step, one forward pass or one call: the median of the trials' medians.
        trials: the median of each.
        repeats: calls of a trial that counted.
        graphed: whether a CUDA graph was replayed.
        floor_seconds: the least that it must take here.
        error_share: the largest error over what is allowed of it, before anything was timed.
        peak_bytes: what tensors took of the device at most, where that was asked.
        more: figures of this kind of cell alone.
    """

    cell: Cell
    status: Status
    detail: str = ""
    seconds: float | None = None
    trials: tuple[float, ...] = ()
    repeats: int | None = None
    graphed: bool | None = None
    floor_seconds: float | None = None
    error_share: float | None = None
    peak_bytes: int | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def over_floor(self) -> float | None:
        """Times the floor."""
        return None if self.seconds is None or not self.floor_seconds else self.seconds / self.floor_seconds

    @staticmethod
    def timed(cell: Cell, timing: Timing, *, floor: float | None, share: float | None, **others: Any) -> "Row":
        """Of a cell that was measured."""
        return Row(
            cell,
            "measured",
            seconds=timing.seconds,
            trials=timing.trials,
            repeats=timing.repeats,
            graphed=timing.graphed,
            floor_seconds=floor,
            error_share=share,
            **others,
        )

    def to_json(self) -> dict[str, Any]:
        """Flat: the cell's fields beside its own."""
        own = asdict(self)
        cell, more = own.pop("cell"), own.pop("more")
        return {**cell, **own, "trials": list(self.trials), "over_floor": self.over_floor, **more}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Row":
        """The inverse; fields of newer versions are kept in `more`."""
        names = {each.name for each in fields(Cell)}
        own = {each.name for each in fields(Row)} - {"cell", "more"}
        cell = Cell(**{name: value for name, value in document.items() if name in names})
        rest = {name: value for name, value in document.items() if name in own}
        more = {name: value for name, value in document.items() if name not in names | own | {"over_floor"}}
        rest["trials"] = tuple(rest.get("trials", ()))
        return Row(cell=cell, **rest, more=more)


class Budget:
    """Seconds that a benchmark may take; what has not begun by then is left out.

    Args:
        seconds: `None` for no end.
    """

    def __init__(self, seconds: float | None = None):
        self.begun, self.seconds = time.monotonic(), seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self.begun)


class Results:
    """Rows under way.

    Args:
        command: as typed, for whoever wants the same again.
        machine: what they are measured on: `machine_facts`.
        path: a JSON file that holds every row as soon as there is one; `None` for none.
        budget: what time there is.
        each: told of each row.
        subjects: name, removed fraction, key width and config of the models that are measured, so that a reader can
            tell whose figures these are.
        quick: whether sizes are toys, so that the figures say nothing.
    """

    def __init__(
        self,
        command: str,
        machine: dict[str, Any],
        *,
        path: Path | None = None,
        budget: Budget | None = None,
        each: Callable[[Row], None] | None = None,
        subjects: Iterable[Mapping[str, Any]] = (),
        quick: bool = False,
    ):
        self.command, self.machine, self.path = command, machine, path
        self.subjects, self.quick = [dict(subject) for subject in subjects], quick
        self.budget, self.each = budget or Budget(), each
        self.rows: list[Row] = []
        if path is not None:
            self._write()

    def add(self, row: Row) -> Row:
        """Keep a row, on disk too."""
        self.rows.append(row)
        if self.path is not None:
            self._write()
        if self.each is not None:
            self.each(row)
        return row

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "kind": "speed",
            "schema": SCHEMA,
            "command": self.command,
            "machine": self.machine,
            "quick": self.quick,
            "subjects": self.subjects,
            "rows": [row.to_json() for row in self.rows],
        }

    def _write(self) -> None:
        assert self.path is not None
        with atomic_file(self.path) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def check_output(path: Path) -> None:
    """Refuse a file that results would take the place of, unless they are results themselves.

    Raises:
        ArtifactError: it is a folder, lies in none, or `lapcli bench` did not write it.
    """
    hint = "name another file with --output"
    above = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if above is None or not above.is_dir():
        raise ArtifactError(f"{path} lies in {above}, which is no folder", hint)
    refuse_unmarked(path, _MARK, "lapcli bench")


def is_results(path: Path) -> bool:
    """Whether a file begins as results do."""
    return is_marked(path, _MARK)


def machine_facts(device: torch.device, copy_bytes: float, product_flops: float) -> dict[str, Any]:
    """What figures depend on: the chip, its rates in this run, versions and date."""
    from lapcli.doctor.facts import installed

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "date": date.today().isoformat(),
        "copy_bytes": copy_bytes,
        "product_flops": product_flops,
        "versions": installed(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def _cpu_name() -> str:
    import os
    import platform

    return f"{os.cpu_count()} {platform.machine().replace('_', '-')} cores"


def read_results(paths: Iterable[Path]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Documents and their rows.

    Raises:
        ArtifactError: a file is none of `lapcli bench`, or of a newer version.
    """
    found: list[tuple[dict[str, Any], list[Row]]] = []
    for path in paths:
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read as results of `lapcli bench`: {error}") from error
        if not isinstance(document, dict) or document.get("kind") != "speed":
            raise ArtifactError(f"{path} holds no results of `lapcli bench`", "pass files that its --output wrote")
        if document.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{path} has schema {document.get('schema')}; this lapcli reads {SCHEMA}", "measure again, or update"
            )
        try:
            found.append((document, [Row.from_json(row) for row in document["rows"]]))
        except (AttributeError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged: {error!r}", "measure again") from error
    return found
