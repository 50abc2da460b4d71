"""A process that does one job of a sweep after another: JSON lines in on stdin, JSON lines out on stdout.

Started by `lapcli.sweeps.pool`. It outlives a job, since importing torch and transformers takes longer than a small
cell; a process that met something unexpected ends, and the next job gets a fresh one.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

from lapcli.errors import LapcliError
from lapcli.reporting import Task


class _Stopped(BaseException):
    """A signal came."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _Stopped


class _Told:
    """Passes on how far a piece of work is, now and then."""

    def __init__(self, send: "_Sender", description: str, total: float | None):
        self.send, self.description, self.total = send, description, total
        self.done, self.said = 0.0, 0.0

    def advance(self, amount: float = 1) -> None:
        self.done += amount
        self.note("")

    def note(self, text: str) -> None:
        if time.monotonic() - self.said >= 1:
            self.said = time.monotonic()
            share = f" {min(1.0, self.done / self.total):.0%}" if self.total else ""
            self.send.send("progress", text=f"{self.description}{share}{', ' if text else ''}{text}")


class _Sender:
    """The reporter of a worker: what a stage says goes to the process that shows it."""

    def __init__(self, out: IO[str]):
        self.out = out

    def send(self, event: str, **values: Any) -> None:
        self.out.write(json.dumps({"event": event, **values}) + "\n")
        self.out.flush()

    @contextmanager
    def task(self, description: str, total: float | None = None, unit: str = "") -> Generator[Task]:
        """Say what is begun; `unit` is for those who draw a rate."""
        told = _Told(self, description, total)
        told.note("")
        yield told

    def notice(self, text: str) -> None:
        self.send("notice", text=text)

    def warn(self, text: str) -> None:
        self.send("warning", text=text)


def main() -> None:
    """Serve until stdin ends; 130 after a signal."""
    # Libraries print on stdout; the pipe is for our lines alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    sender = _Sender(out)
    try:
        for line in sys.stdin:
            if not _serve(json.loads(line), sender):
                break
    except _Stopped:
        sys.exit(130)


def _serve(document: dict[str, Any], sender: _Sender) -> bool:
    """Do one job; whether this process is fit for another."""
    try:
        from lapcli.sweeps.work import Job, do

        result = do(Job.of(document), sender)
    except LapcliError as error:
        sender.send("failed", message=error.message, hint=error.hint)
        return True
    except Exception as error:
        trace = traceback.format_exc()
        sys.stderr.write(trace)
        said = f"{type(error).__name__}: {error}"
        sender.send("failed", message=said.strip()[:2000], hint=None, traceback=trace[-8000:])
        return False
    sender.send("done", result=result)
    _let_go()
    return True


def _let_go() -> None:
    """Give back what a job held, GPU memory too."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
