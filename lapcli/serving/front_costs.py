"""What lies between a client and an engine, measured with an engine that only says the time (`lapcli.serving.echo`)."""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from lapcli.errors import ModelError
from lapcli.families.loading import load_tokenizer
from lapcli.families.source import resolve_model
from lapcli.serving.costs import FrontCosts
from lapcli.serving.echo import ROWS
from lapcli.serving.replay_client import Client
from lapcli.serving.replay_engines import ready_server
from lapcli.serving.replay_texts import Prompts
from lapcli.serving.replay_trace import Turn

_REQUESTS = 12
_STEPS = 20
_FEW, _MANY = 1, ROWS // 2
"""Streams at one time, of which a step has a token each."""
_LONGEST = 1024


class _Probe(NamedTuple):
    """Of one request: seconds until the engine had it; and when tokens were said, and when they were here."""

    request: float
    tokens: list[tuple[float, float]]


def measure_front(model: str, length: int) -> FrontCosts:
    """Start a server of a model's front, with another engine, and ask it.

    Args:
        model: whose tokenizer it has.
        length: tokens of a request, at most.

    Raises:
        LapcliError: it did not begin; a package of the extra is missing.
    """
    command = [sys.executable, "-m", "lapcli.serving.echo", "front", model, str(length)]
    with ready_server(command, f"the front of {model}") as url:
        return asyncio.run(measure_front_at(url, Prompts(load_tokenizer(resolve_model(model)), 0), length))


async def measure_front_at(url: str, prompts: Prompts, length: int) -> FrontCosts:
    """The same, at a server that runs, of an engine that says the time."""
    client = Client(url)
    short, long = 1, max(2, min(_LONGEST, length - 2 * _STEPS))
    async with client.session() as session:
        requests: dict[int, float] = {}
        for tokens in (short, short, long):
            # The first ones find everything cold.
            found = [await _ask(client, session, prompts, number, tokens, 1) for number in range(_REQUESTS)]
            requests[tokens] = statistics.median(each.request for each in found)
        delays: dict[int, float] = {}
        for streams in (_FEW, _FEW, _MANY):
            asked = (_ask(client, session, prompts, number, short, _STEPS) for number in range(streams))
            delays[streams] = _slowest(await asyncio.gather(*asked))
    token = max(0.0, (requests[long] - requests[short]) / (long - short))
    more = max(0.0, (delays[_MANY] - delays[_FEW]) / (_MANY - _FEW))
    return FrontCosts(max(0.0, requests[short] - token * short), token, delays[_FEW], more)


def _slowest(probes: Sequence[_Probe]) -> float:
    """Seconds from a step until the last of its tokens was here, in the middle of all steps."""
    arrived: dict[float, float] = {}
    for said, here in (token for probe in probes for token in probe.tokens):
        arrived[said] = max(here, arrived.get(said, 0.0))
    return statistics.median(here - said for said, here in arrived.items())


async def _ask(client: Client, session: Any, prompts: Prompts, number: int, prompt: int, tokens: int) -> _Probe:
    """One request, as a replay sends and reads it."""
    turn = Turn(0.0, number, (prompt,), tokens, prompt)
    body = json.dumps({"prompt": prompts.of(turn), "max_tokens": tokens, "temperature": 0, "stream": True}).encode()
    sent = time.monotonic()
    got, found = 0.0, []
    headers = {"content-type": "application/json"}
    async with session.post(f"{client.base}/v1/completions", data=body, headers=headers) as reply:
        if reply.status != 200:
            raise ModelError(f"a server without a model answers {reply.status}: {await reply.text()}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                here, choices = time.monotonic(), json.loads(line[6:])["choices"]
                words = choices[0]["text"].split() if choices else []
                # Several tokens that came together are as late as the first of them.
                if words:
                    got = float(words[0])
                    found.append((float(words[1]), here))
    return _Probe(got - sent, found)
