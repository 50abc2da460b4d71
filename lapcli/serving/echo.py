"""A server whose engine has no model: it answers with the time, so that what is around an engine can be measured.

`python -m lapcli.serving.echo front MODEL LENGTH` serves, with the model's tokenizer, and prints its URL as
`lapcli serve --json` does. `python -m lapcli.serving.echo engine FD` is the engine.

Each token of an answer is two numbers with a space behind each: when the engine got the request, and when it said the
token, by the clock that all processes of a machine share.
"""

import asyncio
import json
import os
import socket
import sys
import time

from lapcli.serving.protocol import Inbox, Message, encode

PACE = 0.05
"""Seconds between two steps: long enough for a slow front to be done with the last one."""
ROWS = 64


def front(model: str, length: int) -> None:
    """Serve until SIGTERM."""
    from lapcli.families.source import resolve_model
    from lapcli.serving.assembling import assemble
    from lapcli.serving.keys import ApiKeys
    from lapcli.serving.server import Running, bind
    from lapcli.serving.settings import EngineSettings, Limits

    limits, settings = Limits(), EngineSettings(model, "cpu", "float32", max_length=length)
    command = (sys.executable, "-m", "lapcli.serving.echo", "engine")
    parts = assemble(resolve_model(model), settings, limits, ApiKeys([]), command=command)
    running = Running(parts, bind("127.0.0.1", 0), limits)

    def started() -> None:
        print(json.dumps({"url": running.url, "model": running.name, "pid": os.getpid()}), flush=True)

    asyncio.run(running.run(started))


def engine(descriptor: int) -> None:
    """Answer with the time, a token each `PACE` seconds, all in step; the first one at once where nothing runs."""
    connection = socket.socket(fileno=descriptor)
    inbox = Inbox(connection)
    rows: dict[str, list[float]] = {}
    due = 0.0
    while True:
        messages = inbox.take(wait=not rows)
        now = time.monotonic()
        for message in messages:
            if message is None or message["op"] == "stop":
                return
            if message["op"] == "start":
                connection.sendall(encode({"op": "ready", **_facts(message["settings"]["max_length"])}))
            elif message["op"] == "add":
                rows[message["id"]] = [now, message["settings"]["max_new_tokens"]]
            elif message["op"] == "cancel":
                rows.pop(message["id"], None)
        if rows and now >= due:
            connection.sendall(encode(_step(rows)))
            due = now + PACE if rows else 0.0
        time.sleep(min(0.001, max(0.0, due - now)))


def _facts(length: int) -> Message:
    return {"max_length": length, "rows": ROWS, "vocabulary": 2**31, "path": "echo", "bytes": {}, "stats": _stats(0)}


def _stats(active: int) -> Message:
    """As many figures as an engine tells."""
    from lapcli.serving.dispatch import TOLD

    return dict.fromkeys((*TOLD, "waiting", "steps", "shrunk", "memory", "peak_memory"), 0) | {
        "active": active,
        "rows": ROWS,
        "queued": [],
    }


def _step(rows: dict[str, list[float]]) -> Message:
    """A token of each row."""
    events: list[list[object]] = []
    now = time.monotonic()
    for name, row in list(rows.items()):
        row[1] -= 1
        events.append([name, [1], f"{row[0]:.6f} {now:.6f} ", None if row[1] else "length", []])
        if not row[1]:
            del rows[name]
    return {"op": "step", "events": events, "switched": [], "stats": _stats(len(rows))}


if __name__ == "__main__":
    if sys.argv[1] == "front":
        front(sys.argv[2], int(sys.argv[3]))
    else:
        engine(int(sys.argv[2]))
