"""The workers of a sweep: one process a slot, jobs in, events out; they end with whoever started them."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.launching import end_with_the_parent
from lapcli.sweeps.work import Job

GRACE = 60.0
"""Seconds in which a worker may save what it has after a signal."""


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time.

    Attributes:
        number: of the slot.
        gpu: as in CUDA_VISIBLE_DEVICES; `None`: the environment's own.
        threads: of OpenMP; `None`: the environment's own.
    """

    number: int
    gpu: str | None = None
    threads: int | None = None


class _Worker:
    def __init__(self, slot: Slot, log: Path):
        environment = dict(os.environ)
        if slot.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.gpu
        if slot.threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(slot.threads))
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as errors:
            # In a session of its own, so that Ctrl-C reaches it once: from here.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lapcli.sweeps.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
                start_new_session=True, preexec_fn=end_with_the_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        self.job: Job | None = None
        self.rest = b""

    def give(self, job: Job) -> None:
        assert self.process.stdin is not None
        self.job = job
        try:
            self.process.stdin.write(json.dumps(job.document()).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # It is dead; the end of its stdout will say so.

    def died(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if -code == signal.SIGKILL:
            how += ", as the kernel does when memory is short"
        return f"the worker ended in the middle ({how}); its last words are in {self.log}"


class Pool:
    """Workers that are started when they are needed. Use it with `with`: at the end, however it comes, all end.

    Args:
        slots: how many, and where.
        logs: folder for what their libraries print.
    """

    def __init__(self, slots: Sequence[Slot], logs: Path):
        self.slots = slots
        self.logs = logs
        self.workers: dict[int, _Worker] = {}
        self.multiplexer = selectors.DefaultSelector()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        self._end(in_peace=kind is None)

    @property
    def idle(self) -> list[Slot]:
        """Slots without a job."""
        busy = {number for number, worker in self.workers.items() if worker.job is not None}
        return [slot for slot in self.slots if slot.number not in busy]

    def start(self, job: Job, slot: Slot) -> None:
        """Give a job to an idle slot."""
        worker = self.workers.get(slot.number)
        if worker is not None and worker.process.poll() is not None:
            self._forget(slot.number)
            worker = None
        if worker is None:
            worker = _Worker(slot, self.logs / f"worker-{slot.number}.log")
            self.workers[slot.number] = worker
            assert worker.process.stdout is not None
            os.set_blocking(worker.process.stdout.fileno(), False)
            self.multiplexer.register(worker.process.stdout, selectors.EVENT_READ, slot.number)
        worker.give(job)

    def events(self, seconds: float) -> Generator[tuple[Job, dict[str, Any]]]:
        """What the workers say, waiting so long for the first; "done" and "failed" end a job."""
        if not self.multiplexer.get_map():
            time.sleep(seconds)
            return
        for key, _mask in self.multiplexer.select(seconds):
            worker = self.workers[key.data]
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                job = worker.job
                said = worker.died()
                self._forget(key.data)
                if job is not None:
                    yield job, {"event": "failed", "message": said, "hint": "the same command tries it again"}
                continue
            *lines, worker.rest = (worker.rest + data).split(b"\n")
            for line in lines:
                event: dict[str, Any] = json.loads(line)
                job = worker.job
                assert job is not None
                if event["event"] in ("done", "failed"):
                    worker.job = None
                yield job, event

    def _forget(self, number: int) -> None:
        worker = self.workers.pop(number)
        for stream in (worker.process.stdout, worker.process.stdin):
            assert stream is not None
            if stream is worker.process.stdout and stream.fileno() in self.multiplexer.get_map():
                self.multiplexer.unregister(stream)
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        worker.process.wait()

    def _end(self, *, in_peace: bool) -> None:
        """Let idle workers go, and have the others save what they have; a second signal kills them."""
        living = [worker.process for worker in self.workers.values()]
        try:
            for process in living:
                if in_peace and process.stdin is not None:
                    process.stdin.close()
                elif process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE
            while any(process.poll() is None for process in living) and time.monotonic() < deadline:
                self._drain()
                time.sleep(0.05)
        finally:
            for process in living:
                if process.poll() is None:
                    process.kill()
            for number in list(self.workers):
                self._forget(number)
            self.multiplexer.close()

    def _drain(self) -> None:
        """Read what nobody waits for any more: a full pipe would stop the writer."""
        for key, _mask in self.multiplexer.select(0):
            try:
                if not os.read(key.fd, 1 << 16):
                    self.multiplexer.unregister(key.fileobj)
            except BlockingIOError:
                continue
