"""What stands before the routes: who may come in, how much a request may hold, and how long it may take."""

import asyncio
import ipaddress
import json
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from lapcli.serving.answers import error_document
from lapcli.serving.keys import ApiKeys
from lapcli.serving.logs import log
from lapcli.serving.metrics import Registry
from lapcli.serving.settings import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/metrics")
"""Paths that need no key: whoever watches a server has none."""
_KNOWN = (*OPEN, "/v1/models", "/v1/completions", "/v1/chat/completions", "/openapi.json", "/docs")
"""What metrics tell apart; clients may ask for any path."""


class Refused(Exception):
    """A request that gets no further.

    Args:
        status: of HTTP.
        message: why.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


class Gate:
    """Wraps the application.

    A request gets `state["client"]` (the name of its key, or its address where there are no keys), `state["id"]` and
    `state["log"]`, which handlers add to. Whatever it ended by is one log line.

    Args:
        app: the application.
        limits: see there.
        keys: who may come in.
        registry: where its metrics go.
    """

    def __init__(self, app: App, limits: Limits, keys: ApiKeys, registry: Registry):
        self.app, self.limits, self.keys = app, limits, keys
        self.requests = registry.counter("lapcli_requests_total", "Requests by path and status.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.monotonic()
        name = uuid.uuid4().hex
        notes: dict[str, Any] = {}
        status = 0
        path = scope["path"]

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            try:
                async with asyncio.timeout(self.limits.send_seconds):
                    await send(message)
            except TimeoutError:
                # Who takes nothing in for so long is gone, or wants to hold us up.
                notes["reason"] = "slow reader"
                raise ConnectionAbortedError("the client does not read its answer") from None

        try:
            scope.setdefault("state", {}).update(id=name, log=notes)
            scope["state"]["client"] = self._client(scope)
            self._check_length(scope)
            await self.app(scope, self._limited(receive), answer)
        except Refused as refused:
            await self._refuse(refused, answer, status)
        except ConnectionAbortedError:
            # Closing would wait until the client has read what was written.
            scope["state"].get("abort", lambda: None)()
            await asyncio.sleep(0)
        finally:
            known = path if path in _KNOWN else "other"
            self.requests.add(path=known, status=str(status))
            if path not in OPEN:
                seconds = round(time.monotonic() - begun, 4)
                client = scope["state"].get("client", "nobody")
                log("request", id=name, client=client, path=path[:256], status=status, seconds=seconds, **notes)

    def _client(self, scope: Scope) -> str:
        """Whose request it is."""
        if len(self.keys) and scope["path"] not in OPEN:
            header = dict(scope["headers"]).get(b"authorization")
            found = self.keys.client(None if header is None else header.decode("latin-1"))
            if found is None:
                raise Refused(401, "a valid API key is needed: Authorization: Bearer KEY")
            return found
        return (scope.get("client") or ("nobody",))[0]

    def _check_length(self, scope: Scope) -> None:
        """Refuse a body that says itself that it is too long."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.body_bytes:
            raise Refused(413, f"a request may have {self.limits.body_bytes} bytes at most")

    def _limited(self, receive: Receive) -> Receive:
        """Count what comes, and do not wait for ever."""
        until = time.monotonic() + self.limits.body_seconds
        seen, whole = 0, False

        async def take() -> MutableMapping[str, Any]:
            nonlocal seen, whole
            if whole:
                # Only the end of the connection can follow, and for that one may wait.
                return await receive()
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, f"the body did not come within {self.limits.body_seconds:g} s") from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if seen > self.limits.body_bytes:
                    raise Refused(413, f"a request may have {self.limits.body_bytes} bytes at most")
            return message

        return take

    async def _refuse(self, refused: Refused, send: Send, status: int) -> None:
        if status:
            return
        body = json.dumps(error_document(refused.status, refused.message)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        # The rest of a body that nobody reads would be taken for the next request.
        headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def patient_protocol(seconds: float) -> type[H11Protocol]:
    """The server's protocol, which besides closes connections whose request does not come within so many seconds."""

    class Patient(H11Protocol):
        """Waits for headers so long and no longer."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "abort": transport.abort}
            self._arm()

        def data_received(self, data: bytes) -> None:
            if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                self._arm()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._disarm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            self._timer = self.loop.call_later(seconds, self._give_up)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
                self.transport.close()

    return Patient


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
