"""Pictures can be read without colour, and are drawn for as many models as a run has."""

import io
from itertools import combinations

import pytest

from lapcli.analysis.pictures import _HATCHES, _LINES, _STYLE
from lapcli.analysis.tables import SETS, SHARES


def luminance(colour):
    """Relative, of `#rrggbb` (IEC 61966-2-1)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_there_is_a_line_for_each_model_of_a_run_and_a_hatch_for_each_set():
    # base, sliced, recovered, control
    assert len(_LINES) == 4
    assert len(_HATCHES) >= max(len(SETS), len(SHARES))


def test_lines_differ_in_dash_and_in_marker_and_stand_out_from_paper():
    for name in ("linestyle", "marker"):
        assert len({line[name] for line in _LINES}) == len(_LINES)
    assert len(set(_HATCHES)) == len(_HATCHES)
    for line in _LINES:
        # WCAG 2.1 wants 3 : 1 of what is needed to understand a graphic.
        assert 1.05 / (luminance(line["color"]) + 0.05) >= 3


def test_in_grey_they_are_told_apart():
    """Each line and marker alone, drawn in grey: no two give nearly the same picture."""
    matplotlib = pytest.importorskip("matplotlib")
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = []
    with matplotlib.rc_context(_STYLE):
        for line in _LINES:
            figure = Figure(figsize=(3, 1), dpi=100)
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            axes.plot(range(6), [0] * 6, **{**line, "color": "#555555"})
            axes.set_axis_off()
            file = io.BytesIO()
            figure.savefig(file, format="raw")
            drawn.append(np.frombuffer(file.getvalue(), np.uint8).reshape(-1, 4)[:, 0].astype(int))
    for one, other in combinations(drawn, 2):
        ink = min((255 - picture).sum() for picture in (one, other))
        assert abs(one - other).sum() > 0.2 * ink
