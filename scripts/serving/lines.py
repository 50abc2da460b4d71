"""What the lines of this study are of, and what tells them apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.lines import Line, Lines

MODES, FIXED, ENDURANCE = "mode", "fixed memory", "endurance"
"""What a line is of: a mode of serving a conversion, a model at a memory, many requests and the growth of memory."""

TRACE = ("model", "machine", "dtype", "trace", "requests", "time_scale", "length_scale", "max_length", "memory", "caps")
"""What lines of modes have in common that compare."""
MEMORY = ("machine", "dtype", "trace", "requests", "length_scale", "max_length", "memory")
"""What lines of models at a memory have in common."""
_KEYS = {
    MODES: (*TRACE, "mode", "served"),
    FIXED: (*MEMORY, "model"),
    ENDURANCE: ("model", "machine", "concurrency"),
}
_SAID = ("machine", "date", "figures", "command")
LINES = Lines(
    {
        MODES: (*_KEYS[MODES], *_SAID, "drawn"),
        FIXED: (*_KEYS[FIXED], *_SAID, "rows", "peak_memory_bytes"),
        ENDURANCE: (*_KEYS[ENDURANCE], *_SAID),
    },
    "serving_study.py run",
)
"""What `run` writes."""


def key_of(line: Line) -> tuple[Any, ...]:
    """What tells a line from others; of two with the same key the later one counts."""
    return (line["kind"], *(line[name] for name in _KEYS[line["kind"]]))


def lines_of(files: Sequence[Path], kind: str) -> list[Line]:
    """The lines of a kind, each key once; errors as of `studies.lines.Lines.read`."""
    return list({key_of(line): line for line in LINES.read(files, kind)}.values())
