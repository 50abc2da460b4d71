"""Sends requests to a server when they are due, whatever became of those before, and notes what comes when."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from lapcli.errors import ModelError, UsageError
from lapcli.serving.replay_results import Outcome
from lapcli.serving.replay_texts import Prompts
from lapcli.serving.replay_trace import Turn

DEFAULT_URL = "http://127.0.0.1:8000"


class Client:
    """A server's address and key.

    Args:
        url: of the server, with or without `/v1`.
        key: of its API, if it wants one.
        timeout: seconds of one request, at most.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 3600.0):
        self.base = url.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise UsageError(f"--url {url}: it begins with http:// or https://", "for example http://127.0.0.1:8000")
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.timeout = timeout

    def session(self) -> Any:
        """To send requests with.

        Raises:
            ModelError: the package for that is missing.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise ModelError("lapcli replay needs aiohttp", "pip install 'lapcli[serve]'") from error
        return aiohttp.ClientSession(
            headers=self.headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
        )

    async def card(self) -> dict[str, Any]:
        """What `/v1/models` says of the first model.

        Raises:
            ModelError: there is no server, or it says no.
        """
        import aiohttp

        async with self.session() as session:
            try:
                async with session.get(f"{self.base}/v1/models") as reply:
                    document = await reply.json() if reply.status == 200 else None
            except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                raise ModelError(f"no server answers at {self.base}: {error}", "start one: lapcli serve") from error
            if document is None:
                hint = "set LAPCLI_API_KEY" if reply.status == 401 else None
                raise ModelError(f"{self.base}/v1/models answers {reply.status}", hint)
            return document["data"][0]

    async def metrics(self) -> dict[str, float]:
        """What `/metrics` says, without histograms; nothing where there is no such page."""
        import aiohttp

        found: dict[str, float] = {}
        async with self.session() as session:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{self.base}/metrics") as reply:
                    for line in (await reply.text()).splitlines() if reply.status == 200 else ():
                        name, _, value = line.rpartition(" ")
                        if not line.startswith("#") and "_bucket" not in name:
                            with contextlib.suppress(ValueError):
                                found[name] = float(value)
        return found

    async def replay(
        self,
        turns: Sequence[Turn],
        prompts: Prompts,
        model: str,
        advance: Callable[[Outcome], None] = lambda outcome: None,
    ) -> list[Outcome]:
        """Send each request when it is due.

        Args:
            turns: in the order of time.
            prompts: makes their prompts.
            model: its name there.
            advance: told each outcome as it comes.
        """
        outcomes: list[Outcome] = []
        async with self.session() as session, asyncio.TaskGroup() as group:
            begun = time.monotonic()
            for number, turn in enumerate(turns):
                # Made before it is due: a long prompt takes a while.
                body = json.dumps(_body(turn, prompts, model, number)).encode()
                await asyncio.sleep(max(0.0, begun + turn.seconds - time.monotonic()))
                outcome = Outcome(number, turn.seconds, turn.prompt, turn.answer)
                outcomes.append(outcome)
                group.create_task(self._ask(session, body, outcome, begun, advance))
        return outcomes

    async def _ask(
        self, session: Any, body: bytes, outcome: Outcome, begun: float, advance: Callable[[Outcome], None]
    ) -> None:
        import aiohttp

        outcome.sent = time.monotonic() - begun
        try:
            headers = {"content-type": "application/json"}
            async with session.post(f"{self.base}/v1/completions", data=body, headers=headers) as reply:
                outcome.status = reply.status
                if reply.status == 200:
                    await _listen(reply, outcome, begun)
                else:
                    outcome.error = (await reply.text())[:200]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:200]
        outcome.end = outcome.end if outcome.error is None and outcome.end else time.monotonic() - begun
        advance(outcome)


def _body(turn: Turn, prompts: Prompts, model: str, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompts.of(turn),
        "max_tokens": turn.answer,
        "temperature": 0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _listen(reply: Any, outcome: Outcome, begun: float) -> None:
    """Note when the pieces of an answer come."""
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        document = json.loads(data)
        if "error" in document:
            outcome.error = str(document["error"].get("message"))[:200]
            return
        now = time.monotonic() - begun
        if document["choices"]:
            if outcome.first is None:
                outcome.first = now
            else:
                outcome.gaps.append(now - outcome.end)
            outcome.end = now
        if document.get("usage"):
            outcome.tokens = document["usage"]["completion_tokens"]
    if outcome.error is None:
        outcome.error = "the answer broke off"
