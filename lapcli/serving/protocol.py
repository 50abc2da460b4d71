"""What front and engine say to each other: one JSON document a line, over a socket pair.

The front says `start` (once, with the `EngineSettings`), `add` (a request and the configuration that it begins as),
`switch` (to another one), `cancel` and `stop`; the engine says `ready` with what it found out (`configurations` among
that), or `fatal`, then `step` after each step that brought something and at least every second, and `failed` for a
request that it cannot do. A `step` has its events, statistics (`lapcli.serving.loop`), and what was `switched`: the
request, its configuration, tokens that were replayed, and seconds from the order on.
"""

import json
import queue
import socket
import threading
from typing import Any

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Inbox:
    """Reads messages in a thread of its own, so that who takes them out never waits for the other side.

    Args:
        connection: where they come from.
    """

    def __init__(self, connection: socket.socket):
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._connection = connection
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._queue.put(json.loads(line))
        finally:
            # The other side is gone.
            self._queue.put(None)

    def take(self, *, wait: bool) -> list[Message | None]:
        """Everything that came; `None` is the end. With `wait`, at least one."""
        found: list[Message | None] = [self._queue.get()] if wait else []
        while True:
            try:
                found.append(self._queue.get_nowait())
            except queue.Empty:
                return found
