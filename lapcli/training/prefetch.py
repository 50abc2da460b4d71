"""The sequences of the next steps are read while the present one computes.

Text is read, tokenised and cut into sequences in a thread of its own; tokenizers let go of Python's lock while they
encode, so that this goes on beside the launches of a step. Whoever takes the sequences sees what the bare stream would
have given: the same ones, after each of them the same state, an error in the place of the same one, and what the
stream has to say before the same one, in the thread that takes it.
"""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lapcli.reporting import Reporter, SilentReporter, Task
from lapcli.training.stream import PackedSequence, Stream

PATIENCE = 5.0
"""Seconds for which whoever is interrupted waits for a read under way."""

_Remark = Callable[[Reporter], None]


class ReadAhead:
    """A stream that is read ahead of whoever takes from it, from `begin` until it is closed; else it is that stream.

    Nothing else may use the stream or its tokenizer while it is read ahead. Left as a context, it is closed.

    Args:
        stream: what is read.
        ahead: sequences that lie ready at most.

    Attributes:
        reporter: of the stream; it hears in the thread that takes sequences.

    Raises:
        ValueError: fewer than one sequence ahead.
    """

    def __init__(self, stream: Stream, ahead: int):
        if ahead < 1:
            raise ValueError(f"{ahead} sequences ahead; at least one is needed")
        self.reporter = stream.reporter
        self._stream, self._ahead = stream, ahead
        self._reading: _Reading | None = None

    def begin(self, count: int) -> None:
        """Read ahead from here on.

        Args:
            count: sequences that will be taken; no more are read, and who takes more waits for each.
        """
        self.close()
        if count > 0:
            self._reading = _Reading(self._stream, count, min(count, self._ahead))

    @property
    def share(self) -> tuple[int, int]:
        """That of the stream."""
        return self._stream.share

    def __next__(self) -> PackedSequence:
        """The next sequence."""
        if self._reading is None:
            return next(self._stream)
        try:
            return self._reading.take(self.reporter)
        finally:
            if self._reading.finished:
                self.close()

    def held_out(self, count: int) -> Sequence[PackedSequence]:
        """As the stream has it; reading ahead ends."""
        self.close()
        return self._stream.held_out(count)

    def state(self) -> dict[str, Any]:
        """Where the stream stood after the last sequence that was taken."""
        return self._stream.state() if self._reading is None else self._reading.state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on there; reading ahead ends."""
        self.close()
        self._stream.restore(state)

    def close(self, patience: float | None = None) -> None:
        """End reading ahead: the stream stands behind the last sequence that was taken.

        Args:
            patience: seconds that a read under way may take until it is left alone, the stream with it; `None` for as
                many as it takes.
        """
        if self._reading is not None and self._reading.end(patience):
            self._reading = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _where: TracebackType | None) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        # Who interrupts does not wait for a network.
        self.close(PATIENCE if interrupted else None)


@dataclass(frozen=True, eq=False)
class _Found:
    """What one read gave.

    Attributes:
        sequence: the sequence, if there was one.
        state: of the stream behind it.
        error: why there is none.
        remarks: what was said before.
    """

    sequence: PackedSequence | None
    state: dict[str, Any]
    error: BaseException | None
    remarks: tuple[_Remark, ...]


class _Reading:
    """A thread that reads a stream.

    Args:
        stream: which has the thread's reporter until it ends.
        count: sequences that it reads.
        ahead: of these, how many lie ready at most.
    """

    def __init__(self, stream: Stream, count: int, ahead: int):
        self.state = stream.state()
        """Of the stream behind the last sequence that was taken."""
        self.finished = False
        """Whether nothing more will come."""
        self._stream, self._left = stream, count
        self._room = threading.Semaphore(ahead)
        self._found: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._reporter, stream.reporter = stream.reporter, _Kept()
        # A daemon, since Python waits at its end for any other, perhaps for a network.
        self._thread = threading.Thread(
            target=_read,
            args=(stream, count, stream.reporter, self._room, self._found, self._stop),
            name="lapcli-read-ahead",
            daemon=True,
        )
        self._thread.start()

    def take(self, reporter: Reporter) -> PackedSequence:
        """The next sequence, or the error in its place."""
        found = self._found.get()
        for remark in found.remarks:
            remark(reporter)
        if found.sequence is None:
            self.finished = True
            assert found.error is not None
            raise found.error
        self.state = found.state
        self._left -= 1
        self.finished = not self._left
        self._room.release()
        return found.sequence

    def end(self, patience: float | None) -> bool:
        """Stop the thread and put the stream back; whether it could be."""
        self._stop.set()
        self._room.release()
        self._thread.join(patience)
        if self._thread.is_alive():
            return False
        self._stream.reporter = self._reporter
        if not self._found.empty():
            self._stream.restore(self.state)
        return True


def _read(
    stream: Stream,
    count: int,
    kept: "_Kept",
    room: threading.Semaphore,
    found: "queue.SimpleQueue[_Found]",
    stop: threading.Event,
) -> None:
    """What the thread does."""
    for _ in range(count):
        room.acquire()
        if stop.is_set():
            return
        try:
            sequence = next(stream)
            each = _Found(sequence, stream.state(), None, kept.take())
        except BaseException as error:
            found.put(_Found(None, {}, error, kept.take()))
            return
        found.put(each)


class _Kept:
    """A reporter that keeps what it hears, to be said later."""

    def __init__(self) -> None:
        self._remarks: list[_Remark] = []

    def take(self) -> tuple[_Remark, ...]:
        """What was heard since the last time."""
        taken, self._remarks = tuple(self._remarks), []
        return taken

    @contextmanager
    def task(self, description: str, total: float | None = None, unit: str = "") -> Generator[Task]:
        """Nobody watches reading."""
        with SilentReporter().task(description, total, unit) as task:
            yield task

    def notice(self, text: str) -> None:
        """Keep it."""
        self._remarks.append(lambda reporter: reporter.notice(text))

    def warn(self, text: str) -> None:
        """Keep it."""
        self._remarks.append(lambda reporter: reporter.warn(text))
