"""Runs front and engine together, from the bound port to the drained end."""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from lapcli.errors import UsageError
from lapcli.serving.assembling import Parts
from lapcli.serving.gate import patient_protocol
from lapcli.serving.logs import log
from lapcli.serving.settings import Limits

_BACKLOG = 2048
_KEEP_ALIVE = 5
_HEAD = 64 * 1024
"""Bytes of a request's first line and headers, at most."""


def bind(host: str, port: int) -> socket.socket:
    """Take the port, before anything that takes long.

    Raises:
        UsageError: somebody has it, or there is no such address here.
    """
    if not 0 <= port < 2**16:
        raise UsageError(f"--port {port}: 0 (any free one) to 65535", "for example --port 8000")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {error}", "for example --host 127.0.0.1 --port 8000") from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        taken.close()
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {host} is taken by another process",
                f"pass another --port, 0 for any free one; or see who has it: ss -ltnp 'sport = :{port}'",
            ) from error
        if code == errno.EACCES:
            raise UsageError(f"port {port} of {host} is for root alone", "pass a --port from 1024 on") from error
        raise UsageError(f"--host {host} --port {port}: {error}", "for example --host 127.0.0.1 --port 8000") from error
    return taken


def address(taken: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Leaves signals to us: what is under way ends before anything is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Running:
    """A server that runs until it is told to end.

    Args:
        parts: of the server.
        taken: the bound socket.
        limits: of the parts.

    Attributes:
        url: where it is.
        name: by which clients call the model.
    """

    def __init__(self, parts: Parts, taken: socket.socket, limits: Limits):
        app, self.dispatcher, self.supervisor, self.name = parts
        self.taken, self.limits = taken, limits
        config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            loop="asyncio",
            http=patient_protocol(limits.header_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=5,
            limit_concurrency=limits.connections,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=_HEAD,
        )
        self.server = _Server(config)
        self.url = address(taken)
        self._end = asyncio.Event()

    def end(self) -> None:
        """Drain and end; said twice, end at once."""
        if self._end.is_set():
            self.dispatcher.fail_all("the server ends")
        self._end.set()

    async def run(self, started: Any = None) -> None:
        """Serve until `end`, SIGTERM or SIGINT.

        Args:
            started: called without arguments once the engine is ready.

        Raises:
            LapcliError: the engine cannot be had.
        """
        _more_files(self.limits.connections)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):
            # Only in a main thread; elsewhere somebody else says when to end.
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.end)
        front = asyncio.create_task(self.server.serve(sockets=[self.taken]))
        engine = asyncio.create_task(self.supervisor.run())
        ending = asyncio.create_task(self._end.wait())
        ready = asyncio.create_task(self._when_ready(started))
        try:
            await asyncio.wait({front, engine, ending}, return_when=asyncio.FIRST_COMPLETED)
            self.dispatcher.draining = True
            if engine.done():
                self.dispatcher.fail_all("there is no engine any more")
                engine.result()
            else:
                await self._drain()
        finally:
            ready.cancel()
            ending.cancel()
            self.server.should_exit = True
            await self.supervisor.stop()
            engine.cancel()
            # Whatever these raise, the one that mattered was raised above.
            await asyncio.gather(front, engine, ready, ending, return_exceptions=True)
            log("ended")

    async def _drain(self) -> None:
        """Let what is under way end, but not for ever."""
        log("draining", seconds=self.limits.drain_seconds)
        try:
            async with asyncio.timeout(self.limits.drain_seconds):
                await self.dispatcher.idle()
        except TimeoutError:
            self.dispatcher.fail_all("the server ends, and this answer took too long")

    async def _when_ready(self, started: Any) -> None:
        while not self.dispatcher.ready:
            await asyncio.sleep(0.02)
        log("serving", url=self.url)
        if started is not None:
            started()


def _more_files(connections: int) -> None:
    """Let this process hold a descriptor for each connection, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
