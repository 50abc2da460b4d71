"""A sweep's table that changes as its cells do, and the lines of a log in its place."""

import io

import pytest
from rich.console import Console

from lapcli.cli import display
from lapcli.cli.display import SweepDisplay
from lapcli.sweeps.record import SweepRecord

NAMES = [f"cell-{number}" for number in range(12)]


@pytest.fixture
def record():
    """Of twelve cells the last runs, the one before it failed, two are done."""
    made = SweepRecord({"name": "demo", "revision": None, "digest": "d"}, {"tasks": ["niah"], "limit": None})
    made.cells |= {name: {"state": "waiting"} for name in NAMES}
    for name in NAMES[:2]:
        made.cells[name] = {"state": "done", "wall_seconds": 12.0}
    made.cells["cell-10"] = {"state": "failed", "failure": {"message": "out of [red]memory"}}
    made.cells["cell-11"] = {"state": "running"}
    made.calibrations["text"] = {"state": "running"}
    return made


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 12 lines, or none; gives what was written."""

    def of(terminal):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=90, height=12, highlight=False, color_system=None)
        monkeypatch.setattr(display, "console", lambda: console)
        return out

    return of


def test_on_a_terminal_what_moves_comes_first(screen, record):
    out = screen(True)
    with SweepDisplay(False, NAMES) as shown:
        shown.progress("cell-11", "after step 3")
        shown.changed(record, "cell-11")
        first = out.getvalue()
        record.cells["cell-11"] = {"state": "done", "wall_seconds": 5.0}
        shown.changed(record, "cell-11")
        second = out.getvalue()[len(first) :]
    assert "2 done, 1 running, 8 waiting, 1 failed" in first
    assert "3 done, 8 waiting, 1 failed" in second
    lines = [line.split() for line in first.splitlines()]
    rows = [line for line in lines if line and line[0] in (*NAMES, "calibration")]
    assert len(rows) == 6
    assert ["cell-11", "running", "after", "step", "3"] in rows
    # As it is written, not as an instruction to the screen.
    assert ["cell-10", "failed", "out", "of", "[red]memory"] in rows
    assert rows[0][0] == "calibration"


def test_in_a_log_each_change_is_a_line(screen, record):
    out = screen(False)
    with SweepDisplay(False, NAMES) as shown:
        shown.changed(record, "cell-11")
        shown.changed(record, None)
        record.cells["cell-11"] = {"state": "done", "wall_seconds": 5.0}
        shown.changed(record, "cell-11")
        shown.changed(record, "cell-10")
        shown.said("cell-11", "notice", "not shown")
        shown.said("cell-11", "warning", "rank 3")
    lines = out.getvalue().splitlines()
    assert lines[0] == "cell-11: begun"
    assert lines[1].startswith("cell-11: done, 0.0 s (3 of 12 cells)")
    assert lines[2:] == ["cell-10: failed: out of [red]memory", "warning: cell-11: rank 3"]


def test_quiet_it_says_nothing_but_warnings(screen, record):
    out = screen(True)
    with SweepDisplay(True, NAMES) as shown:
        shown.changed(record, "cell-11")
        shown.said("cell-11", "warning", "rank 3")
    assert out.getvalue() == "warning: cell-11: rank 3\n"
