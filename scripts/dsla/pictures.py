"""What `look` measured as a picture: a panel a layer, and the mixtures of all layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsla.arms import SEEN
from lapcli.analysis.pictures import require_matplotlib
from lapcli.artifacts import atomic_file
from lapcli.errors import DataError, UsageError

_NAMES = {
    "weight": "the teacher's softmax weight",
    "mixed": "both states",
    "state 0": "history",
    "state 1": "recency",
}
_LINES = {
    "weight": {"color": "#000000", "linestyle": "-"},
    "mixed": {"color": "#8c8c8c", "linestyle": "-"},
    "state 0": {"color": "#2166ac", "linestyle": "--"},
    "state 1": {"color": "#b2182b", "linestyle": "-."},
}
_COLUMNS = 3


def draw(lines: Path, picture: Path, *, length: int) -> None:
    """Draw the lines of `look` as one SVG.

    A teacher's weights add up to 1; norms of contributions are divided by the sum over distances of what both states
    give together, so that shapes compare and the states' parts show.

    Args:
        lines: JSON lines of `looking.look`, of two states a layer.
        picture: the SVG file.
        length: tokens of the windows that were looked at: where the last bin ends.

    Raises:
        DataError: nothing that `look` measured is there, or a line is damaged or of something else.
        UsageError: the last bin begins where the windows end, or beyond.
        LapcliError: matplotlib is not installed.
    """
    layers = SEEN.read([lines])
    if not layers:
        raise DataError(f"{lines}: no line of `look` is there", f"make it with: dsla_study.py look CONVERSION {lines}")
    last = max(layer["edges"][-1] for layer in layers)
    if length <= last:
        raise UsageError(
            f"--length {length}: the last bin of {lines} begins at {last}", "name the length that `look` was given"
        )
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    # The same numbers give the same file; letters stay letters, which is smaller.
    matplotlib.rcParams.update({"svg.hashsalt": "lapcli", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    rows = -(-(len(layers) + 1) // _COLUMNS)
    figure, grid = plt.subplots(rows, _COLUMNS, figsize=(9, 2.6 * rows), layout="constrained", squeeze=False)
    panels = list(grid.flatten())
    for panel, layer in zip(panels, layers, strict=False):
        _by_distance(panel, layer, length)
    for panel in panels[1 : len(layers)]:
        panel.sharey(panels[0])
    panels[0].legend(frameon=False, fontsize=7)
    _mixtures(panels[len(layers)], layers)
    for panel in panels[len(layers) + 1 :]:
        panel.set_axis_off()
    with atomic_file(picture) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    plt.close(figure)


def _by_distance(panel: Any, layer: dict[str, Any], length: int) -> None:
    """Shares by distance of one layer, on two logarithmic axes."""
    edges = layer["edges"]
    ends = [*edges[1:], length]
    # Distance 0, the token itself, has no logarithm: everything stands one further.
    places = [(first + end - 1) / 2 + 1 for first, end in zip(edges, ends, strict=True)]
    widths = [end - first for first, end in zip(edges, ends, strict=True)]
    whole = {
        name: sum(width * value for width, value in zip(widths, layer[name], strict=True))
        for name in ("weight", "mixed")
    }
    for name, style in _LINES.items():
        total = whole["weight" if name == "weight" else "mixed"]
        panel.loglog(places, [value / total for value in layer[name]], label=_NAMES[name], linewidth=1.2, **style)
    panel.set_title(f"layer {layer['layer']}", fontsize=9)
    panel.tick_params(labelsize=7)
    panel.set_xlabel("distance + 1, tokens", fontsize=8)
    panel.set_ylabel("share of all distances", fontsize=8)


def _mixtures(panel: Any, layers: Sequence[dict[str, Any]]) -> None:
    """The learned share of history in each layer."""
    places = range(len(layers))
    history = [layer["mixture"][0] for layer in layers]
    panel.bar(places, history, color="white", edgecolor="#2166ac", hatch="///")
    panel.axhline(0.5, color="0.6", linewidth=0.8, linestyle=":")
    panel.set(ylim=(0, 1), xticks=list(places), xticklabels=[str(layer["layer"]) for layer in layers])
    panel.set_title("share of history in the mixture", fontsize=9)
    panel.tick_params(labelsize=7)
    panel.set_xlabel("layer, in order of conversion", fontsize=8)
