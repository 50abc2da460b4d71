"""Starting processes: which of those that ended at one time is named, and what is kept of what they said."""

import signal
import sys

import pytest

from lapcli import launching
from lapcli.errors import LapcliError
from lapcli.parallel import LOG, LOST

PROGRAM = f"""
import os, signal, sys, time
what = sys.argv[1 + int(os.environ["RANK"])]
if what.startswith("late-"):
    time.sleep(0.5)
os.write(os.open(os.environ["{LOG}"], os.O_WRONLY | os.O_CREAT), b"the last word\\n" if what != "well" else b"")
kind, _, number = what.removeprefix("late-").partition("-")
os.kill(os.getpid(), int(number)) if kind == "kill" else sys.exit(int(number or 0))
"""


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Start processes that end as they are told to."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    wrapper = tmp_path / "python"
    # The launcher starts `python -m lapcli ARGUMENTS`.
    wrapper.write_text(f'#!/bin/sh\nshift 2\nexec {program} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return lambda *ends: launching.launch(ends, len(ends))


def logs(tmp_path):
    return list(tmp_path.glob("lapcli-processes-*"))


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (("well", "well"), 0),
        (("exit-3", "exit-0"), 3),
        (("late-exit-75", "exit-1"), 1),
        (("exit-75", "late-exit-1"), 1),
        (("late-kill-6", "exit-1"), 1),
    ],
)
def test_who_failed_has_said_why(launch, tmp_path, ends, code):
    assert LOST == 75
    assert launch(*ends) == code
    assert not logs(tmp_path)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("exit-75", "late-kill-9"), "process 1 of 2 was killed (signal 9)"),
        (("late-kill-9", "kill-6"), "process 1 of 2 was killed (signal 6)"),
        (("late-exit-1", "kill-11"), "process 1 of 2 was killed (signal 11)"),
        (("exit-75", "exit-75"), "process 0 of 2 no longer reaches the others: the last word"),
    ],
)
def test_who_was_killed_is_named_and_what_was_said_is_kept(launch, tmp_path, ends, said):
    with pytest.raises(LapcliError) as raised:
        launch(*ends)
    assert raised.value.message.startswith(said)
    (folder,) = logs(tmp_path)
    assert str(folder) in raised.value.hint
    assert ("more memory" in raised.value.hint) == (f"(signal {signal.SIGKILL:d})" in said)


class Ended:
    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ((0, 0), (0, 0)),
        ((-6, -9), (1, -9)),
        ((75, -9), (1, -9)),
        ((75, 1), (1, 1)),
        ((-6, 1), (1, 1)),
        ((1, -9), (1, -9)),
    ],
)
def test_of_those_that_ended_at_one_time(codes, cause):
    assert launching._outlast([Ended(code) for code in codes]) == cause
