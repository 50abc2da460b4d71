"""Structured log lines: one JSON object a line on stderr, without prompts, answers or keys."""

import contextlib
import json
import logging
import sys
import time
from typing import Any


def log(event: str, level: str = "info", **fields: Any) -> None:
    """Write a line.

    Args:
        event: what happened, a word or two.
        level: `info`, `warning` or `error`.
        fields: what else there is to say; JSON takes each, and escapes what clients made of them.
    """
    line = json.dumps({"time": round(time.time(), 3), "level": level, "event": event, **fields}, default=str)
    # In one piece, since the engine writes to the same place.
    # Who reads them may be gone; requests go on.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class _JsonHandler(logging.Handler):
    """Writes what libraries log in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        fields = {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        log(record.name, record.levelname.lower(), **fields)


def log_libraries() -> None:
    """Let the HTTP server's own warnings become such lines."""
    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [_JsonHandler()], False
        logger.setLevel(logging.WARNING)
