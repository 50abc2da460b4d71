"""The numbers of an analysis as pictures, PNG and SVG, all in one style that needs no colour to be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lapcli.analysis.results import Analysis
from lapcli.analysis.tables import SETS, SHARES
from lapcli.artifacts import atomic_file
from lapcli.errors import LapcliError

FORMATS = ("png", "svg")
# Light and dark as well as dash, marker and hatch tell the models apart.
_LINES = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#b2182b", "linestyle": "--", "marker": "s"},
    {"color": "#2166ac", "linestyle": "-.", "marker": "^"},
    {"color": "#8c8c8c", "linestyle": ":", "marker": "D"},
)
_HATCHES = ("", "///", "...", "xx")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "lines.markerfacecolor": "white",
    "hatch.linewidth": 0.6,
    # The same numbers give the same file.
    "svg.hashsalt": "lapcli",
}


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        LapcliError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401 -- only whether it is there
    except ImportError as error:
        raise LapcliError("pictures need matplotlib", "pip install matplotlib") from error


def draw(analysis: Analysis, folder: Path) -> list[Path]:
    """Draw every picture that there are numbers for, as `NAME.png` and `NAME.svg`; those of earlier numbers go.

    Returns:
        The files.

    Raises:
        LapcliError: matplotlib is not installed.
    """
    for name in _PICTURES:
        for kind in FORMATS:
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written: list[Path] = []
    for name, (picture, size) in _PICTURES.items():
        with rc_context(_STYLE):
            figure = Figure(figsize=size, layout="constrained")
            FigureCanvasAgg(figure)
            for kind in FORMATS if picture(analysis, figure) else ():
                path = folder / f"{name}.{kind}"
                with atomic_file(path) as temporary:
                    dated: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {}
                    figure.savefig(temporary, format=kind, dpi=150, **dated)
                written.append(path)
    return written


def _few(length: int) -> int:
    """Every how many points a marker stands."""
    return max(1, length // 10)


def _utilisation(analysis: Analysis, figure: Any) -> bool:
    axes = figure.subplots()
    for label, line in zip(analysis.labels, _LINES, strict=False):
        values = analysis.utilisation(label).mean(-1)
        every = _few(len(values))
        axes.plot(analysis.positions, values.tolist(), markevery=every, label=label, **line)
    axes.set(xlabel="tokens seen", ylabel="rank utilisation er(S) / min(K, V)", ylim=(0, None))
    axes.legend()
    return True


def _heads(analysis: Analysis, figure: Any) -> bool:
    others = analysis.labels[1:]
    if not others:
        return False
    axes = figure.subplots()
    base = analysis.utilisation(analysis.labels[0]).mean(0).tolist()
    for label, line in zip(others, _LINES[1:], strict=False):
        found = analysis.pearson(label)
        correlation = "" if found is None else f", Pearson {found:.2f}"
        values = analysis.utilisation(label).mean(0).tolist()
        axes.plot(base, values, **{**line, "linestyle": "none"}, label=f"{label}{correlation}")
    axes.axline((0, 0), slope=1, color="0.6", linestyle=":", linewidth=0.8)
    axes.set(xlabel="rank utilisation of a head, base", ylabel="rank utilisation of the head, other model")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend()
    return True


def _spectra(analysis: Analysis, figure: Any) -> bool:
    panels = figure.subplots(*_grid(len(analysis.base_layers)), sharey=True, squeeze=False).flatten()
    for panel, layer in zip(panels, analysis.base_layers, strict=False):
        for label, line in zip(analysis.labels, _LINES, strict=False):
            values = analysis.spectrum(label, layer["index"]).mean(0)
            numbers = range(1, len(values) + 1)
            panel.semilogy(numbers, values.tolist(), markevery=_few(len(values)), label=label, **line)
        panel.set_title(f"layer {layer['index']}", fontsize=9)
    for panel in panels[len(analysis.base_layers) :]:
        panel.set_axis_off()
    panels[0].legend()
    figure.supxlabel("number of the singular value", fontsize=9)
    figure.supylabel(r"$\sigma_i\,/\,\sigma_1$, mean", fontsize=9)
    return True


def _kappa(analysis: Analysis, figure: Any) -> bool:
    axes = figure.subplots()
    for label, line in zip(analysis.labels, _LINES, strict=False):
        values = analysis.all_kappas(label).sort().values
        # Lower limits are no values: the line ends before them, at the share of the others. A few hundred points draw
        # the same line as a million.
        told = len(values) - analysis.record["floored"][label]
        places = torch.linspace(0, told - 1, min(told, 400)).long()
        shares = ((places + 1) / len(values)).tolist()
        axes.semilogx(values[places].tolist(), shares, markevery=_few(len(places)), label=label, **line)
    axes.set(xlabel=r"condition number of a state $\kappa(S)$", ylabel="share of states up to it", ylim=(0, 1))
    axes.legend()
    return True


def _errors(analysis: Analysis, figure: Any) -> bool:
    found = analysis.record["output_error"]
    if not found:
        return False
    axes = figure.subplots()
    for label, line in zip(found, _LINES[1:], strict=False):
        indices = [layer["index"] for layer in analysis.layers(label)]
        for inputs, fill in (("own", line["color"]), ("base", "white")):
            values = [row[inputs] for row in found[label]]
            whose = "its own inputs" if inputs == "own" else "the base's inputs"
            axes.plot(indices, values, **line, markerfacecolor=fill, label=f"{label}, on {whose}")
    axes.set(xlabel="layer", ylabel=r"error of the mixer's output $\|o - o_b\|\,/\,\|o_b\|$", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return True


def _stability(analysis: Analysis, figure: Any) -> bool:
    found = {label: told for label in analysis.labels if (told := analysis.stability(label)) is not None}
    if not found:
        return False
    contraction, cosine = figure.subplots(1, 2)
    for label, line in zip(found, _LINES, strict=False):
        rows = found[label]["layers"]
        layers, middle = [row["layer"] for row in rows], [row["p50"] for row in rows]
        spread = [[row["p50"] - row["p01"] for row in rows], [row["p99"] - row["p50"] for row in rows]]
        contraction.errorbar(layers, middle, yerr=spread, capsize=3, label=label, **line)
        cosine.plot(layers, [row["cosine"] for row in rows], label=label, **line)
    contraction.set(xlabel="layer", ylabel=r"$\beta\,k\cdot x$, median, 1st to 99th percentile", ylim=(0, None))
    cosine.set(xlabel="layer", ylabel=r"cosine of $S^T q$ and $S^T k$, mean", ylim=(-1, 1))
    for axes in (contraction, cosine):
        axes.xaxis.get_major_locator().set_params(integer=True)
    contraction.legend()
    return True


def _conditioning(analysis: Analysis, figure: Any) -> bool:
    parts = [analysis.conditioning(layer["index"]) for layer in analysis.base_layers]
    there = [part for part in parts if part is not None]
    if not there:
        return False
    whole = torch.cat(there, 1)
    panels = figure.subplots(1, 3)
    for number, (panel, name) in enumerate(
        zip(panels, (r"$\sigma_{min}$", r"$\sigma_{max}$", r"$\kappa$"), strict=True)
    ):
        boxes = panel.boxplot(
            whole[:, :, number].tolist(), patch_artist=True, widths=0.6, medianprops={"color": "black"},
            tick_labels=SETS[: len(whole)], flierprops={"markersize": 3},
        )  # fmt: skip
        for box, hatch in zip(boxes["boxes"], _HATCHES, strict=False):
            box.set(facecolor="white", hatch=hatch)
        panel.set_yscale("log")
        panel.set_ylabel(f"{name} of a head's joint columns")
    return True


def _overlap(analysis: Analysis, figure: Any) -> bool:
    parts = [analysis.overlap(layer["index"]) for layer in analysis.base_layers]
    there = [part for part in parts if part is not None]
    if not there:
        return False
    axes = figure.subplots()
    values = [part[:, 1].tolist() for part in there]
    indices = [str(layer["index"]) for layer in analysis.base_layers]
    boxes = axes.boxplot(values, tick_labels=indices, patch_artist=True, medianprops={"color": "black"})
    for box in boxes["boxes"]:
        box.set(facecolor="white", hatch=_HATCHES[1])
    axes.set(xlabel="layer", ylabel="overlap of the two selections (Jaccard)", ylim=(0, 1.02))
    return True


def _filters(analysis: Analysis, figure: Any) -> bool:
    found = {layer["index"]: analysis.filters(layer["index"]) for layer in analysis.base_layers}
    sides = sorted({side for filters in found.values() for side in filters})
    if not sides:
        return False
    panels = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
    for panel, side in zip(panels, sides, strict=True):
        means = torch.stack([filters[side].mean(1) for filters in found.values()]).mean(0).flip(-1)
        for number, (share, hatch) in enumerate(zip(SHARES, _HATCHES, strict=False)):
            lags = [lag + 0.4 * (number - 0.5) for lag in range(means.shape[1])]
            face = ("#d9d9d9", "white")[number]
            panel.bar(lags, means[number].tolist(), 0.36, label=share, hatch=hatch, facecolor=face, edgecolor="black")
        panel.set(title=f"{side} channels", xlabel="lag, tokens")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("mean absolute tap")
    panels[0].legend()
    return True


def _grid(count: int) -> tuple[int, int]:
    columns = min(6, count) if count <= 6 else min(6, -(-count // 2))
    return -(-count // columns), columns


_PICTURES: dict[str, tuple[Callable[[Analysis, Any], bool], tuple[float, float]]] = {
    "utilisation": (_utilisation, (5, 3.4)),
    "heads": (_heads, (4.2, 4)),
    "spectra": (_spectra, (11, 4.5)),
    "kappa": (_kappa, (5, 3.4)),
    "errors": (_errors, (5, 3.4)),
    "stability": (_stability, (8, 3.2)),
    "conditioning": (_conditioning, (8, 3.2)),
    "overlap": (_overlap, (5, 3.4)),
    "filters": (_filters, (6.5, 3.2)),
}
