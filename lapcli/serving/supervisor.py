"""Keeps an engine process alive: starts it, listens to it, and starts another when it is gone or hangs."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from lapcli.errors import LapcliError, ModelError
from lapcli.serving.dispatch import Dispatcher
from lapcli.serving.logs import log
from lapcli.serving.protocol import Message, encode

WORKER = (sys.executable, "-m", "lapcli.serving.worker")
_LINE = 2**30
"""Bytes of a message at most: a step's events of many rows, with log-probabilities."""
_LONG_LIFE = 60.0
"""Seconds after which an engine's death is not counted with those before."""
_STILLBORN = 5
"""Engines in succession that die before they are ready, until the server gives up."""
_PAUSE, _LONGEST_PAUSE = 0.125, 30.0
"""Seconds before the next engine, doubled by each that died before a long life."""
_LAST_WORDS = 10.0
"""Seconds that an engine gets to end by itself."""


class Supervisor:
    """Keeps one engine.

    Args:
        settings: what each engine is told.
        dispatcher: is told what the engine says, and when there is none.
        command: that starts one; the descriptor of its socket is appended.

    Attributes:
        pid: of the engine; `None` while there is none.
    """

    def __init__(self, settings: dict[str, Any], dispatcher: Dispatcher, command: Sequence[str] = WORKER):
        self.settings, self.dispatcher, self.command = settings, dispatcher, tuple(command)
        self.pid: int | None = None
        self._stopping = self._lived = False
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Keep an engine until `stop`.

        Raises:
            LapcliError: the first engine could not begin, or engines die again and again.
        """
        deaths = stillborn = 0
        while not self._stopping:
            begun, self._lived = time.monotonic(), False
            why = await self._life()
            if self._stopping:
                return
            self.dispatcher.restarts.add()
            deaths = 1 if time.monotonic() - begun > _LONG_LIFE else deaths + 1
            stillborn = 0 if self._lived else stillborn + 1
            if stillborn >= _STILLBORN or not self.dispatcher.facts:
                # Nobody else kills processes by that signal, most likely.
                killed = f"signal {signal.SIGKILL:d} " in why
                raise ModelError(
                    f"the engine process died while it loaded the model: {why}",
                    "it wanted more memory than this machine has, most likely; see dmesg"
                    if killed
                    else "what it said is above",
                )
            pause = 0.0 if deaths == 1 else min(_LONGEST_PAUSE, _PAUSE * 2**deaths)
            log("engine restarts", "warning", why=why, deaths=deaths, after_seconds=pause)
            await asyncio.sleep(pause)

    async def stop(self) -> None:
        """End the engine: kindly at first."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if not self.dispatcher.ready:
            # It is busy with the model, and has nobody to answer.
            process.kill()
        self._say({"op": "stop"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while process.poll() is None:
                    await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()

    async def _life(self) -> str:
        """Start an engine and listen to it to its end.

        Returns:
            How it ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A terminal's Ctrl-C is not for it.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.pid = process.pid
        log("engine begins", pid=process.pid)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE)
        self._say({"op": "start", "settings": self.settings})
        watch = asyncio.create_task(self._watch(process))
        confused = ""
        try:
            while line := await reader.readline():
                self._hear(line)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                confused = f"it said what nobody understands ({error})"
                process.kill()
        except LapcliError as error:
            # Before there ever was an engine nobody knows that there can be one.
            if not self.dispatcher.facts:
                raise
            confused = error.message
        finally:
            watch.cancel()
            self.pid = None
            # Whatever made it close its socket, it is of no use any more.
            if not self._stopping or process.poll() is None:
                await self._end(process)
            self._writer.close()
            self._writer = None
        why = confused or _end_of(process.returncode)
        log("engine ended", "info" if self._stopping else "error", why=why)
        self.dispatcher.engine_gone(why)
        return why

    def _hear(self, line: bytes) -> None:
        message = json.loads(line)
        if message["op"] == "ready":
            self._lived = True
            self.dispatcher.engine_ready(message, self._say)
            told = {name: message[name] for name in ("path", "rows", "bytes", "beside") if name in message}
            log("engine ready", **told)
        elif message["op"] == "fatal":
            raise LapcliError(message["message"], message["hint"])
        else:
            self.dispatcher.message(message)

    def _say(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    async def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait a moment for a process, then kill it."""
        until = time.monotonic() + (_LAST_WORDS if self._stopping else 1.0)
        while process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(0.02)

    async def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill an engine that has work and says nothing."""
        dispatcher = self.dispatcher
        while True:
            await asyncio.sleep(min(1.0, dispatcher.limits.engine_seconds / 4))
            # Requests are sent after it was last heard of, perhaps long after.
            if not dispatcher.busy:
                dispatcher.heard = time.monotonic()
            elif dispatcher.ready and time.monotonic() - dispatcher.heard > dispatcher.limits.engine_seconds:
                log("engine hangs", "error", seconds=dispatcher.limits.engine_seconds, pid=process.pid)
                process.kill()
                return


def _end_of(code: int | None) -> str:
    if code is None:
        return "nobody knows what"
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
