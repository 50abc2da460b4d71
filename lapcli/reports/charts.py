"""Charts as SVG, without a script, a font or a colour that is needed to read them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from lapcli.reports.document import Chart, Point, Series, markup, size

WIDTH, HEIGHT = 480.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 16.0, 14.0, 52.0
_LEGEND_ROW, _LEGEND_COLUMN = 20.0, 230.0
_APART = 54.0
"""Between two ticks on x, at least."""
_TICKS = 5

# Dash, marker and shade, so that a copy in black and white tells the lines apart.
_STYLES = (
    ("#000000", "", "circle"),
    ("#1f5fa8", "7 4", "square"),
    ("#b2182b", "2 3", "triangle"),
    ("#4d4d4d", "9 3 2 3", "diamond"),
    ("#1b7837", "12 4", "cross"),
    ("#762a83", "4 2 1 2", "circle-open"),
    ("#8c510a", "1 4", "square-open"),
    ("#7a7a7a", "14 3 2 3 2 3", "triangle-open"),
)


def draw(chart: Chart, name: str) -> str:
    """The chart as an `<svg>` element.

    Args:
        chart: what to draw; points that are not finite are left out, and so are those a logarithm has no place for.
        name: of the element, for the ids in it; letters, digits and hyphens.
    """
    series = [_drawable(line, chart.log_y) for line in chart.series]
    xs = [point.x for line in series for point in line.points]
    ys = [value for line in series for point in line.points for value in _span(point, chart.log_y)]
    shown = [(line, _style(line, number)) for number, line in enumerate(series) if line.points]
    height = HEIGHT + _LEGEND_ROW * math.ceil(len(shown) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{markup(chart.title)}</title>',
        f'<desc id="{name}-desc">{markup(chart.description)}</desc>',
        '<g font-family="sans-serif" font-size="13" fill="#111">',
    ]
    if not xs:
        parts.append(f'<text x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}" text-anchor="middle">nothing to draw</text>')
        return "".join([*parts, "</g></svg>"])
    x_axis = _Axis(xs, _LEFT, WIDTH - _RIGHT, log=False, binary=chart.bytes_on_x)
    y_axis = _Axis(ys, HEIGHT - _BOTTOM, _TOP, log=chart.log_y)
    parts += _frame(chart, x_axis, y_axis)
    for line, style in shown:
        parts += _line(line, style, x_axis, y_axis, chart.log_y)
    parts += _legend(shown)
    return "".join([*parts, "</g></svg>"])


class _Axis:
    """From values to places."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool, binary: bool = False):
        self.start, self.end, self.log, self.binary = start, end, log, binary
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        margin = (high - low) * 0.05 or abs(high) * 0.1 or 0.5
        self.low, self.high = low - margin, high + margin
        if not log and min(values) >= 0 and not binary:
            # A share or a loss below zero is nothing to make room for.
            self.low = max(0.0, self.low)

    def place(self, value: float) -> float:
        scaled = math.log10(value) if self.log else value
        return self.start + (scaled - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, at: Sequence[float] = ()) -> list[tuple[float, str]]:
        """Places and labels; at the values themselves where there are few and none too close to the next."""
        own = sorted({value for value in at if math.isfinite(value)})
        places = [self.place(value) for value in own]
        if 1 < len(own) <= _TICKS + 1 and all(right - left >= _APART for left, right in pairwise(places)):
            return [(value, size(value) if self.binary else _short(value)) for value in own]
        if self.log:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
            found = [(value, f"{value:g}") for value in values if self.low <= math.log10(value) <= self.high]
            if len(found) > 2:
                return found
            # Less than a decade: even steps say more.
            return [(value, _short(value)) for value in _even(10**self.low, 10**self.high) if value > 0]
        raw = (self.high - self.low) / _TICKS
        if not self.binary:
            return [(value, _short(value)) for value in _even(self.low, self.high)]
        step = 2.0 ** math.ceil(math.log2(raw))
        first = math.ceil(self.low / step)
        values = [number * step for number in range(first, math.floor(self.high / step) + 1)]
        return [(value, size(value)) for value in values]


def _even(low: float, high: float) -> list[float]:
    """About so many round values between two."""
    raw = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):g}{unit}"
    return f"{value:.6g}"


def _fits(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _drawable(line: Series, log: bool) -> Series:
    points = tuple(point for point in line.points if _fits(point.y, log) and math.isfinite(point.x))
    return Series(line.name, points, line.thin)


def _span(point: Point, log: bool) -> tuple[float, ...]:
    return tuple(end for end in (point.y, *(point.bar or ())) if _fits(end, log))


def _frame(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts: list[str] = []
    for value, label in y_axis.ticks():
        place = y_axis.place(value)
        parts.append(f'<line x1="{left:g}" x2="{right:g}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:g}" y="{place + 4:.1f}" text-anchor="end">{markup(label)}</text>')
    for value, label in x_axis.ticks(at=[point.x for line in chart.series for point in line.points]):
        place = x_axis.place(value)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{bottom:g}" y2="{bottom + 5:g}" stroke="#111"/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 19:g}" text-anchor="middle">{markup(label)}</text>')
    parts.append(
        f'<path d="M{left:g} {_TOP:g}V{bottom:g}H{right:g}" fill="none" stroke="#111"/>'
        f'<text x="{(left + right) / 2:g}" y="{HEIGHT - 12:g}" text-anchor="middle">{markup(chart.x_label)}</text>'
        f'<text transform="translate(14 {(bottom + _TOP) / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{markup(chart.y_label)}</text>"
    )
    return parts


def _style(line: Series, number: int) -> tuple[str, str, str]:
    """Colour, dash as an attribute, and marker of a line by its number; a thin one has no marker."""
    if line.thin:
        return "#999999", "", ""
    colour, dash, marker = _STYLES[number % len(_STYLES)]
    return colour, f' stroke-dasharray="{dash}"' if dash else "", marker


def _line(line: Series, style: tuple[str, str, str], x_axis: _Axis, y_axis: _Axis, log: bool) -> list[str]:
    colour, dashes, marker = style
    places = [(x_axis.place(point.x), y_axis.place(point.y)) for point in line.points]
    parts: list[str] = []
    if len(places) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        width = 1 if line.thin else 1.8
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')
    if line.thin:
        return parts
    for point, (x, y) in zip(line.points, places, strict=True):
        bar = ""
        if point.bar:
            ends = [y_axis.place(value) for value in _span(point, log)]
            top, bottom = min(ends), max(ends)
            bar = (
                f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 4:.1f} {top:.1f}h8M{x - 4:.1f} {bottom:.1f}h8" '
                f'stroke="{colour}" fill="none"/>'
            )
        said = f"{line.name}: {point.text()}"
        parts.append(f"<g><title>{markup(said)}</title>{bar}{_marker(marker, x, y, colour)}</g>")
    return parts


def _marker(kind: str, x: float, y: float, colour: str) -> str:
    shape, _, opened = kind.partition("-")
    fill = "#fff" if opened else colour
    paint = f'fill="{fill}" stroke="{colour}" stroke-width="1.4"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {paint}/>'
    outlines = {
        "square": "m-4 -4h8v8h-8z",
        "triangle": "m0 -5l5 9h-10z",
        "diamond": "m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        "cross": "m-4 -4l8 8m0 -8l-8 8",
    }
    return f'<path d="M{x:.1f} {y:.1f}{outlines[shape]}" {paint}/>'


def _legend(shown: Sequence[tuple[Series, tuple[str, str, str]]]) -> list[str]:
    parts: list[str] = []
    for number, (line, (colour, dashes, marker)) in enumerate(shown):
        x, y = 20 + _LEGEND_COLUMN * (number % 2), HEIGHT + 4 + _LEGEND_ROW * (number // 2)
        parts.append(
            f'<line x1="{x:g}" x2="{x + 34:g}" y1="{y:g}" y2="{y:g}" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        )
        if not line.thin:
            parts.append(_marker(marker, x + 17, y, colour))
        parts.append(f'<text x="{x + 42:g}" y="{y + 4:g}">{markup(_cut(line.name))}</text>')
    return parts


def _cut(name: str) -> str:
    """As much of a name as a legend has room for."""
    return name if len(name) <= 25 else name[:24] + "\N{HORIZONTAL ELLIPSIS}"
