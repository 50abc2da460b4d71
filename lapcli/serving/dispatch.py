"""Requests between their handlers and the engine: a fair queue, limits, and what happens when the engine dies."""

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lapcli.serving.logs import log
from lapcli.serving.metrics import Registry
from lapcli.serving.policy import Decision, Load, Policy, RequestFacts
from lapcli.serving.protocol import Message
from lapcli.serving.settings import Limits

_TRIES = 3
"""Engines that a request may have died with before it is taken for the cause; the last has it alone."""


class Busy(Exception):
    """There is no room for a request now.

    Args:
        status: of HTTP: 429 for a client that asks too much, 503 where the server does not take any.
        message: why.
        retry_after: seconds after which it may be worth trying again.
    """

    def __init__(self, status: int, message: str, retry_after: int):
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


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
        decision: what it runs as.
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
    begun: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    ended: str | None = None

    @property
    def suspect(self) -> bool:
        """Whether it may be what engines die of, so that others had better not be there."""
        return self.tries >= _TRIES - 1

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


class Dispatcher:
    """Gives jobs to the engine as it has room, and hands back what comes.

    Everything happens in the thread of the event loop.

    Args:
        limits: of what may wait.
        policy: asked for each job.
        registry: where its metrics go.

    Attributes:
        facts: what the engine said of itself when it was ready last; empty before it ever was.
        draining: whether no more requests are taken.
        heard: when the engine was last heard of, by the monotonic clock.
    """

    def __init__(self, limits: Limits, policy: Policy, registry: Registry):
        self.limits, self.policy = limits, policy
        self.facts: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.draining = False
        self.heard = 0.0
        self._send: Callable[[Message], None] | None = None
        self._queue = FairQueue()
        self._inside: dict[str, Job] = {}
        self._clients: Counts[str] = Counts()
        self._rate, self._counted = 0.0, 0.0
        self._alone = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._measure(registry)

    def _measure(self, registry: Registry) -> None:
        self.tokens = registry.counter("lapcli_tokens_total", "Tokens of prompts taken in and of answers, by kind.")
        self.ended = registry.counter("lapcli_answers_total", "Prompts whose answer ended, by reason.")
        self.decided = registry.counter("lapcli_configurations_total", "Prompts by the configuration they got.")
        self.restarts = registry.counter("lapcli_engine_restarts_total", "Engines that died and were started anew.")
        self.rerun = registry.counter("lapcli_reruns_total", "Prompts that were run again after an engine died.")
        registry.gauge("lapcli_waiting", "Prompts that wait for room.", lambda: len(self._queue))
        registry.gauge("lapcli_active", "Prompts in the engine.", lambda: len(self._inside))
        registry.gauge("lapcli_up", "Whether the engine is ready.", lambda: float(self.ready))
        registry.gauge("lapcli_rows", "Prompts that the engine has room for.", lambda: self.stats.get("rows", 0))
        registry.gauge("lapcli_steps", "Steps of the engine since it began.", lambda: self.stats.get("steps", 0))
        registry.gauge(
            "lapcli_out_of_memory", "Steps done again with less since it began.", lambda: self.stats.get("shrunk", 0)
        )
        registry.gauge("lapcli_memory_bytes", "Memory of the engine.", lambda: self.stats.get("memory", 0))
        registry.gauge("lapcli_peak_memory_bytes", "Most of it.", lambda: self.stats.get("peak_memory", 0))
        registry.gauge("lapcli_held_bytes", "Bytes on the device.", lambda: self.facts.get("bytes", {}), "kind")
        self.first_seconds = registry.histogram("lapcli_first_token_seconds", "From a request to its first token.")
        self.token_seconds = registry.histogram("lapcli_inter_token_seconds", "Between two tokens of an answer.")
        self.whole_seconds = registry.histogram("lapcli_answer_seconds", "From a request to its last token.")

    @property
    def ready(self) -> bool:
        """Whether there is an engine."""
        return self._send is not None

    @property
    def busy(self) -> bool:
        """Whether the engine has work."""
        return bool(self._inside)

    def check(self, client: str, count: int = 1) -> None:
        """Refuse requests that there is no room for.

        Args:
            client: whose.
            count: how many prompts.

        Raises:
            Busy: too many wait, of this client or of all; or the server ends, or has not begun.
        """
        limits = self.limits
        if self.draining:
            raise Busy(503, "the server is about to end and takes no more requests", 5)
        if not self.facts:
            raise Busy(503, "the model is being loaded", 5)
        if self._clients[client] + count > limits.per_client:
            held = self._clients[client]
            self._drop_zero(client)
            raise Busy(
                429,
                f"{count} prompts more, and {held} of this client are on their way; at most {limits.per_client}",
                self.retry_after(),
            )
        self._drop_zero(client)
        room = int(self.stats.get("rows", 0)) - len(self._inside)
        if len(self._queue) + count > limits.waiting + max(0, room) or self._queue.tokens > limits.waiting_tokens:
            raise Busy(429, f"{len(self._queue)} prompts wait already", self.retry_after())

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs of one request, all or none.

        Raises:
            Busy: see `check`.
        """
        self.check(jobs[0].client, len(jobs))
        for job in jobs:
            self._clients[job.client] += 1
            self._queue.put(job)
        self._idle.clear()
        self._pump()

    def abandon(self, job: Job, reason: str = "cancelled") -> None:
        """Nobody wants a job's answer any more."""
        if job.ended is not None:
            return
        self._queue.remove(job)
        if self._inside.pop(job.name, None) is not None and self._send is not None:
            self._send({"op": "cancel", "id": job.name})
        self._end(job, reason)
        self._pump()

    def retry_after(self) -> int:
        """Seconds until what waits now may be gone, by the tokens that came of late."""
        waiting = sum(job.cost for job in self._queue.jobs())
        return max(1, min(60, math.ceil(waiting / self._rate))) if self._rate > 0 else 1

    async def idle(self) -> None:
        """Wait until no job is left."""
        await self._idle.wait()

    def fail_all(self, message: str) -> None:
        """Let all jobs fail."""
        for job in [*self._queue.jobs(), *self._inside.values()]:
            job.pieces.put_nowait(Failed(503, message))
            self.abandon(job, "failed")

    def engine_ready(self, facts: Message, send: Callable[[Message], None]) -> None:
        """There is an engine now."""
        self.facts = {key: value for key, value in facts.items() if key not in ("op", "stats")}
        self.stats = facts["stats"]
        self.heard = time.monotonic()
        self._send = send
        self._pump()

    def engine_gone(self, why: str) -> None:
        """There is none any more: what nobody has seen anything of is run again, the rest fails."""
        self._send = None
        lost = list(self._inside.values())
        self._inside.clear()
        for job in lost:
            if job.shown:
                job.pieces.put_nowait(Failed(500, f"the engine died ({why}) in the middle of this answer"))
                self._end(job, "failed")
            elif job.tries >= _TRIES:
                job.pieces.put_nowait(Failed(500, f"{job.tries} engines died while they had this request ({why})"))
                self._end(job, "failed")
            else:
                self._begin_anew(job)

    def _begin_anew(self, job: Job) -> None:
        while not job.pieces.empty():
            job.pieces.get_nowait()
        job.pieces.put_nowait(Restarted())
        job.tokens, job.first, job.last = 0, None, None
        self.rerun.add()
        self._queue.put_back(job)

    def message(self, message: Message) -> None:
        """Take in what the engine says."""
        self.heard = time.monotonic()
        if message["op"] == "failed":
            job = self._inside.pop(message["id"], None)
            if job is not None:
                status = 400 if message["kind"] == "invalid" else 503
                job.pieces.put_nowait(Failed(status, message["message"]))
                self._end(job, "failed")
        else:
            self.stats = message["stats"]
            came = 0
            for name, tokens, text, reason, scores in message["events"]:
                job = self._inside.get(name)
                if job is not None:
                    came += len(tokens)
                    self._take(job, Piece(len(tokens), text, reason, scores))
            self._count(came)
        self._pump()

    def _take(self, job: Job, piece: Piece) -> None:
        if piece.tokens:
            if job.first is None:
                job.first = self.heard
                self.first_seconds.observe(self.heard - job.begun)
                self.tokens.add(len(job.prompt), kind="prompt")
            elif job.last is not None:
                self.token_seconds.observe((self.heard - job.last) / piece.tokens, piece.tokens)
            job.last = self.heard
            job.tokens += piece.tokens
            self.tokens.add(piece.tokens, kind="answer")
        job.pieces.put_nowait(piece)
        if piece.reason is not None:
            del self._inside[job.name]
            self.whole_seconds.observe(self.heard - job.begun)
            self._end(job, piece.reason)

    def _count(self, tokens: int) -> None:
        """Note how fast tokens come, over some ten seconds."""
        seconds = max(1e-6, self.heard - self._counted)
        self._counted = self.heard
        share = math.exp(-seconds / 10.0)
        self._rate = self._rate * share + (1 - share) * tokens / seconds

    def _end(self, job: Job, reason: str) -> None:
        job.ended = reason
        self.ended.add(reason=reason)
        self._clients[job.client] -= 1
        self._drop_zero(job.client)
        if not self._inside and not len(self._queue):
            self._idle.set()

    def _drop_zero(self, client: str) -> None:
        """Forget clients that have nothing here: there may be many in a server's life."""
        if self._clients[client] <= 0:
            del self._clients[client]

    def _pump(self) -> None:
        """Give the engine what it has room for, and a little more, so that it never waits for us."""
        rows = int(self.stats.get("rows", 0))
        room = rows + max(1, rows // 8)
        while self._send is not None and len(self._queue) and len(self._inside) < room:
            if self._inside and (self._queue.first.suspect or self._alone):
                return
            job = self._queue.take()
            self._alone = job.suspect
            load = Load(len(self._inside), len(self._queue), rows)
            facts = RequestFacts(len(job.prompt), job.settings["max_new_tokens"])
            decision = self.policy.choose(facts, load)
            if job.decision is not None and decision.configuration != job.decision.configuration:
                log("configuration", id=job.name, was=job.decision.configuration, **decision._asdict())
            job.decision = decision
            job.tries += 1
            self.decided.add(configuration=decision.configuration)
            self._inside[job.name] = job
            self._send(
                {
                    "op": "add",
                    "id": job.name,
                    "prompt": job.prompt,
                    "settings": job.settings,
                    "configuration": decision.configuration,
                }
            )
