"""lapcli's commands in processes of their own, several at a time, spread over GPUs, until time is up."""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from studies.lines import add_line

INTERRUPTED = 130
_ANYWHERE = ("select", "slice", "report")
"""Commands that compute on the CPU alone."""

Piece = TypeVar("Piece")


class Commands:
    """Commands under way.

    Args:
        options: of the command line: `work`, `output`, `known`, `gpus`, `workers`, `seconds`.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.work: Path = options.work
        self.lock = threading.Lock()
        self.begun = time.monotonic()
        self.running: dict[subprocess.Popen[str], str] = {}
        self.over = threading.Event()
        self.closed: set[str] = set()

    def each(self, pieces: Sequence[Piece], do: Callable[[int, Piece], bool]) -> bool:
        """Do pieces of work, `--workers` at a time, until `--seconds` are over; whether all were finished.

        Args:
            pieces: in the order in which they are begun.
            do: takes a piece's number and the piece; whether it was finished.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.end())
        ending = None
        if self.options.seconds:
            ending = threading.Timer(max(0.0, self.options.seconds - (time.monotonic() - self.begun)), self.end)
            ending.daemon = True
            ending.start()
        with ThreadPoolExecutor(self.options.workers) as pool:
            jobs = [pool.submit(do, number, piece) for number, piece in enumerate(pieces)]
            done = sum(job.result() for job in jobs)
        if ending is not None:
            ending.cancel()
        self.say(f"{done} of {len(pieces)} done")
        return done == len(pieces)

    def end(self, group: str | None = None) -> None:
        """Let what runs save and end, and start nothing more; or that of one group alone."""
        with self.lock:
            if group is None:
                self.over.set()
            else:
                self.closed.add(group)
            for process, its in self.running.items():
                if group in (None, its):
                    process.send_signal(signal.SIGTERM)

    def lapcli(self, gpu: int, *arguments: str, group: str = "") -> float | None:
        """Run a command on one GPU; the seconds it took, or `None` where it was interrupted, or never begun.

        GPUs are counted among those that this process is shown.

        Args:
            gpu: which.
            arguments: of the command line.
            group: what it may be ended with, before all is over.

        Raises:
            RuntimeError: it failed.
        """
        gpus = self.options.gpus
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        place = {"CUDA_VISIBLE_DEVICES": shown.split(",")[gpu] if shown else str(gpu)} if gpus else {}
        on_cpu = [] if gpus or arguments[0] in _ANYWHERE else ["--device", "cpu"]
        begun = time.monotonic()
        with self.lock:
            if self.over.is_set() or group in self.closed:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "lapcli", *arguments, *on_cpu],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **place},
            )  # fmt: skip
            self.running[process] = group
        _, said = process.communicate()
        with self.lock:
            self.running.pop(process)
            ended = self.over.is_set() or group in self.closed
        if process.returncode == INTERRUPTED or (ended and process.returncode):
            return None
        if process.returncode:
            raise RuntimeError(f"lapcli {' '.join(arguments)}: exit code {process.returncode}: {said[-800:]}")
        return time.monotonic() - begun

    def add(self, line: dict[str, Any]) -> None:
        """Add a line to `--output`, with its date."""
        with self.lock:
            add_line(self.options.output, {**line, "date": datetime.datetime.now(datetime.UTC).date().isoformat()})

    def say(self, text: str) -> None:
        """Tell whoever watches, with the seconds since the beginning."""
        sys.stderr.write(f"{time.monotonic() - self.begun:6.0f} s  {text}\n")
        sys.stderr.flush()
