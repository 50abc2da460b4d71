"""The engine's loop: one thread that takes requests in, does a step, and says what came of it."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lapcli.errors import LapcliError
from lapcli.runtime import Batch, Event, GenerationSettings
from lapcli.serving.logs import log
from lapcli.serving.protocol import Message
from lapcli.serving.trials import out_of_memory

_SIGN_OF_LIFE = 1.0
"""Seconds between two messages while there is work, at most."""
_CALM = 64
"""Steps without running out of memory after which more is tried again."""
_SMALLEST_PIECE = 64
_MEMORY = 0.9
"""Of the seconds of a step that are remembered, what the last ones keep."""


class Measured(NamedTuple):
    """What was measured before the first request came.

    Attributes:
        prefill_seconds: of a token of a prompt.
        step_seconds: of a step; steps that are done go on measuring it.
        split_seconds: more of a step for each layer that is attention for some of its rows and states for others.
    """

    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    split_seconds: float = 0.0


class _Handover(NamedTuple):
    """A row that replays its tokens: what it becomes, how many these are, and since when."""

    configuration: str
    tokens: int
    since: float


class EngineLoop:
    """Decodes what it is told to, until it is told to stop.

    When memory runs out, the step is done again with less: a shorter piece of a prompt, or half of the rows, the others
    waiting; later more is tried again. Only a request that does not fit alone, twice, fails.

    Args:
        batch: where requests are rows.
        take: gives the messages that came, the end as `None`; its argument says whether to wait for one.
        send: takes a message for the front.
        measured: before.
    """

    def __init__(
        self,
        batch: Batch,
        take: Callable[[bool], list[Message | None]],
        send: Callable[[Message], None],
        measured: Measured | None = None,
    ):
        self.batch, self.take, self.send = batch, take, send
        self.measured = measured or Measured()
        self._step_seconds = self.measured.step_seconds
        self._mixed, self._mixed_seconds, self._split_seconds = 0, 0.0, 0.0
        self._handed: dict[str, _Handover] = {}
        self._switched: list[list[Any]] = []
        batch.engine.pages.least_free = batch.engine.pages.free
        self._piece, self._together = batch.piece, batch.together
        self._requests: dict[int, str] = {}
        self._rows: dict[str, int] = {}
        self._calm = self._shrunk = self._steps = 0
        # The row that failed alone, since when no step was done.
        self._failed: int | None = None
        self._said = 0.0

    def run(self) -> None:
        """Go on until `stop`, or the end of messages."""
        while True:
            for message in self.take(not self.batch.unfinished):
                if message is None or message["op"] == "stop":
                    self.batch.close()
                    return
                self.obey(message)
            if self.batch.unfinished:
                self.tell(self._step())

    def obey(self, message: Message) -> None:
        """Do what the front says."""
        request = message["id"]
        if message["op"] == "cancel":
            row = self._rows.get(request)
            # Nobody waits for what it says to that.
            self._forget([] if row is None else self.batch.cancel(row))
            return
        if message["op"] == "switch":
            self._switch(request, message["configuration"])
            return
        wanted = dict(message["settings"])
        wanted["eos"], wanted["stop"] = frozenset(wanted["eos"]), tuple(wanted["stop"])
        try:
            row = self.batch.add(message["prompt"], GenerationSettings(**wanted), message["configuration"])
        except LapcliError as error:
            self.send({"op": "failed", "id": request, "kind": "invalid", "message": error.message})
            return
        self._requests[row], self._rows[request] = request, row

    def _switch(self, request: str, configuration: str) -> None:
        """Let a row go on as another configuration."""
        row, batch = self._rows.get(request), self.batch
        if row is None:
            return
        replays = batch.under_way(row)
        if batch.switch(row, configuration) and replays:
            self._handed[request] = _Handover(configuration, batch.tokens_of(row), time.monotonic())
            return
        # It waits, and begins as what it is told; or it is that already, or has ended.
        found = batch.configuration_of(row)
        if found is not None:
            self._switched.append([request, found, 0, 0.0])

    def _look_for_handed(self) -> None:
        """Note which rows have replayed their tokens."""
        for request, handed in list(self._handed.items()):
            row = self._rows[request]
            # One that has as few tokens left as come with its return has ended already.
            if self.batch.under_way(row) or self.batch.configuration_of(row) is None:
                del self._handed[request]
                seconds = time.monotonic() - handed.since
                self._switched.append([request, handed.configuration, handed.tokens, seconds])

    def _step(self) -> list[Event]:
        """One step; when it runs out of memory, none, and the next will need less."""
        batch, begun = self.batch, time.perf_counter()
        waited, mixed, was_in = batch.waiting, batch.mixed_steps, batch.taking_in
        try:
            events = self.batch.advance()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self._need_less(str(error).partition("\n")[0])
            return []
        if self.batch.active:
            self._failed = None
        self._steps += 1
        self._note(batch.mixed_steps - mixed, was_in or batch.taking_in or waited != batch.waiting, begun)
        self._look_for_handed()
        self._calm += 1
        if self._calm >= _CALM:
            self._try_more()
        return events

    def _note(self, mixed: int, prompts: bool, begun: float) -> None:
        """Note what a step took."""
        batch = self.batch
        if mixed:
            least, most = batch.engine.steps.span or (0, 0)
            self._split_seconds += self.measured.split_seconds * (most - least)
        if prompts or not batch.active:
            return
        seconds = time.perf_counter() - begun
        self._step_seconds = _MEMORY * self._step_seconds + (1 - _MEMORY) * seconds if self._step_seconds else seconds
        if mixed:
            self._mixed += 1
            self._mixed_seconds += seconds

    def _need_less(self, why: str) -> None:
        """Make the step smaller that ran out of memory, as the allocator says."""
        batch = self.batch
        self._calm = 0
        self._shrunk += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        piece = batch.piece or batch.together
        if batch.failed:
            # The rows' own step; they all wait now.
            alone, batch.most = batch.failed == 1, max(1, batch.failed // 2)
        elif piece > _SMALLEST_PIECE:
            alone, batch.piece = False, max(_SMALLEST_PIECE, piece // 2)
            batch.together = min(batch.together, batch.piece)
        else:
            # What is under way goes first.
            alone, batch.most = batch.active == 0 and batch.most == 1, max(1, batch.active)
        row = batch.first_waiting
        gives_up = alone and row == self._failed
        self._failed = row if alone else None
        log(
            "out of memory",
            "warning",
            why=why,
            rows_of_step=batch.failed,
            rows_at_most=batch.most,
            piece=batch.piece,
            gives_up_one=gives_up,
        )
        if gives_up and row is not None:
            request = self._requests[row]
            self._forget(batch.cancel(row))
            self.send({"op": "failed", "id": request, "kind": "memory", "message": f"out of memory: {why}"})

    def _try_more(self) -> None:
        """After a while without trouble, take back some of what was given up."""
        batch = self.batch
        self._calm = 0
        batch.most = min(batch.engine.max_rows, batch.most * 2)
        if batch.piece != self._piece and batch.piece is not None:
            batch.piece *= 2
            if batch.piece >= (self._piece or self._together):
                batch.piece, batch.together = self._piece, self._together

    def tell(self, events: list[Event]) -> None:
        """Say what came, and now and then that there is life."""
        now = time.monotonic()
        if not events and not self._switched and now - self._said < _SIGN_OF_LIFE:
            return
        self._said = now
        told = [_told(self._requests[event.row], event) for event in events if event.row in self._requests]
        self.send({"op": "step", "events": told, "switched": self._switched, "stats": self.stats()})
        self._switched = []
        self._forget(events)

    def _forget(self, events: list[Event]) -> None:
        for event in events:
            if event.reason is not None and event.row in self._requests:
                request = self._requests.pop(event.row)
                del self._rows[request]
                self._handed.pop(request, None)

    def stats(self) -> dict[str, Any]:
        """How it stands: rows, memory, what steps take, and who waits."""
        # Slots are rows' own.
        batch, pages = self.batch, self.batch.engine.pages
        # Those with a prompt between them take longer; they are as many as if they did not.
        mixed = self._mixed_seconds / self._mixed * batch.mixed_steps if self._mixed else 0.0
        device = self.batch.engine.device
        on_gpu = device.type == "cuda"
        return {
            "active": self.batch.active,
            "waiting": self.batch.waiting,
            "rows": self.batch.room,
            "steps": self._steps,
            "shrunk": self._shrunk,
            "total_bytes": pages.count * pages.page_bytes,
            "free_bytes": pages.free * pages.page_bytes,
            "peak_bytes": (pages.count - pages.least_free) * pages.page_bytes,
            "prefill_seconds": self.measured.prefill_seconds,
            "step_seconds": self._step_seconds,
            "switches": batch.switches,
            "mixed_steps": batch.mixed_steps,
            "mixed_seconds": mixed,
            "split_seconds": self._split_seconds,
            "set_back": batch.set_back,
            "queued": [self._requests[row] for row in batch.in_line if row in self._requests],
            "memory": torch.cuda.memory_reserved(device) if on_gpu else _resident(),
            "peak_memory": torch.cuda.max_memory_reserved(device) if on_gpu else _peak(),
        }


def _told(request: str, event: Event) -> list[Any]:
    scores = [[score.token, score.logprob, score.top] for score in event.scores]
    return [request, list(event.tokens), event.text, event.reason, scores]


def _resident() -> int:
    """Bytes of memory that this process holds."""
    import psutil

    return psutil.Process().memory_info().rss


def _peak() -> int:
    """The most bytes that this process held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
