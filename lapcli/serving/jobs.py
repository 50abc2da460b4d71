"""Requests on their way: what is known of each, and the queue in which they wait for their turn."""

import asyncio
import heapq
import itertools
import time
from collections import Counter as Counts
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lapcli.serving.policy import Decision

TRIES = 3
"""Engines that a request may have died with before it is taken for the cause; the last has it alone."""


class Piece(NamedTuple):
    """Something new of an answer.

    Attributes:
        tokens: how many came.
        text: what is new of the text.
        reason: why it ended, with its last piece.
        scores: of each token: id, log-probability, and pairs of these of the likeliest.
    """

    tokens: int
    text: str
    reason: str | None
    scores: list[Any]


class Restarted(NamedTuple):
    """The answer begins anew; what came so far is void."""


class Failed(NamedTuple):
    """The request cannot be answered.

    Attributes:
        status: of HTTP, where nothing was answered yet.
        message: why.
    """

    status: int
    message: str


@dataclass(eq=False)
class Job:
    """One prompt on its way.

    Attributes:
        name: unique.
        client: whose it is.
        prompt: its tokens.
        settings: of `lapcli.runtime.GenerationSettings`.
        pieces: what came of it and was not taken yet.
        shown: whether the client has seen something of the answer, so that it cannot begin anew.
        tries: engines that it was given to.
        decision: what it began as.
        configuration: what it runs as.
        switching: what it is being handed over to.
        switches: how often it was.
        begun: when it came, by the monotonic clock.
        first: when its first token came.
        last: when its last token came.
        tokens: that came.
        ended: why; `None` while it is not.
    """

    name: str
    client: str
    prompt: list[int]
    settings: dict[str, Any]
    pieces: "asyncio.Queue[Piece | Restarted | Failed]" = field(default_factory=asyncio.Queue)
    shown: bool = False
    tries: int = 0
    decision: Decision | None = None
    configuration: str = ""
    switching: str | None = None
    switches: int = 0
    begun: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    ended: str | None = None

    @property
    def suspect(self) -> bool:
        """Whether it may be what engines die of, so that others had better not be there."""
        return self.tries >= TRIES - 1

    @property
    def cost(self) -> int:
        """What it takes of a server, in tokens, at most."""
        return len(self.prompt) + self.settings["max_new_tokens"]


class FairQueue:
    """Serves clients in proportion: a client's next request goes behind what all have had since it last waited.

    Start-time fair queueing over tokens: each job gets the virtual time at which the client's jobs before it will have
    had their turn, and the least is next. A client that comes back after a while has no credit from then.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._tags: dict[Job, tuple[float, int]] = {}
        self._ends: dict[str, float] = {}
        self._counts: Counts[str] = Counts()
        self._now = 0.0
        self._turn = itertools.count()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._tags)

    def put(self, job: Job) -> None:
        """Let a job wait; one that waited before gets its old place."""
        if job in self._tags:
            return
        start = max(self._now, self._ends.get(job.client, 0.0))
        self._ends[job.client] = start + job.cost
        self._put(job, (start, next(self._turn)))

    def put_back(self, job: Job) -> None:
        """Let a job wait that had its turn: before all others."""
        self._put(job, (-1.0, next(self._turn)))

    def _put(self, job: Job, tag: tuple[float, int]) -> None:
        self._tags[job] = tag
        self._counts[job.client] += 1
        self.tokens += len(job.prompt)
        heapq.heappush(self._heap, (*tag, job))

    @property
    def first(self) -> Job:
        """The next one; there has to be one."""
        while True:
            start, turn, job = self._heap[0]
            if self._tags.get(job) == (start, turn):
                return job
            heapq.heappop(self._heap)

    def take(self) -> Job:
        """Let the next one wait no longer."""
        job = self.first
        self._now = max(self._now, self._tags[job][0])
        self._drop(job)
        return job

    def remove(self, job: Job) -> None:
        """Let a job wait no longer."""
        if job in self._tags:
            # What it did not get, its client is not charged.
            self._ends[job.client] = self._ends.get(job.client, 0.0) - job.cost
            self._drop(job)

    def jobs(self) -> list[Job]:
        """All that wait."""
        return list(self._tags)

    def _drop(self, job: Job) -> None:
        del self._tags[job]
        if len(self._heap) > 2 * len(self._tags) + 64:
            self._heap = [entry for entry in self._heap if self._tags.get(entry[2]) == entry[:2]]
            heapq.heapify(self._heap)
        self.tokens -= len(job.prompt)
        self._counts[job.client] -= 1
        if self._counts[job.client] == 0:
            del self._counts[job.client]
        if not self._tags:
            # Nobody waits, so nobody is behind; clients that never come back are forgotten.
            self._heap.clear()
            self._ends.clear()
            self._now = 0.0
        elif len(self._ends) > 2 * len(self._counts) + 64:
            self._ends = {
                client: end for client, end in self._ends.items() if end > self._now or self._counts[client] > 0
            }
