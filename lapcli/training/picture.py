"""The training curve as a picture."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lapcli.artifacts import atomic_file


def draw_curve(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw cross entropy and, beside a teacher, KL against tokens, validation among them, in black and white.

    Args:
        lines: of `lapcli.training.curve.Curve`.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens = {0: 0}
    steps: list[Mapping[str, Any]] = []
    validations: list[Mapping[str, Any]] = []
    for line in lines:
        if "tokens" in line:
            tokens[line["step"]] = line["tokens"]
            steps.append(line)
        elif "validation" in line:
            validations.append(line)
    shown = {"cross_entropy": "cross entropy", "kl": "KL from the teacher"}
    if not any(line["kl"] for line in steps):
        del shown["kl"]
    figure = Figure(figsize=(7, 3 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, label) in zip(panels, shown.items(), strict=True):
        axes.plot([line["tokens"] for line in steps], [line[name] for line in steps], "-", color="0.6", lw=0.8)
        axes.plot(
            [tokens.get(line["step"], 0) for line in validations],
            [line["validation"][name] for line in validations],
            "ko--", ms=4, lw=1,
        )  # fmt: skip
        axes.set_ylabel(f"{label}, nats a token")
        axes.grid(alpha=0.3)
    panels[0].legend(["training step", "validation"], frameon=False)
    panels[-1].set_xlabel("tokens")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
