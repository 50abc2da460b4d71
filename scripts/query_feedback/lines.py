"""What the lines of this study are of, and what tells them apart."""

from pathlib import Path
from typing import Any

from studies import lines

TRAINING, PILOT, THROUGHPUT, RECOVERY = "training", "pilot", "throughput", "recovery"
"""What a line is of; one that does not say is of a training."""

RUN = ("variant", "seed", "tokens", "text", "mixture", "batch", "optimizer", "lr")
"""What tells trainings apart."""
_KEYS = {
    TRAINING: (*RUN, "limit", "dtype"),
    PILOT: (*RUN, "limit", "dtype"),
    THROUGHPUT: ("variant", "length", "batch", "dtype", "machine"),
    RECOVERY: ("base", "digest", "method", "ratio", "arm", "seed", "tokens", "text", "limit", "batch", "length", "lr"),
}


def kind_of(line: dict[str, Any]) -> str:
    """What a line is of."""
    return line.get("kind", TRAINING)


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a line from others; of two with the same key the later one counts."""
    kind = kind_of(line)
    return (kind, *(line.get(name) for name in _KEYS[kind]))


def read_lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a file, or those of one kind."""
    return lines.read_lines(path, kind, unsaid=TRAINING)
