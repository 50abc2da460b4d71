"""Results as JSON lines: one for each finished piece of work, so that what different days made adds up."""

import json
import os
import platform
from pathlib import Path
from typing import Any


def read_lines(path: Path, kind: str | None = None, unsaid: str | None = None) -> list[dict[str, Any]]:
    """The lines of a file, or those of one kind; a last line that was cut short is none.

    Args:
        path: of the file, which need not be there.
        kind: which; `None` for all.
        unsaid: the kind of a line that does not say its own.
    """
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in found if kind in (None, line.get("kind", unsaid))]


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file, after whatever a process that was killed left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.is_file() or not path.stat().st_size or path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def machine() -> str:
    """Device, torch and Python."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"
