"""All that a person sees: the only module that imports rich, and only when something is to be shown."""

import json
import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lapcli.errors import LapcliError
from lapcli.reporting import Task

if TYPE_CHECKING:
    from rich.console import Console

    from lapcli.evaluation.results import Evaluation


_LOG_COLUMNS = 120
_WIDEST = 10_000
_LOG_SECONDS = 10.0
"""Between two notes of one piece of work in a log."""


def console() -> "Console":
    """The console on stderr; plain where stderr is no terminal."""
    from rich.console import Console

    # A log has no edge to keep to; what a person set (COLUMNS) holds there too.
    wide = None if sys.stderr.isatty() or "COLUMNS" in os.environ else _LOG_COLUMNS
    return Console(stderr=True, highlight=False, width=wide, soft_wrap=not sys.stderr.isatty())


class _BarTask:
    def __init__(self, progress: Any, task: Any):
        self.progress = progress
        self.task = task

    def advance(self, amount: float = 1) -> None:
        self.progress.advance(self.task, amount)

    def note(self, text: str) -> None:
        self.progress.update(self.task, note=text)


class _QuietTask:
    def advance(self, amount: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _LogTask:
    """Prints a note now and then, with how far the work is."""

    def __init__(self, out: "Console", description: str, total: float | None, unit: str):
        self.out, self.description, self.total, self.unit = out, description, total, unit
        self.done, self.said = 0.0, time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def note(self, text: str) -> None:
        if time.monotonic() - self.said >= _LOG_SECONDS:
            self.said = time.monotonic()
            amount = _quantity(self.done, "") + (
                "" if self.total is None else f" of {_quantity(self.total, self.unit)}"
            )
            self.out.print(f"{self.description}, {amount}: {text}", markup=False)


class DisplayReporter:
    """Progress bars with rate and time left on a terminal; a line at the start and at the end elsewhere.

    Args:
        quiet: say nothing but warnings.
    """

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.console = console()

    @contextmanager
    def task(self, description: str, total: float | None = None, unit: str = "") -> Generator[Task]:
        """Show one piece of work."""
        if self.quiet:
            yield _QuietTask()
        elif not self.console.is_terminal:
            start = time.monotonic()
            yield _LogTask(self.console, description, total, unit)
            amount = "" if total is None else f", {_quantity(total, unit)}"
            self.console.print(f"{description}: {time.monotonic() - start:.1f} s{amount}")
        else:
            from rich.progress import (
                BarColumn,
                Progress,
                ProgressColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )
            from rich.text import Text

            class Rate(ProgressColumn):
                """Units a second."""

                def render(self, task: Any) -> Text:
                    return Text(f"{_quantity(task.finished_speed or task.speed or 0, unit)}/s")

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                Rate(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", style="dim"),
            )
            with Progress(*columns, console=self.console) as progress:
                yield _BarTask(progress, progress.add_task(description, total=total, note=""))

    def notice(self, text: str) -> None:
        """Print a notice, dim."""
        if not self.quiet:
            self.console.print(text, style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Print a warning, quiet or not."""
        self.console.print(f"warning: {text}", style="yellow", markup=False)


def _quantity(value: float, unit: str) -> str:
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def size(count: float) -> str:
    """Bytes for a person, in binary units."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
    """Print a table on stderr; the first `text_columns` columns are left-aligned, the others right."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if number < text_columns else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    out = console()
    if Measurement.get(out, out.options.update(max_width=_WIDEST), drawn).minimum <= out.width:
        out.print(drawn)
        return
    # Columns of a letter's width can be read by nobody: a block for each row instead.
    if title:
        out.print(title, style="italic", markup=False)
    for row in rows:
        out.print(row[0], style="bold", markup=False)
        for column, cell in list(zip(columns, row, strict=True))[1:]:
            if cell:
                out.print(f"  {column}: {cell}" if column else f"  {cell}", markup=False)


def facts(title: str | None, values: Mapping[str, Any]) -> None:
    """Print names and values on stderr, a row each."""
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=None, show_header=False)
    drawn.add_column(overflow="fold")
    drawn.add_column(overflow="fold")
    for name, value in values.items():
        drawn.add_row(f"  {name}", fact(value))
    console().print(drawn)


def would_do(values: Mapping[str, Any], as_json: bool) -> None:
    """Say what a command would do: the answer to --dry-run."""
    if as_json:
        emit({"dry_run": True, **values})
    else:
        said = {name: value for name, value in values.items() if value is not None and value not in ("", [], {})}
        facts("would do (nothing was done)", {name.replace("_", " "): value for name, value in said.items()})


def evaluation(found: "Evaluation", *, quiet: bool = False) -> None:
    """Print an evaluation's table and its notes on stderr."""
    from lapcli.evaluation.table import evaluation_table

    if quiet:
        return
    drawn = evaluation_table(found)
    table(None, drawn.columns, drawn.rows, text_columns=2)
    for note in drawn.notes:
        console().print(note, style="dim", markup=False)


def fact(value: Any) -> str:
    """A value of an artifact's header for a person."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(fact(item) for item in value)
    return str(value)


def closing(text: str, *, quiet: bool = False) -> None:
    """Print the last line: where the result is and what to run next."""
    if not quiet:
        console().print(text, markup=False)


def remark(text: str, style: str) -> None:
    """Print a line in a style of rich's."""
    console().print(text, style=style, markup=False)


def emit(document: Any) -> None:
    """Write the machine-readable result on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()  # so that a full disk is found here


def failure(error: LapcliError) -> None:
    """Print an error and its remedy."""
    out = console()
    out.print(f"error: {error.message}", style="bold red", markup=False)
    if error.hint:
        out.print(error.hint, markup=False)


class SweepDisplay:
    """A table of a sweep's cells that changes as they do, on a terminal; a line for each change elsewhere.

    Args:
        quiet: say nothing but warnings.
        names: of the cells, in their order.
    """

    def __init__(self, quiet: bool, names: Sequence[str]):
        self.quiet, self.names = quiet, names
        self.console = console()
        self.notes: dict[str, str] = {}
        self.begun: dict[str, float] = {}
        self.start = self.drawn = time.monotonic()
        self.live: Any = None

    def __enter__(self) -> "SweepDisplay":
        if not self.quiet and self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*error)

    def changed(self, record: Any, name: str | None) -> None:
        """Show that something changed, or that time went by."""
        if self.live is not None:
            if name is not None or time.monotonic() - self.drawn > 0.5:
                self.drawn = time.monotonic()
                self.live.update(self._table(record), refresh=True)
            return
        if self.quiet or name is None:
            return
        from lapcli.sweeps.headline import summary

        cell = record.cells.get(name.removeprefix("slice of "))
        entry = record.base if name == "base" else cell or record.calibrations[name.removeprefix("calibration ")]
        state = entry["state"]
        if state == "failed":
            self.console.print(f"{name}: failed: {entry['failure']['message']}", style="red", markup=False)
        elif state == "running":
            self.begun[name] = time.monotonic()
            self.console.print(f"{name}: begun", style="dim", markup=False)
        else:
            seconds = time.monotonic() - self.begun.get(name, self.start)
            done = sum(each["state"] == "done" for each in record.cells.values())
            scores = summary(entry) if state == "done" else ""
            said = f"{name}: done, {seconds:.1f} s ({done} of {len(record.cells)} cells)"
            self.console.print(f"{said}; {scores}" if scores else said, markup=False)

    def progress(self, name: str, text: str) -> None:
        """Note how far a job is."""
        self.notes[name] = text

    def said(self, name: str, kind: str, text: str) -> None:
        """Print a job's warning; its notices stay in its run."""
        if kind == "warning":
            self.console.print(f"warning: {name}: {text}", style="yellow", markup=False)

    def _table(self, record: Any) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        from lapcli.sweeps.headline import summary

        counts = dict.fromkeys(("done", "running", "waiting", "failed"), 0)
        for entry in record.cells.values():
            counts[entry["state"]] += 1
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        drawn = Table(title=f"{said}; {time.monotonic() - self.start:.0f} s", title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("cell", "state", ""):
            drawn.add_column(column, overflow="ellipsis", no_wrap=True)
        parts = {f"calibration {name}": entry for name, entry in record.calibrations.items()}
        if record.base.get("state"):
            parts["base"] = record.base
        cells = {name: record.cells[name] for name in self.names}
        room = max(6, self.console.height - 6)
        # What moves comes first where a screen cannot hold everything.
        order = {"running": 0, "failed": 1, "waiting": 2, "done": 3}
        rows = [*parts.items(), *cells.items()]
        if len(rows) > room:
            rows = sorted(rows, key=lambda row: order[row[1]["state"]])[:room]
        styles = {"done": "green", "failed": "red", "running": "bold", "waiting": "dim"}
        for name, entry in rows:
            state = entry["state"]
            note = self.notes.get(name) or self.notes.get(f"slice of {name}", "")
            if state == "failed":
                note = entry["failure"]["message"]
            elif state == "done":
                seconds = f"{entry['wall_seconds']:.0f} s" if "wall_seconds" in entry else ""
                note = "; ".join(filter(None, (seconds, summary(entry))))
            elif state == "waiting":
                note = ""
            drawn.add_row(Text(name), Text(state, style=styles[state]), Text(note))
        return drawn
