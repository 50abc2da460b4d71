"""Counters, gauges and histograms in Prometheus' text format."""

import bisect
from collections.abc import Callable, Iterable, Mapping

Labels = tuple[tuple[str, str], ...]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of a histogram of seconds."""


class Counter:
    """Only grows.

    Args:
        name: of the metric.
        text: what it counts.
    """

    kind = "counter"

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count."""
        key = tuple(sorted(labels.items()))
        self._values[key] = self._values.get(key, 0) + amount

    def value(self, **labels: str) -> float:
        """What was counted so far."""
        return self._values.get(tuple(sorted(labels.items())), 0)

    def lines(self) -> Iterable[str]:
        """Its lines."""
        for labels, value in (self._values or {(): 0.0}).items():
            yield f"{self.name}{_labels(labels)} {_number(value)}"


class Gauge:
    """Is asked when somebody looks.

    Args:
        name: of the metric.
        text: what it is.
        read: gives the value, or values by a label; `label` names it.
        label: of several values.
    """

    kind = "gauge"

    def __init__(self, name: str, text: str, read: Callable[[], float | Mapping[str, float]], label: str = ""):
        self.name, self.text, self.read, self.label = name, text, read, label

    def lines(self) -> Iterable[str]:
        """Its lines."""
        found = self.read()
        if isinstance(found, Mapping):
            for key, value in found.items():
                yield f"{self.name}{_labels(((self.label, key),))} {_number(value)}"
        else:
            yield f"{self.name} {_number(found)}"


class Histogram:
    """Counts values by upper bounds.

    Args:
        name: of the metric.
        text: what is measured.
        bounds: ascending.
    """

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS):
        self.name, self.text, self.bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def lines(self) -> Iterable[str]:
        """Its lines."""
        total = 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {_number(self._sum)}"
        yield f"{self.name}_count {total}"


class Registry:
    """All metrics of a server, in the order in which they were made."""

    def __init__(self) -> None:
        self._metrics: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, text: str) -> Counter:
        """Make a counter."""
        made = Counter(name, text)
        self._metrics.append(made)
        return made

    def gauge(self, name: str, text: str, read: Callable[[], float | Mapping[str, float]], label: str = "") -> None:
        """Make a gauge."""
        self._metrics.append(Gauge(name, text, read, label))

    def histogram(self, name: str, text: str) -> Histogram:
        """Make a histogram of seconds."""
        made = Histogram(name, text)
        self._metrics.append(made)
        return made

    def text(self) -> str:
        """What a scrape gets."""
        lines: list[str] = []
        for metric in self._metrics:
            lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = ((name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
