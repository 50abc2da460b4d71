"""What the lines of this study are of, and what tells them apart."""

from pathlib import Path
from typing import Any

from studies.lines import Line, Lines

TRAINING, PILOT, THROUGHPUT, RECOVERY = "training", "pilot", "throughput", "recovery"
"""What a line is of; one that does not say is of a training."""

RUN = ("variant", "seed", "tokens", "text", "mixture", "batch", "optimizer", "lr")
"""What tells trainings apart."""
_MEASURED = ("machine", "date", "rows")
_TRAINED = (*RUN, "limit", "dtype", *_MEASURED, "commands", "training")
LINES = Lines(
    {
        TRAINING: _TRAINED,
        PILOT: _TRAINED,
        THROUGHPUT: ("variant", "length", "batch", "dtype", "machine", "date", "command", "detail", "seconds",
                     "trials", "tokens_per_second"),
        RECOVERY: ("base", "digest", "method", "ratio", "arm", "seed", "tokens", "text", "limit", *_MEASURED,
                   "commands"),
    },
    "query_feedback_study.py run, pilot, throughput or recover",
    unsaid=TRAINING,
)  # fmt: skip
"""What the commands of the study write."""
_KEYS = {
    TRAINING: (*RUN, "limit", "dtype"),
    PILOT: (*RUN, "limit", "dtype"),
    THROUGHPUT: ("variant", "length", "batch", "dtype", "machine"),
    RECOVERY: ("base", "digest", "method", "ratio", "arm", "seed", "tokens", "text", "limit", "batch", "length", "lr"),
}


def key_of(line: Line) -> tuple[Any, ...]:
    """What tells a line from others; of two with the same key the later one counts."""
    kind = LINES.kind_of(line)
    return (kind, *(line.get(name) for name in _KEYS[kind]))


def read_lines(path: Path, kind: str | None = None) -> list[Line]:
    """The lines of a file, or those of one kind; see `studies.lines.Lines.read`."""
    return LINES.read([path], kind)
