"""Pages in headless Chromium, where one is installed: what it says of them, how they lie, what it prints.

Chromium is spoken to over two pipes by its own protocol (DevTools), so that no driver and no port is needed.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 60.0

_COMPLAINTS = {
    "Runtime.consoleAPICalled": lambda said: " ".join(str(each.get("value", each)) for each in said["args"]),
    "Runtime.exceptionThrown": lambda said: said["exceptionDetails"]["text"],
    "Log.entryAdded": lambda said: said["entry"]["text"],
}
"""Events in which a page's console says something, and what."""


def installed() -> str | None:
    """The browser's path, or `None`."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own.

    Attributes:
        complaints: what the console has said.
        asked_for: the addresses that were loaded, the page's own too.
    """

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            FileNotFoundError: there is none.
        """
        path = installed()
        if path is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = [
            path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe",
        ]  # fmt: skip
        # The protocol's pipes are numbers 3 and 4, which Python has no way to promise.
        shell = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(read, write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer.

        Raises:
            RuntimeError: the answer is an error.
            TimeoutError: there is none, or the browser ended.
        """
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            said["sessionId"] = self._session
        os.write(self._write, json.dumps(said).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']['message']}")
                return heard["result"]

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Show a file in a window of so many pixels, whole when this returns."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._hear()

    def evaluate(self, expression: str) -> Any:
        """What an expression of JavaScript gives on the page, JSON-able.

        Raises:
            RuntimeError: it throws.
        """
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "it threw"))
        return found["result"].get("value")

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.ask("Page.printToPDF")["data"])

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _hear(self) -> dict[str, Any]:
        """The next message; what it says of the page is noted."""
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._read, 1 << 16) if ready else b""
            if not more:
                raise TimeoutError("the browser ended, or does not answer")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        heard = json.loads(message)
        if "method" in heard:
            self._events.append(heard)
            if complaint := _COMPLAINTS.get(heard["method"]):
                self.complaints.append(complaint(heard["params"]))
            if heard["method"] == "Network.requestWillBeSent":
                self.asked_for.append(heard["params"]["request"]["url"])
        return heard
