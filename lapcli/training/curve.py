"""The training curve: one JSON object a line, added to as training goes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lapcli.artifacts import atomic_file


class Curve:
    """Lines of a curve, each with its `step`.

    Args:
        path: the file; made with the first line.
    """

    def __init__(self, path: Path):
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """Those that are whole; a process that was killed may have left the last one short."""
        if not self.path.is_file():
            return []
        found: list[dict[str, Any]] = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                read = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(read, dict) and isinstance(read.get("step"), int):
                found.append(read)
        return found

    def truncate(self, step: int | None) -> None:
        """Drop what is later than a step, which will be trained again; with `None` everything."""
        if not self.path.is_file():
            return
        kept = [] if step is None else [line for line in self.lines() if line["step"] <= step]
        with atomic_file(self.path) as temporary:
            temporary.write_text("".join(_encoded(line) for line in kept))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line, for whoever follows the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(_encoded({"step": step, **values}))

    def sync(self) -> None:
        """See that what was written is on the disk."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def _encoded(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
