"""Rows as pictures: time over batch or prompt length, a line for each width and way, and the floor."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lapcli.artifacts.atomic import atomic_file
from lapcli.benchmarks.speed.results import Row
from lapcli.errors import ModelError, UsageError

_FORMATS = (".png", ".svg", ".pdf")
_BY_TOKENS = ("prefill", "prefill mixer", "prefill operator")


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before there is anything to draw.

    Raises:
        ModelError: matplotlib is not installed.
        UsageError: the file's ending is no format, or it cannot lie there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModelError("matplotlib is not installed, which draws --plot", "pip install matplotlib")
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot {path}: the ending is none of {', '.join(_FORMATS)}")
    above = next((parent for parent in path.absolute().parents if parent.exists()), path)
    if path.is_dir():
        raise UsageError(f"--plot {path} is a folder", "name a file")
    if not above.is_dir():
        raise UsageError(f"--plot {path} lies in {above}, which is no folder", "name another file")


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Write a picture of all steps and prompts that were measured, in the format of the file's ending.

    Returns:
        Whether there was anything to draw.

    Raises:
        ModelError: matplotlib is not installed.
        ArtifactError: the file cannot be written.
        UsageError: the file's ending is no format.
    """
    check_picture(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [
        what
        for what in dict.fromkeys(row.cell.what for row in rows if row.seconds is not None)
        if what not in ("latency", "memory", "generate")
    ]
    if not kinds:
        return False
    figure, axes = plt.subplots(1, len(kinds), figsize=(6 * len(kinds), 4.5), squeeze=False)
    for place, what in zip(axes[0], kinds, strict=True):
        _panel(place, what, [row for row in rows if row.cell.what == what and row.seconds is not None])
    figure.tight_layout()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip("."), dpi=150)
    plt.close(figure)
    return True


def _panel(axes, what: str, rows: Sequence[Row]) -> None:
    by_tokens = what in _BY_TOKENS
    for index, width in enumerate(sorted({row.cell.key_width for row in rows}, reverse=True)):
        colour = f"C{index % 10}"
        floors: dict[int, float] = {}
        for style, way in zip("-:.", dict.fromkeys(row.cell.way for row in rows), strict=False):
            points: dict[int, float] = {}
            for row in rows:
                if row.cell.key_width == width and row.cell.way == way and row.seconds is not None:
                    at = row.cell.batch * row.cell.tokens if by_tokens else row.cell.batch
                    points[at] = row.seconds * 1e3
                    if row.floor_seconds:
                        floors[at] = row.floor_seconds * 1e3
            if points:
                places = sorted(points)
                line = {"-": "-", ":": ":", ".": "-."}[style]
                axes.plot(
                    places, [points[at] for at in places], line, color=colour, marker="o", label=f"{way}, K {width}"
                )
        if floors:
            places = sorted(floors)
            axes.plot(places, [floors[at] for at in places], color=colour, alpha=0.35, linewidth=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of all prompts" if by_tokens else "batch")
    axes.set_ylabel("ms; thick: the floor")
    axes.set_title(what)
    axes.legend(fontsize=7)
