"""A server in this process for tests, with an engine of its own, and plain requests to it."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.families.source import resolve_model
from lapcli.serving.assembling import assemble
from lapcli.serving.keys import ApiKeys
from lapcli.serving.policy import Policy
from lapcli.serving.server import Running, bind
from lapcli.serving.settings import EngineSettings, Limits


class Reply(NamedTuple):
    """What came of a request.

    Attributes:
        status: of HTTP.
        headers: by their names in lower case.
        body: whole.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The server-sent events; the last one as text."""
        datas = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


class LocalServer:
    """A running server.

    Args:
        running: it.
        loop: where it runs.
    """

    def __init__(self, running: Running, loop: asyncio.AbstractEventLoop):
        self.running, self.loop = running, loop
        self.port = int(running.url.rpartition(":")[2])

    def connect(self, timeout: float = 120.0) -> http.client.HTTPConnection:
        """A connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request: bytes as they are, everything else as JSON."""
        given = {"content-type": "application/json", **(headers or {})}
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            connection.request(method or ("GET" if body is None else "POST"), path, raw, given)
            got = connection.getresponse()
            return Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> "OpenStream":
        """Begin to read an answer as it comes."""
        return OpenStream(self.connect(), path, {**body, "stream": True}, headers or {})

    def metric(self, line: str) -> float:
        """The value of a metric, by its name and labels as they are written."""
        for found in self.send("/metrics").body.decode().splitlines():
            if found.startswith(line + " "):
                return float(found.rpartition(" ")[2])
        return 0.0

    def wait_for(self, line: str, value: float, seconds: float = 20.0) -> None:
        """Wait until a metric has a value.

        Raises:
            AssertionError: it never had.
        """
        until = time.monotonic() + seconds
        while (found := self.metric(line)) != value:
            assert time.monotonic() < until, f"{line} is {found}, not {value}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def held(self) -> Generator[int]:
        """Let the engine stand still while the block lasts, so that all that is sent meets there.

        Yields:
            Its process, which may be killed meanwhile.
        """
        pid = self.running.supervisor.pid
        assert pid is not None, "there is no engine"
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class OpenStream:
    """An answer that is being read.

    Args:
        connection: a fresh one.
        path: of the request.
        body: of the request.
        headers: more of them.
    """

    def __init__(self, connection: http.client.HTTPConnection, path: str, body: Any, headers: dict[str, str]):
        self.connection = connection
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        self.response = connection.getresponse()

    def __iter__(self) -> Iterator[Any]:
        for line in self.response:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield data.decode() if data == b"[DONE]" else json.loads(data)

    def close(self) -> None:
        """Vanish."""
        self.response.close()
        self.connection.close()


@contextlib.contextmanager
def local_server(
    model: Path | str,
    *,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    command: Sequence[str] | None = None,
    policy: Policy | None = None,
    **settings: Any,
) -> Generator[LocalServer]:
    """Serve a model on a free port of this machine while the block lasts.

    Args:
        model: a directory or a name.
        limits: see there.
        keys: of the API.
        command: that starts the engine; default: lapcli's own.
        policy: which configuration a request gets; default: the only one.
        settings: of the engine, beside model, device and dtype.

    Yields:
        The server, with its engine ready.

    Raises:
        AssertionError: it did not begin, or did not end.
    """
    source = resolve_model(str(model))
    limits = limits or Limits()
    wanted = EngineSettings(model=str(model), device="cpu", dtype="float32", **settings)
    parts = assemble(source, wanted, limits, ApiKeys(list(keys)), command=command, policy=policy)
    running = Running(parts, bind("127.0.0.1", 0), limits)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    failure: list[BaseException] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(running.run(ready.set))
        except Exception as error:
            failure.append(error)
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            ready.set()

    thread = threading.Thread(target=serve, name="server")
    thread.start()
    try:
        assert ready.wait(120), "the server did not begin"
        if failure:
            raise failure[0]
        yield LocalServer(running, loop)
    finally:
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(running.end)
        thread.join(60)
        assert not thread.is_alive(), "the server did not end"
