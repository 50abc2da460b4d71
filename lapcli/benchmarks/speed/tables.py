"""Rows as tables for a screen and for a page: ways side by side, beside the floor and what they are compared with."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lapcli.benchmarks.speed.results import Row

BEST_BASELINE = "fla graph"


class Table(NamedTuple):
    """Text.

    Attributes:
        title: what it shows.
        columns: their heads.
        rows: cells.
        text_columns: how many of the first are text.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1

    def markdown(self) -> list[str]:
        """Lines of a page."""
        return [
            f"| {' | '.join(self.columns)} |",
            f"| {' | '.join(['---'] * len(self.columns))} |",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]


_TITLES = {
    "decode": "One decode step of the whole model",
    "generate": "Whole generations, one row: a token",
    "latency": "Latency of each token, waited for",
    "memory": "As many sequences as fit",
    "prefill": "A prompt through the whole model",
    "decode mixer": "One decode step of one layer's mixer",
    "prefill mixer": "A prompt through one layer's mixer",
    "decode operator": "One decode step of one layer's operator",
    "prefill operator": "One layer's recurrence over whole sequences",
}
_MICRO = ("decode operator", "decode mixer")


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each kind of row that was begun; `notes` counts the others."""
    rows = [row for row in rows if row.status != "no time"]
    found: list[Table] = []
    for what, title in _TITLES.items():
        ours = [row for row in rows if row.cell.what == what]
        if not ours:
            continue
        if what == "latency":
            found.append(_latency(title, ours))
        elif what == "memory":
            found.append(_memory(title, ours))
        else:
            for backward in sorted({row.cell.backward for row in ours}):
                some = [row for row in ours if row.cell.backward == backward]
                found.append(_ways(title + (", forward and backward" if backward else ""), what, some))
    kept = _kept(rows)
    found += [kept] if kept.rows else []
    found += [_kernels(row) for row in rows if "kernels" in row.more]
    return found


def _kept(rows: Sequence[Row]) -> Table:
    """What a sequence keeps, where that grows with its length."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for row in rows:
        if row.more.get("key_value_bytes"):
            found[row.cell.model, row.cell.tokens] = (row.more["key_value_bytes"], row.more["state_bytes"])
    body: list[list[str]] = []
    for (model, tokens), parts in sorted(found.items()):
        whole = found.get((whole_of(model), tokens))
        shares = [f"{part / 2**20:.4g}" for part in (*parts, sum(parts))]
        body.append([model, str(tokens), *shares, _times(None if whole is None else sum(parts) / sum(whole))])
    return Table(
        "What one sequence keeps, MiB", ["model", "tokens", "keys and values", "states", "both", "of the whole model"],
        body,
    )  # fmt: skip


def whole_of(model: str) -> str:
    """The name of the Transformer that a converted one was (`lapcli.benchmarks.speed.configs`)."""
    return model.partition(", ")[0]


def _kernels(row: Row) -> Table:
    """Where a step's time goes; what the kernels leave of it is launches and waiting."""
    cell, step = row.cell, row.seconds or 0.0
    kernels = row.more["kernels"]
    body = [
        [str(name), f"{calls:g}", _number(seconds * 1e6), f"{seconds / step:.1%}" if step else "-"]
        for name, calls, seconds in kernels
    ]
    rest = step - sum(seconds for _name, _calls, seconds in kernels)
    body.append(["between kernels", "", _number(rest * 1e6), f"{rest / step:.1%}" if step else "-"])
    title = f"Kernels of a step, {cell.model} K {cell.key_width}, batch {cell.batch}, {cell.way}"
    return Table(title, ["kernel", "calls", "us", "of the step"], body)


def notes(rows: Iterable[Row]) -> list[str]:
    """What is to be known of the figures, once each: why a way is missing, what failed, what a figure leaves out."""
    found: dict[str, None] = {}
    rows = list(rows)
    late = Counter(row.cell.what for row in rows if row.status == "no time")
    for what, count in late.items():
        found[f"{what}: {count} cells had not begun when the time of --budget was over"] = None
    for row in rows:
        cell = row.cell
        if row.status == "not here":
            found[f"{cell.way}: {row.detail}"] = None
        elif row.status in ("wrong", "failed"):
            where = f"{cell.what}, {cell.model}, K {cell.key_width}, batch {cell.batch}, {cell.way}"
            found[f"{where}: {row.status}: {row.detail}"] = None
        elif row.detail and row.status == "measured":
            found[f"{cell.what}, {cell.way}: {row.detail}"] = None
    return list(found)


def _ways(title: str, what: str, rows: Sequence[Row]) -> Table:
    """Cells down, ways across."""
    measured = [row for row in rows if row.status != "not here"]
    ways = list(dict.fromkeys(row.cell.way for row in measured))
    scale, unit = (1e6, "us") if what in _MICRO else (1e3, "ms")
    cells: dict[tuple[str, int, int, int, str], dict[str, Row]] = {}
    for row in measured:
        cell = row.cell
        # States of other ways are fp32 whatever ours are.
        key = (cell.model, cell.tokens, cell.batch, -cell.key_width, _state_of(row, measured))
        cells.setdefault(key, {})[cell.way] = row
    states = {key[-1] for key in cells}
    lengths = len({key[1] for key in cells}) > 1 or what in ("prefill", "prefill mixer", "prefill operator", "decode")
    columns = ["model, K", "batch"]
    columns += ["tokens"] if lengths else []
    columns += ["state"] if len(states) > 1 else []
    columns += [f"floor, {unit}", *(f"{way}, {unit}" for way in ways)]
    own = "lapcli" in ways
    columns += ["lapcli / floor"] if own else []
    best = [way for way in ways if way != "lapcli"]
    base = next((way for way in (BEST_BASELINE, "fla", "library", *best) if way in best), None)
    columns += [f"{base} / lapcli", f"unpruned {base} / lapcli"] if own and base else []
    body: list[list[str]] = []
    for key, by_way in sorted(cells.items(), key=lambda item: item[0]):
        model, tokens, batch, width, state = key
        first = next(iter(by_way.values()))
        line = [f"{model}, {-width}", str(batch)]
        line += [str(tokens)] if lengths else []
        line += [state] if len(states) > 1 else []
        floor = next((row.floor_seconds for row in by_way.values() if row.floor_seconds), None)
        line += ["-" if floor is None else _number(floor * scale)]
        line += [_shown(by_way.get(way), scale) for way in ways]
        ours = by_way.get("lapcli")
        if own:
            line += [_times(None if ours is None else ours.over_floor)]
        if own and base:
            line += [_times(ratio(by_way.get(base), ours)), _times(ratio(_unpruned(first, base, measured), ours))]
        body.append(line)
    return Table(title, columns, body)


def _state_of(row: Row, rows: Sequence[Row]) -> str:
    if row.cell.what != "decode operator":
        return next((other.cell.state_dtype for other in rows if other.cell.way == "lapcli"), row.cell.state_dtype)
    return row.cell.state_dtype


def _unpruned(row: Row, way: str, rows: Sequence[Row]) -> Row | None:
    """The same way, batch and length at ratio 0."""
    cell = row.cell
    return next(
        (
            other
            for other in rows
            if other.cell.way == way
            and other.cell.ratio == 0
            and (other.cell.model, other.cell.batch, other.cell.tokens) == (cell.model, cell.batch, cell.tokens)
            and (cell.what != "decode operator" or other.cell.state_dtype == cell.state_dtype)
        ),
        None,
    )


def ratio(slower: Row | None, faster: Row | None) -> float | None:
    """How many times as long one took as another, where both were measured."""
    if slower is None or faster is None or slower.seconds is None or not faster.seconds:
        return None
    return slower.seconds / faster.seconds


def _latency(title: str, rows: Sequence[Row]) -> Table:
    body = [
        [
            f"{row.cell.model}, {row.cell.key_width}",
            str(row.cell.batch),
            *(_number(row.more[name] * 1e3) if name in row.more else row.status for name in ("p50", "p99", "max")),
            str(row.repeats or "-"),
        ]
        for row in rows
    ]
    return Table(title, ["model, K", "batch", "P50, ms", "P99, ms", "slowest, ms", "tokens"], body)


def _memory(title: str, rows: Sequence[Row]) -> Table:
    def gib(value: float) -> str:
        return f"{value / 2**30:.4g}"

    body: list[list[str]] = []
    for row in rows:
        base = next((other for other in rows if other.cell.model == row.cell.model and other.cell.ratio == 0), None)
        more = row.more
        speed, fit = more.get("tokens_per_second"), more.get("fit")
        base_speed = None if base is None else base.more.get("tokens_per_second")
        base_fit = None if base is None else base.more.get("fit")
        body.append(
            [
                f"{row.cell.model}, {row.cell.key_width}",
                "-" if "memory" not in more else gib(more["memory"]),
                str(fit if fit is not None else row.status),
                _times(fit / base_fit if fit and base_fit else None),
                str(row.cell.batch),
                "-" if row.seconds is None else _number(row.seconds * 1e3),
                _times(row.over_floor),
                "-" if speed is None else f"{speed:.0f}",
                _times(speed / base_speed if speed and base_speed else None),
            ]
        )
    heads = [
        "model, K", "GiB", "sequences fit", "of base", "measured with", "step, ms", "of floor", "tokens/s", "of base",
    ]  # fmt: skip
    return Table(title, heads, body)


def _shown(row: Row | None, scale: float) -> str:
    if row is None:
        return "-"
    return row.status if row.seconds is None else _number(row.seconds * scale)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


class Crossing(NamedTuple):
    """Where one line takes over from another.

    Attributes:
        at: between which two places, interpolated.
        faster: the name of the line that is below from there on.
    """

    at: float
    faster: str


def crossings(
    places: Sequence[float], first: Sequence[float], second: Sequence[float], names: tuple[str, str]
) -> list[Crossing]:
    """Where two lines over the same places cross, straight between places.

    Args:
        places: ascending.
        first: one line's values.
        second: the other's.
        names: of both.
    """
    found: list[Crossing] = []
    differences = [b - a for a, b in zip(first, second, strict=True)]
    for (left, before), (right, after) in pairwise(zip(places, differences, strict=True)):
        if before * after < 0:
            at = left + (right - left) * before / (before - after)
            found.append(Crossing(at, names[0] if after > 0 else names[1]))
    return found


def prefill_crossings(rows: Sequence[Row]) -> list[str]:
    """Where a pruned model's prompts become faster than the base's, or the other way round, by prompt length."""
    return _crossed(
        rows,
        ("prefill", "prefill mixer", "prefill operator"),
        lambda row: (row.cell.model, row.cell.way, row.cell.batch),
    )


def _crossed(rows: Sequence[Row], kinds: Sequence[str], line_of: Callable[[Row], tuple[object, ...]]) -> list[str]:
    said: list[str] = []
    lines: dict[tuple[object, ...], dict[int, dict[int, float]]] = {}
    for row in rows:
        if row.cell.what in kinds and row.seconds is not None and not row.cell.backward:
            lines.setdefault((row.cell.what, *line_of(row)), {}).setdefault(row.cell.key_width, {})[row.cell.tokens] = (
                row.seconds
            )
    for line, by_width in lines.items():
        widest = max(by_width)
        for width, values in sorted(by_width.items()):
            places = sorted(set(values) & set(by_width[widest]))
            if width == widest or len(places) < 2:
                continue
            what, model, way, batch = line
            for crossing in crossings(
                places,
                [values[place] for place in places],
                [by_width[widest][place] for place in places],
                (f"K {width}", f"K {widest}"),
            ):
                said.append(
                    f"{what}, {model}, {way}, batch {batch}: {crossing.faster} is faster from about "
                    f"{crossing.at:.0f} tokens on"
                )
    return said


def share_crossings(rows: Sequence[Row]) -> list[str]:
    """From which length on a Transformer with some layers made states is faster (or slower) than the whole one."""
    lines: dict[tuple[str, str, str, int], dict[int, float]] = {}
    for row in rows:
        if row.cell.what in ("decode", "prefill") and row.seconds is not None:
            key = (row.cell.what, row.cell.way, row.cell.model, row.cell.batch)
            lines.setdefault(key, {})[row.cell.tokens] = row.seconds
    said: list[str] = []
    for (what, way, model, batch), values in lines.items():
        base = lines.get((what, way, whole_of(model), batch), {})
        places = sorted(set(values) & set(base))
        if whole_of(model) == model or len(places) < 2:
            continue
        first, second = ([line[place] for place in places] for line in (values, base))
        said += [
            f"{what}, {way}, batch {batch}: {crossing.faster} is faster from about {crossing.at:.0f} tokens on"
            for crossing in crossings(places, first, second, (model, whole_of(model)))
        ]
    return said


def generation_crossings(rows: Sequence[Row]) -> list[str]:
    """After how many generated tokens a request is done sooner on one model or way than on another.

    A request takes its prompt and so many steps: both must have been measured for the same batch, by rows of `prefill`
    and `decode`. The graph of fla counts with fla's prompts.
    """
    prompts = {
        (row.cell.model, row.cell.key_width, row.cell.way, row.cell.batch, row.cell.tokens): row.seconds
        for row in rows
        if row.cell.what == "prefill" and row.seconds is not None
    }
    requests: dict[tuple[str, int, int], list[tuple[str, float, float]]] = {}
    for row in rows:
        cell = row.cell
        if cell.what != "decode" or row.seconds is None:
            continue
        way = cell.way.partition(" ")[0]
        for (model, width, prompt_way, batch, tokens), seconds in prompts.items():
            if (model, width, prompt_way, batch) == (cell.model, cell.key_width, way, cell.batch):
                requests.setdefault((model, batch, tokens), []).append((f"{cell.way}, K {width}", seconds, row.seconds))
    said: list[str] = []
    for (model, batch, tokens), ways in requests.items():
        for number, (name, prompt, step) in enumerate(ways):
            for other, other_prompt, other_step in ways[number + 1 :]:
                if (prompt - other_prompt) * (step - other_step) < 0:
                    after = (prompt - other_prompt) / (other_step - step)
                    sooner = name if step < other_step else other
                    later = other if step < other_step else name
                    said.append(
                        f"{model}, batch {batch}, prompts of {tokens}: {sooner} overtakes {later} after {after:.0f} "
                        "generated tokens"
                    )
    return list(dict.fromkeys(said))
