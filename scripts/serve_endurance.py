"""Let `lapcli serve` answer many requests, some of them broken off or wrong, and say how its memory grows.

python scripts/serve_endurance.py --requests 20000             # slope of memory, front and engine
python scripts/serve_endurance.py --requests 0 --connections 1000   # as many streams at one time

Starts a server of its own on a free port of this machine, with a tiny model unless one is named, and prints JSON.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

WARM = 0.3
"""Of the requests whose memory is not judged: caches fill and allocators grow."""
PROMPTS = 2000
"""Different prompts. A tokenizer keeps up to 10,000 words, and would go on filling that with ever new ones."""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=0, help="streams that are open at one time, afterwards")
    parser.add_argument("--seconds", type=float, help="after which no more of them are sent; default: all are")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--model", help="default: a tiny Gated DeltaNet")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or _tiny(Path(folder) / "tiny")
        with _server(model) as (url, process):
            found: dict[str, Any] = {"model": model}
            if asked.requests:
                found["endurance"] = await endure(url, process, asked)
            if asked.connections:
                found["connections"] = await crowd(url, process, asked.connections)
    print(json.dumps(found, indent=1))


def _tiny(folder: Path) -> str:
    from lapcli.testing.models import tiny_gated_deltanet

    return str(tiny_gated_deltanet(folder, max_position_embeddings=512))


@contextlib.contextmanager
def _server(model: str) -> Any:
    """A server as a process; its URL and the process."""
    room = ["--max-rows", "32", "--max-waiting", "4000", "--max-per-client", "4000", "--max-connections", "4096"]
    command = [sys.executable, "-m", "lapcli", "serve", model, "--port", "0", "--json", *room]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        head = ""
        while not head.rstrip().endswith("}"):
            line = server.stdout.readline()
            if not line:
                raise SystemExit("the server did not begin")
            head += line
        yield json.loads(head)["url"], psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(60)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Bytes that front and engine hold."""
    return process.memory_info().rss, sum(child.memory_info().rss for child in process.children())


async def endure(url: str, process: psutil.Process, asked: argparse.Namespace) -> dict[str, Any]:
    """Send requests, so many at a time, and watch memory."""
    requests, concurrency = asked.requests, asked.concurrency
    draw = random.Random(asked.seed)
    prompts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 120))) for _ in range(PROMPTS)]
    kinds = draw.choices(("whole", "stream", "broken off", "wrong", "scored"), (40, 30, 15, 5, 10), k=requests)
    statuses: Counter[str] = Counter()
    samples: list[tuple[int, int, int]] = []
    done = 0
    queue = iter(enumerate(kinds))
    begun = time.monotonic()

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal done
        for number, kind in queue:
            if asked.seconds is not None and time.monotonic() - begun > asked.seconds:
                return
            statuses[f"{kind}: {await _ask(session, url, number, kind, draw, prompts)}"] += 1
            done += 1
            if done % max(1, min(100, requests // 200)) == 0:
                samples.append((done, *_memory(process)))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    seconds = time.monotonic() - begun
    judged = [sample for sample in samples if sample[0] > WARM * done]
    return {
        "requests": done,
        "concurrency": concurrency,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(statuses.items())),
        "front": _growth([(each[0], each[1]) for each in judged]),
        "engine": _growth([(each[0], each[2]) for each in judged]),
        "left_over": await _left_over(url),
    }


async def _ask(
    session: aiohttp.ClientSession, url: str, number: int, kind: str, draw: random.Random, prompts: list[str]
) -> str:
    body: dict[str, Any] = {
        "prompt": prompts[number % PROMPTS],
        "max_tokens": draw.randint(1, 24),
        "temperature": draw.choice((0, 1)),
        "seed": number,
        "ignore_eos": True,
        "stream": kind in ("stream", "broken off"),
    }
    if kind == "wrong":
        body["max_tokens"] = draw.choice((0, "many", 10**6))
    if kind == "scored":
        body["logprobs"] = 5
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if kind == "broken off":
            await reply.content.readline()
            reply.close()
            return "broken off"
        await reply.read()
        return str(reply.status)


def _growth(samples: list[tuple[int, int]]) -> dict[str, float]:
    """The slope of memory over requests, by least squares, with its standard error."""
    numbers, values = [each[0] for each in samples], [each[1] for each in samples]
    slope, intercept = statistics.linear_regression(numbers, values)
    left = [value - slope * number - intercept for number, value in samples]
    middle = statistics.fmean(numbers)
    spread = sum((number - middle) ** 2 for number in numbers)
    error = (sum(each**2 for each in left) / (len(samples) - 2) / spread) ** 0.5
    return {
        "bytes_first": values[0],
        "bytes_last": values[-1],
        "bytes_most": max(values),
        "bytes_a_request": round(slope, 1),
        "standard_error": round(error, 1),
    }


async def _left_over(url: str) -> dict[str, float]:
    """What the server still holds when nobody asks for anything any more; all of it should be 0."""
    names = ("lapcli_active", "lapcli_waiting", "lapcli_engine_restarts_total")
    for _ in range(100):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        found = {name: float(line.split()[1]) for line in lines for name in names if line.startswith(name + " ")}
        if not any(found.values()):
            break
        await asyncio.sleep(0.1)
    return found


async def crowd(url: str, process: psutil.Process, connections: int) -> dict[str, Any]:
    """Open so many streams at one time, and read them all."""
    open_now = most = 0
    body = {"prompt": "abc", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}

    async def read(session: aiohttp.ClientSession) -> tuple[int, float, bool]:
        nonlocal open_now, most
        begun = time.monotonic()
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            open_now += 1
            most = max(most, open_now)
            text = await reply.text()
            open_now -= 1
        return reply.status, time.monotonic() - begun, text.endswith("data: [DONE]\n\n")

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        begun = time.monotonic()
        replies = await asyncio.gather(*(read(session) for _ in range(connections)))
        seconds = time.monotonic() - begun
    return {
        "streams": connections,
        "open_at_one_time": most,
        "statuses": dict(Counter(str(status) for status, _, _ in replies)),
        "whole": sum(whole for _, _, whole in replies),
        "seconds": round(seconds, 2),
        "slowest_seconds": round(max(taken for _, taken, _ in replies), 2),
        "front_bytes": _memory(process)[0],
        "left_over": await _left_over(url),
    }


if __name__ == "__main__":
    asyncio.run(main())
