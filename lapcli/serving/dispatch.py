"""Requests between their handlers and the engine: limits, policy, and what happens when the engine dies."""

import asyncio
import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from lapcli.serving.jobs import TRIES, Failed, FairQueue, Job, Piece, Restarted
from lapcli.serving.logs import log
from lapcli.serving.metrics import Registry
from lapcli.serving.policy import REVIEW_SECONDS, Configuration, Load, Policy, RequestFacts, RunningFacts
from lapcli.serving.protocol import Message
from lapcli.serving.settings import Limits


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


_OF_THE_ENGINE = (
    ("total_bytes", "memory_for_rows_bytes", "That states, keys and values may take."),
    ("free_bytes", "memory_for_rows_free_bytes", "Of these, what no row takes."),
    ("peak_bytes", "memory_for_rows_peak_bytes", "Most of these that rows took since the engine began."),
    ("prefill_seconds", "prompt_token_seconds", "That a token of a prompt takes, as measured."),
    ("step_seconds", "step_seconds", "That a step takes, as measured."),
    ("set_back", "set_back", "Rows that lost their place for want of memory since the engine began."),
    ("mixed_steps", "mixed_steps", "Steps whose rows were of several configurations since the engine began."),
    ("mixed_seconds", "mixed_seconds", "That these took."),
    ("split_seconds", "split_seconds", "Of these, what it cost that layers ran in parts, by a layer's measured cost."),
)
"""What of the engine's statistics is a gauge: its name there, and here. Where the engine says nothing it is 0."""
TOLD = tuple(name for name, _, _ in _OF_THE_ENGINE)


class Dispatcher:
    """Gives jobs to the engine as it has room, and hands back what comes.

    Everything happens in the thread of the event loop.

    Args:
        limits: of what may wait.
        policy: asked for each job.
        registry: where its metrics go.

    Attributes:
        facts: what the engine said of itself when it was ready last; empty before it ever was.
        configurations: that it has, by name.
        draining: whether no more requests are taken.
        heard: when the engine was last heard of, by the monotonic clock.
    """

    def __init__(self, limits: Limits, policy: Policy, registry: Registry):
        self.limits, self.policy = limits, policy
        self.facts: dict[str, Any] = {}
        self.configurations: dict[str, Configuration] = {}
        self.stats: dict[str, Any] = {}
        self.draining = False
        self.heard = 0.0
        self._send: Callable[[Message], None] | None = None
        self._queue = FairQueue()
        self._inside: dict[str, Job] = {}
        self._clients: Counts[str] = Counts()
        self._rate, self._counted, self._reviewed = 0.0, 0.0, 0.0
        self._alone = False
        self._arriving = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._measure(registry)

    def _measure(self, registry: Registry) -> None:
        self.tokens = registry.counter("lapcli_tokens_total", "Tokens of prompts taken in and of answers, by kind.")
        self.ended = registry.counter("lapcli_answers_total", "Prompts whose answer ended, by reason.")
        self.decided = registry.counter(
            "lapcli_configurations_total", "Prompts by the configuration they began as, and why."
        )
        self.said_as = registry.counter("lapcli_configuration_tokens_total", "Tokens of answers, by configuration.")
        self.switched = registry.counter(
            "lapcli_switches_total", "Prompts in the engine handed over, by what to, and why."
        )
        self.replayed = registry.counter("lapcli_switch_tokens_total", "Tokens that were replayed for that.")
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
        for stat, name, text in _OF_THE_ENGINE:
            registry.gauge(f"lapcli_{name}", text, lambda stat=stat: self.stats.get(stat, 0))
        registry.gauge(
            "lapcli_configuration_ppl_increase",
            "Of each configuration, measured at its conversion, as a share.",
            lambda: {each.name: each.increase for each in self.configurations.values()},
            "configuration",
        )
        registry.gauge(
            "lapcli_configuration_share",
            "Of the layers that each configuration converts.",
            lambda: {each.name: each.share for each in self.configurations.values()},
            "configuration",
        )
        registry.gauge("lapcli_running", "Prompts in the engine, by configuration.", self._running, "configuration")
        self.switch_seconds = registry.histogram(
            "lapcli_switch_seconds", "From an order to hand over until it is done."
        )
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
        # Where some wait there is none, whatever the number of rows: memory may be what they wait for.
        room = 0 if len(self._queue) else max(0, int(self.stats.get("rows", 0)) - len(self._inside))
        if len(self._queue) + count > limits.waiting + room or self._queue.tokens > limits.waiting_tokens:
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

    @contextmanager
    def arriving(self) -> Generator[None]:
        """While a request is read that has not submitted anything yet: the server is not idle."""
        self._arriving += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._arriving -= 1
            # What follows may submit at once, or answer that it is refused.
            asyncio.get_running_loop().call_soon(self._settle)

    async def idle(self) -> None:
        """Wait until no job is left, and nothing that may become one."""
        await self._idle.wait()

    def fail_all(self, message: str) -> None:
        """Let all jobs fail."""
        for job in [*self._queue.jobs(), *self._inside.values()]:
            job.pieces.put_nowait(Failed(503, message))
            self.abandon(job, "failed")

    def engine_ready(self, facts: Message, send: Callable[[Message], None]) -> None:
        """There is an engine now."""
        self.facts = {key: value for key, value in facts.items() if key not in ("op", "stats")}
        told = map(Configuration.of, self.facts.get("configurations", ()))
        self.configurations = {each.name: each for each in sorted(told, key=lambda each: each.converted)}
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
            elif job.tries >= TRIES:
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
            for name, configuration, tokens, seconds in message.get("switched", ()):
                self._switched(name, configuration, tokens, seconds)
            came = 0
            for name, tokens, text, reason, scores in message["events"]:
                job = self._inside.get(name)
                if job is not None:
                    came += len(tokens)
                    self._take(job, Piece(len(tokens), text, reason, scores))
            self._count(came)
        self._pump()
        self._review()

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
            self.said_as.add(piece.tokens, configuration=job.configuration)
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
        self._settle()

    def _settle(self) -> None:
        if not self._inside and not len(self._queue) and not self._arriving:
            self._idle.set()

    def _drop_zero(self, client: str) -> None:
        """Forget clients that have nothing here: there may be many in a server's life."""
        if self._clients[client] <= 0:
            del self._clients[client]

    def _running(self) -> Counts[str]:
        """How many run as each configuration."""
        return Counts(job.configuration for job in self._inside.values())

    def load(self) -> Load:
        """How things stand, as a policy is told."""
        stats = self.stats
        total, free = int(stats.get("total_bytes", 0)), int(stats.get("free_bytes", 0))
        if total:
            # What was sent to the engine and is not in its figures yet has to be counted as well.
            free = min(free, total - sum(self._bytes(job) for job in self._inside.values()))
        return Load(
            len(self._inside),
            len(self._queue),
            int(stats.get("rows", 0)),
            total,
            free,
            float(stats.get("prefill_seconds", 0.0)),
            float(stats.get("step_seconds", 0.0)),
            tuple(self.configurations.values()),
        )

    def _bytes(self, job: Job) -> int:
        known = self.configurations.get(job.configuration)
        return 0 if known is None else known.row_bytes(len(job.prompt) + job.tokens)

    def _pump(self) -> None:
        """Give the engine what it has room for, and a little more, so that it never waits for us."""
        rows = int(self.stats.get("rows", 0))
        room = rows + max(1, rows // 8)
        while self._send is not None and len(self._queue) and len(self._inside) < room:
            if self._inside and (self._queue.first.suspect or self._alone):
                return
            load = self.load()
            if self._inside and load.total_bytes and load.free_bytes <= 0:
                # The longer it waits here, the more is known when its configuration is chosen.
                return
            job = self._queue.take()
            self._alone = job.suspect
            self._choose(job, load._replace(waiting=len(self._queue)))
            job.tries += 1
            self._inside[job.name] = job
            self._send(
                {
                    "op": "add",
                    "id": job.name,
                    "prompt": job.prompt,
                    "settings": job.settings,
                    "configuration": job.configuration,
                }
            )

    def _choose(self, job: Job, load: Load) -> None:
        """Let the policy choose what a job begins as, and say so."""
        decision = self.policy.choose(RequestFacts(len(job.prompt), job.settings["max_new_tokens"]), load)
        if len(self.configurations) > 1 or (job.decision is not None and job.decision != decision):
            log(
                "configuration",
                id=job.name,
                was=job.configuration or None,
                **decision._asdict(),
                prompt_tokens=len(job.prompt),
                memory_used=round(load.used, 4),
                active=load.active,
                waiting=load.waiting,
            )
        job.decision, job.configuration, job.switching = decision, decision.configuration, None
        self.decided.add(**decision._asdict())

    def _review(self) -> None:
        """Let the policy look at what runs, now and then."""
        if len(self.configurations) < 2 or self._send is None or self.heard - self._reviewed < REVIEW_SECONDS:
            return
        self._reviewed = self.heard
        queued = set(self.stats.get("queued", ()))
        running = [
            RunningFacts(
                job.name,
                job.configuration,
                len(job.prompt) + job.tokens,
                job.settings["max_new_tokens"] - job.tokens,
                job.name in queued,
                # What is on its way into the engine, or half in, is left alone until it is in.
                job.switching is not None or (job.first is None and job.name not in queued),
            )
            for job in self._inside.values()
        ]
        load = self.load()
        for switch in self.policy.review(running, load):
            job = self._inside[switch.name]
            job.switching = switch.configuration
            log(
                "switch",
                id=job.name,
                was=job.configuration,
                configuration=switch.configuration,
                reason=switch.reason,
                tokens=len(job.prompt) + job.tokens,
                replay_seconds=round(switch.replay_seconds, 6),
                frees_bytes=switch.frees_bytes,
                memory_used=round(load.used, 4),
                active=load.active,
                waiting=load.waiting,
            )
            self.switched.add(configuration=switch.configuration, reason=switch.reason)
            self._send({"op": "switch", "id": job.name, "configuration": switch.configuration})

    def _switched(self, name: str, configuration: str, tokens: int, seconds: float) -> None:
        """A request goes on as something else."""
        if tokens:
            # Who waited begins as something else, and replays nothing.
            self.replayed.add(tokens)
            self.switch_seconds.observe(seconds)
        job = self._inside.get(name)
        if job is not None:
            job.configuration, job.switching = configuration, None
            job.switches += 1
