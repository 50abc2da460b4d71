"""The sections of a report, from what a run or a sweep holds. Only what was measured is in them."""

import platform
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from lapcli.evaluation.table import evaluation_table
from lapcli.reports.collect import Entry, Found
from lapcli.reports.document import (
    Block,
    Chart,
    Document,
    Items,
    Listing,
    Paragraph,
    Picture,
    Point,
    Section,
    Series,
    Table,
    facts,
    size,
)
from lapcli.reports.measured import UNKNOWN_FILE, UNKNOWN_FOLDER, measured
from lapcli.reports.pooling import grouped, place, pooled
from lapcli.reports.speed import blocks, config_of, gains
from lapcli.sweeps.headline import Column, headline

NOT_MEASURED = "not measured"
_AFTER = ("sliced", "recovered")
_LABELS = {"sliced": "before recovery", "recovered": "after recovery"}
_ERRORS = (
    "± is one standard error. Of one model it is that of the measurement, over the items of the task. Of several seeds "
    "the value is their mean, and the error is the root of the mean square of the measurements' errors (all seeds are "
    "measured on the same items) plus the variance of the seeds' values over their number. Bars in figures of exact "
    "match and other shares of hits are 95 % intervals (Wilson's), which stay within 0 and 1."
)
_NOT_ENDED = "not noted"
"""Of a session that is under way, or was killed."""
_LINES = 8
_BINS = 200
_MARKERS = 16


def compose(found: Found) -> Document:
    """The report of a run or a sweep."""
    name = found.model.get("name", "a model")
    kind = "Sweep" if found.sweep else "Evaluation" if found.bare else "Run"
    columns = _columns(found)
    axes = _Axes(found)
    sections = [
        Section("What was done", [*_what(found), Paragraph(_ERRORS)]),
        Section("Quality against state", _quality(found, columns, axes)),
        Section("Methods and ratios", _methods(found, columns, axes)),
        Section("Before and after recovery", _recovery_table(found, columns, axes)),
        Section("Calibration: text, amount and seed", _calibration_table(found, columns, axes)),
        Section("Decided from keys, queries or both", _score_from(found, columns, axes)),
        Section("Recall by length", _recall(found, columns, axes)),
        Section("Differences from the unpruned model", _differences(found)),
        Section("State, memory and speed", _gains(found)),
        Section("Training", _training(found)),
        Section("States looked into", _analyses(found)),
        Section("Notes and warnings", _notes(found)),
        Section("Models and settings", _models(found)),
        Section("Commands", _commands(found)),
    ]
    done = sum(entry.failure is None for entry in found.entries)
    what = f"{done} of {len(found.entries)} cells are whole. " if found.sweep else ""
    lead = f"{kind} in {found.path}. Base model {name}, {str(found.model.get('digest'))[:12]}. {what}".rstrip()
    return Document(f"{kind}: {name}", lead, [section for section in sections if section.blocks])


class _Axes:
    """What varies, and which values stand for the others where a table shows only one."""

    def __init__(self, found: Found):
        names = ("method", "budget", "score_from", "data", "samples", "seq_len", "seed", "recovery")
        self.values = {name: list(dict.fromkeys(place(entry, name) for entry in found.entries)) for name in names}
        self.values["budget"].sort(key=lambda budget: (str(budget).startswith("K'"), _number(budget)))

    def varies(self, *names: str) -> bool:
        return any(len(self.values[name]) > 1 for name in names)

    def at_first(self, entries: Iterable[Entry], *free: str) -> list[Entry]:
        """Entries at the first value of every axis but the free ones and the seed."""
        fixed = [name for name in self.values if name not in (*free, "seed")]
        return [entry for entry in entries if all(place(entry, name) == self.values[name][0] for name in fixed)]

    def said(self, *free: str) -> str:
        """At which values, for a caption; nothing where there is no choice."""
        names = [name for name in self.values if name not in (*free, "seed") and self.varies(name)]
        return "".join(f", {name.replace('_', ' ')} {self.values[name][0]}" for name in names)


def _number(budget: Any) -> float:
    try:
        return float(str(budget).removeprefix("K' = "))
    except ValueError:
        return 0.0


def _columns(found: Found) -> list[Column]:
    return headline(row for entry in (found.unpruned, *found.entries) for row in entry.rows)


def _perplexity(column: Column) -> bool:
    return "perplexity" in column.metric or column.metric == "bits_per_byte"


def _heading(column: Column) -> str:
    arrow = {True: " \N{UPWARDS ARROW}", False: " \N{DOWNWARDS ARROW}", None: ""}[column.higher_is_better]
    return f"{column.title}, {column.metric.replace('_', ' ')}{arrow}"


def _cells(entries: Sequence[Entry], label: str, columns: Sequence[Column]) -> tuple[str, ...]:
    each = [pooled(entries, label, column) for column in columns]
    return tuple("\N{EN DASH}" if one is None else one.text() for one in each)


def _has(entries: Iterable[Entry], label: str) -> bool:
    return any(row["values"].get(label) is not None for entry in entries for row in entry.rows)


def _state(entries: Iterable[Entry], which: int = 1) -> int | None:
    return next((entry.state[which] for entry in entries if entry.state), None)


def _size(entries: Iterable[Entry], which: int = 1) -> str:
    found = _state(entries, which)
    return "not known" if found is None else size(found)


def _what(found: Found) -> list[Block]:
    first = found.entries[0] if found.entries else None
    values = {
        "base model": str(found.model.get("name")),
        "revision": str(found.model.get("revision") or "none"),
        "digest": str(found.model.get("digest")),
    }
    if first is not None and first.widths and first.state:
        values["key width of a head"] = str(first.widths[0])
        values["state of a sequence, fp32"] = size(first.state[0])
    versions = dict(found.base.versions) if found.base else {}
    blocks: list[Block] = []
    if found.sweep:
        sessions = found.sweep.sessions
        if sessions:
            versions = sessions[-1].get("versions", versions)
            values["begun"] = str(sessions[0].get("begun"))
            values["ended"] = str(sessions[-1].get("ended") or _NOT_ENDED)
        evaluation = found.sweep.evaluation
        values["measured on"] = _listed(evaluation["tasks"]) if evaluation else "nothing"
        if evaluation and evaluation["limit"]:
            values["items of each task"] = f"at most {evaluation['limit']}"
        values["cells"] = str(len(found.entries))
    values["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items()) or "not noted"
    blocks.append(facts("The base model, and what ran", values))
    if found.sweep and found.sweep.sessions:
        rows = [
            (str(each.get("begun")), str(each.get("ended") or _NOT_ENDED), _machine(each.get("machine") or {}),
             str(each.get("slots", "")))
            for each in found.sweep.sessions
        ]  # fmt: skip
        blocks.append(
            Table("When and where", ("begun", "ended", "machine", "cells at a time"), tuple(rows), text_columns=3)
        )
    else:
        blocks.append(
            Paragraph(f"Reported on {platform.machine()}, {platform.system()}; a run keeps no record of its machine.")
        )
    texts = {
        str(entry.settings["calibration"]): entry.settings["calibration"]
        for entry in found.entries
        if entry.settings.get("calibration")
    }
    if texts:
        rows = [
            (str(each["data"]), str(each["samples"]), str(each["seq_len"]), f"{each['samples'] * each['seq_len']:,}",
             str(each["seed"]))
            for each in texts.values()
        ]  # fmt: skip
        columns = ("calibrated on", "sequences", "tokens each", "tokens", "seed")
        blocks.append(Table("Calibrations", columns, tuple(rows)))
    return blocks


def _machine(machine: dict[str, Any]) -> str:
    gpus = machine.get("gpus") or ()
    return f"{machine.get('processor')}, {machine.get('cores')} cores, {_listed(gpus) or 'no GPU'}"


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(str(item) for item in items)


def _quality(found: Found, columns: Sequence[Column], axes: _Axes) -> list[Block]:
    """Curves of perplexity and of recall against state, a line a method."""
    blocks: list[Block] = []
    entries = axes.at_first(found.entries, "method", "budget")
    for label in _AFTER:
        if not _has(entries, label):
            continue
        for column in columns:
            series: list[Series] = []
            before = pooled([found.unpruned], "base", column)
            state = _state(found.entries, 0)
            if before is not None and state is not None:
                series.append(Series("unpruned", (Point(state, before.value, before.stderr, before.interval),)))
            for (method,), group in grouped(entries, "method").items():
                points = [
                    Point(bytes_, score.value, score.stderr, score.interval)
                    for cells in grouped(group, "budget").values()
                    if (bytes_ := _state(cells)) is not None and (score := pooled(cells, label, column)) is not None
                ]
                if points:
                    series.append(Series(str(method), tuple(sorted(points, key=lambda point: point.x))))
            if not any(line.name != "unpruned" for line in series):
                continue
            values = [point.y for line in series for point in line.points if point.y > 0]
            blocks.append(
                Chart(
                    f"{_heading(column)}, {_LABELS[label]}{axes.said('method', 'budget')}",
                    f"{column.metric} of {column.title} against the bytes of a sequence's state, a line for each of "
                    f"{_listed(line.name for line in series)}, {_bars(series)}. The table of methods "
                    "and ratios has the numbers.",
                    "state of a sequence, fp32",
                    column.metric.replace("_", " "),
                    tuple(series[:_LINES]),
                    bytes_on_x=True,
                    log_y=_perplexity(column) and bool(values) and max(values) > 4 * min(values),
                )
            )
    return blocks


def _budget_name(entries: Sequence[Entry]) -> str:
    return str(place(entries[0], "budget"))


def _width(entries: Sequence[Entry]) -> str:
    widths = next((entry.widths for entry in entries if entry.widths), None)
    return "not known" if widths is None else f"{widths[1]} of {widths[0]}"


def _base_row(found: Found, columns: Sequence[Column], front: tuple[str, ...]) -> list[tuple[str, ...]]:
    cells = _cells([found.unpruned], "base", columns)
    return [(*front, *cells)] if any(cell != "\N{EN DASH}" for cell in cells) else []


def _methods(found: Found, columns: Sequence[Column], axes: _Axes) -> list[Block]:
    """As Tables 1 and 20 of arXiv 2602.04852."""
    blocks: list[Block] = []
    entries = axes.at_first(found.entries, "method", "budget")
    for label in _AFTER:
        if not columns or not _has(entries, label):
            continue
        rows = _base_row(found, columns, ("unpruned", "0", "", _size(found.entries, 0), ""))
        for budget in axes.values["budget"]:
            at_budget = [entry for entry in entries if place(entry, "budget") == budget]
            for (method,), group in grouped(at_budget, "method").items():
                if _has(group, label):
                    rows.append(
                        (str(method), str(budget), _width(group), _size(group), str(len(group)),
                         *_cells(group, label, columns))
                    )  # fmt: skip
        heads = ("selector", "removed", "key width", "state", "seeds", *map(_heading, columns))
        caption = f"Selectors at every ratio, {_LABELS[label]}{axes.said('method', 'budget')}"
        blocks.append(Table(caption, heads, tuple(rows)))
    return blocks


def _recovery_table(found: Found, columns: Sequence[Column], axes: _Axes) -> list[Block]:
    if not columns or not _has(found.entries, "recovered"):
        return []
    entries = axes.at_first(found.entries, "method", "budget", "recovery")
    labels = (("sliced", "before"), ("recovered", "after"), ("control", "unpruned, trained alike"))
    # A column of its own only where some model got query feedback on the way.
    feeding = any(_feedback([entry], label) for entry in entries for label, _said in labels)
    rows = _base_row(found, columns, ("unpruned", "0", "", "as it is", *([""] if feeding else [])))
    for (method, budget, recovery), group in grouped(entries, "method", "budget", "recovery").items():
        for label, said in labels:
            if _has(group, label):
                front = [str(method), str(budget), str(recovery or ""), said]
                front += [_feedback(group, label)] if feeding else []
                rows.append((*front, *_cells(group, label, columns)))
    heads = ("selector", "removed", "settings", "recovery", *(["query feedback"] if feeding else []))
    caption = f"What recovery changed{axes.said('method', 'budget', 'recovery')}"
    return [Table(caption, (*heads, *map(_heading, columns)), tuple(rows), text_columns=len(heads))]


def _feedback(entries: Sequence[Entry], label: str) -> str:
    """What query feedback began at where a recovery added it; nothing where it did not."""
    found = [entry.recoveries[label]["settings"] for entry in entries if label in entry.recoveries]
    if not any(settings.get("add_query_feedback") for settings in found):
        return ""
    begins = dict.fromkeys(settings.get("lambda_init") or 0 for settings in found)
    return f"added, from {_listed(f'{value:g}' for value in begins)}"


def _calibration_table(found: Found, columns: Sequence[Column], axes: _Axes) -> list[Block]:
    """As Tables 2 and 7 of arXiv 2602.04852."""
    if not columns or not axes.varies("data", "samples", "seq_len", "seed"):
        return []
    blocks: list[Block] = []
    for label in _AFTER:
        entries = axes.at_first(found.entries, "method", "budget", "data", "samples", "seq_len")
        if not _has(entries, label):
            continue
        rows: list[tuple[str, ...]] = []
        keys = ("method", "budget", "data", "samples", "seq_len")
        for (method, budget, data, samples, length), group in grouped(entries, *keys).items():
            front = (str(method), str(budget), str(data), f"{samples} x {length}")
            each = grouped(group, "seed")
            if len(each) > 1:
                rows += [(*front, str(seed), *_cells(cells, label, columns)) for (seed,), cells in each.items()]
                rows.append((*front, f"mean of {len(each)}", *_cells(group, label, columns)))
            else:
                rows.append((*front, _listed(key[0] for key in each), *_cells(group, label, columns)))
        heads = ("selector", "removed", "text", "tokens", "seed", *map(_heading, columns))
        caption = f"Text, amount and seed, {_LABELS[label]}{axes.said('method', 'budget', *keys)}"
        blocks.append(Table(caption, heads, tuple(rows), text_columns=5))
    return blocks


def _score_from(found: Found, columns: Sequence[Column], axes: _Axes) -> list[Block]:
    """As Table 16 of arXiv 2602.04852: a table for each score, a column for each side."""
    if not axes.varies("score_from"):
        return []
    blocks: list[Block] = []
    sides = axes.values["score_from"]
    entries = axes.at_first(found.entries, "method", "budget", "score_from")
    for label in _AFTER:
        for column in columns if _has(entries, label) else ():
            rows: list[tuple[str, ...]] = []
            for (method, budget), group in grouped(entries, "method", "budget").items():
                cells = [[entry for entry in group if place(entry, "score_from") == side] for side in sides]
                rows.append((str(method), str(budget), *(_cells(each, label, [column])[0] for each in cells)))
            heads = ("selector", "removed", *(f"from {side}" for side in sides))
            caption = f"{_heading(column)}, {_LABELS[label]}{axes.said('method', 'budget', 'score_from')}"
            note = "Whatever decides, the kept channels are the same for keys and queries."
            blocks.append(Table(caption, heads, tuple(rows), note=note))
    return blocks


def _recall(found: Found, columns: Sequence[Column], axes: _Axes) -> list[Block]:
    """As Table 11 of arXiv 2602.04852, with curves."""
    blocks: list[Block] = []
    lengths: dict[tuple[str, str], list[Column]] = {}
    for column in columns:
        if column.length is not None:
            lengths.setdefault((column.task, column.metric), []).append(column)
    entries = axes.at_first(found.entries, "method", "budget")
    for (task, metric), each in lengths.items():
        for label in _AFTER:
            if not _has(entries, label):
                continue
            rows = _base_row(found, each, ("unpruned", "0"))
            for (method, budget), group in grouped(entries, "method", "budget").items():
                rows.append((str(method), str(budget), *_cells(group, label, each)))
            heads = ("selector", "removed", *(f"{column.length} tokens" for column in each))
            said = f"{metric.replace('_', ' ')} of {task} by length, {_LABELS[label]}"
            blocks.append(Table(f"{said}{axes.said('method', 'budget')}", heads, tuple(rows)))
            if len(each) < 2:
                continue
            for budget in axes.values["budget"]:
                at_budget = [entry for entry in entries if place(entry, "budget") == budget]
                groups = {
                    "unpruned": [found.unpruned],
                    **{str(key[0]): cells for key, cells in grouped(at_budget, "method").items()},
                }
                series = [
                    Series(name, _by_length(cells, "base" if name == "unpruned" else label, each))
                    for name, cells in groups.items()
                ]
                blocks.append(
                    Chart(
                        f"{said}, removed {budget}",
                        f"{metric} of {task} against the length of the prompt, a line for each of {_listed(groups)}, "
                        f"{_bars(series)}. The table beside it has the numbers.",
                        "tokens of the prompt",
                        metric.replace("_", " "),
                        tuple(line for line in series if line.points)[:_LINES],
                    )
                )
    return blocks


def _by_length(entries: Sequence[Entry], label: str, columns: Sequence[Column]) -> tuple[Point, ...]:
    scores = [(column.length or 0, pooled(entries, label, column)) for column in columns]
    return tuple(
        Point(length, score.value, score.stderr, score.interval) for length, score in scores if score is not None
    )


def _bars(series: Iterable[Series]) -> str:
    """What the error bars of a chart are."""
    intervals = {point.interval is not None for line in series for point in line.points}
    if intervals == {True}:
        return "95 % intervals (Wilson's)"
    return "one standard error up and down" + (", or a 95 % interval (Wilson's)" if True in intervals else "")


def _differences(found: Found) -> list[Block]:
    """The evaluation as `lapcli eval` shows it, with differences item by item; of a run alone, a sweep has too many."""
    if found.sweep or found.base is None:
        return []
    drawn = evaluation_table(found.base)
    note = (
        "" if len(found.base.models) < 2 else "Differences are taken item by item, so that what all find hard cancels."
    )
    return [Table("All scores", drawn.columns, drawn.rows, text_columns=2, note=note)]


def _gains(found: Found) -> list[Block]:
    """Three different gains, a column each."""
    measured = {row.cell.what for bench in found.benches for row in bench.rows}
    rows: dict[tuple[str, ...], None] = {}
    base = found.base_config if found.benches else None
    slices = [config_of(entry.run.sliced) if found.benches else None for entry in found.entries]
    for entry, sliced in zip(found.entries, slices, strict=True):
        if entry.widths is None or entry.state is None:
            continue
        before, after = entry.state
        elements = f"{before // 4:,} \N{RIGHTWARDS ARROW} {after // 4:,} ({1 - after / before:.1%} fewer)"
        gained = gains(found.benches, base, sliced)
        others = [gained.mixer, gained.speed, *([gained.sequences] if "memory" in measured else [])]
        rows[f"{entry.widths[1]} of {entry.widths[0]}", elements, *(each or NOT_MEASURED for each in others)] = None
    speed = blocks(found.benches, [base, *slices])
    if not rows:
        return speed
    note = (
        "These are different quantities: half of the state is neither half of the mixer's memory nor twice the speed. "
        "The first follows from the checkpoint's shapes; the others are from the files of lapcli bench --output that "
        "lie here or were given, unpruned over pruned, both with random weights."
    )
    heads = ("key width", "state elements of a sequence", "peak memory of the mixer", "speed of the whole model")
    heads += ("sequences that fit",) if "memory" in measured else ()
    return [Table("What a smaller state gains", heads, tuple(rows), note=note), *speed]


def _training(found: Found) -> list[Block]:
    trained = [(entry, label) for entry in found.entries for label in entry.recoveries]
    blocks: list[Block] = []
    rows: list[tuple[str, ...]] = []
    for entry, label in trained:
        noted = entry.recoveries[label]
        before, after = noted.get("before") or {}, noted.get("after") or {}
        numbers = [
            f"{side[key]:.4f}" if key in side else "\N{EN DASH}"
            for key in ("cross_entropy", "kl")
            for side in (before, after)
        ]
        rows.append((entry.name, label, f"{noted['tokens']:,}", f"{noted.get('seconds', 0):,.0f}", *numbers,
                     str(noted.get("stopped") or "no")))  # fmt: skip
    if rows:
        heads = ("cell", "model", "tokens", "seconds", "cross entropy before", "after", "KL before", "after",
                 "stopped early")  # fmt: skip
        blocks.append(
            Table(
                "Recoveries, on held-out sequences of their text, nats a token",
                heads,
                tuple(rows),
                text_columns=2,
                note="Means over the held-out sequences; they come without standard errors.",
            )
        )
    curved = [(entry, label, lines) for entry in found.entries for label, lines in entry.curves.items()]
    if len(curved) <= 2:
        for entry, label, lines in curved:
            blocks += [
                _curve(f"{entry.name}, {label}", lines, name, said)
                for name, said in (("cross_entropy", "cross entropy"), ("kl", "KL from the teacher"))
            ]
    else:
        by_budget: dict[str, list[tuple[Entry, str, list[dict[str, Any]]]]] = {}
        for entry, label, lines in curved:
            by_budget.setdefault(_budget_name([entry]), []).append((entry, label, lines))
        for budget, some in by_budget.items():
            for start in range(0, len(some), _LINES):
                series = [
                    Series(
                        entry.name if label == "recovered" else f"{entry.name}, {label}", _validations(lines, "loss")
                    )
                    for entry, label, lines in some[start : start + _LINES]
                ]
                blocks.append(
                    Chart(
                        f"Validation loss, removed {budget}" + (f", part {start // _LINES + 1}" if start else ""),
                        f"Loss on held-out sequences against tokens trained on, a line for each of "
                        f"{_listed(line.name for line in series)}.",
                        "tokens",
                        "loss, nats a token",
                        tuple(line for line in series if line.points),
                    )
                )
    return blocks


def _curve(name: str, lines: list[dict[str, Any]], key: str, said: str) -> Chart:
    steps = [line for line in lines if "tokens" in line and key in line]
    width = max(1, -(-len(steps) // _BINS))
    bins = [steps[start : start + width] for start in range(0, len(steps), width)]
    training = tuple(Point(each[-1]["tokens"], fmean(line[key] for line in each)) for each in bins)
    averaged = f", means of {width} steps" if width > 1 else ""
    return Chart(
        f"{said}: {name}",
        f"{said} against tokens trained on: of every training step as a thin line, of the validations with marks.",
        "tokens", f"{said}, nats a token",
        (Series(f"training{averaged}", training, thin=True), Series("validation", _validations(lines, key))),
    )  # fmt: skip


def _validations(lines: list[dict[str, Any]], key: str) -> tuple[Point, ...]:
    tokens = {0: 0, **{line["step"]: line["tokens"] for line in lines if "tokens" in line}}
    return tuple(
        Point(tokens.get(line["step"], 0), line["validation"][key])
        for line in lines
        if isinstance(line.get("validation"), dict) and key in line["validation"]
    )


_PICTURES = {
    "utilisation": "rank utilisation of the states against the tokens seen",
    "heads": "rank utilisation of each head, against the unpruned model's",
    "spectra": "mean normalised singular values of the states, layer by layer",
    "kappa": "share of states up to a condition number",
    "errors": "relative error of each mixer's output",
    "conditioning": "singular values and conditioning of all and of the kept columns",
    "overlap": "overlap of two selections, layer by layer",
    "filters": "mean absolute taps of the short convolutions",
}


def _analyses(found: Found) -> list[Block]:
    """As Tables 5 and 6 of arXiv 2602.04852."""
    states: list[tuple[str, ...]] = []
    columns: list[tuple[str, ...]] = []
    blocks: list[Block] = []
    for entry in found.entries:
        if entry.analysis is None:
            continue
        for label, each in entry.analysis["models"].items():
            error = each["output_error"] or {}
            states.append(
                (entry.name, label, *(_plain(each[name]) for name in ("utilisation", "effective_rank", "pearson")),
                 _plain(each["kappa_median"]), f"{each['kappa_at_floor']:.1%}", _plain(error.get("own")))
            )  # fmt: skip
        names = ("all channels", "kept", "compared")
        for name, row in zip(names, entry.analysis.get("conditioning", ()), strict=False):
            columns.append((entry.name, name, *map(_plain, row)))
    if states:
        heads = ("cell", "model", "rank utilisation", "effective rank", "Pearson with base", "κ of a state, median",
                 "at its floor", "output error")  # fmt: skip
        note = "Means over heads and positions of lapcli analyze; it gives no standard errors."
        blocks.append(Table("States", heads, tuple(states), text_columns=2, note=note))
    if columns:
        heads = ("cell", "columns", "σ min", "σ max", "κ")
        note = "Medians over heads: that of κ is not the ratio of the other two."
        blocks.append(Table("Conditioning of the joint key and query columns", heads, tuple(columns), 2, note))
    blocks += _utilisation(found)
    if not found.sweep:
        for entry in found.entries:
            blocks += [
                Picture(said.capitalize(), said, path.read_bytes(), str(path))
                for name, said in _PICTURES.items()
                if (path := entry.run.analysis / f"{name}.png").is_file() and path.read_bytes().startswith(b"\x89PNG")
            ]
    return blocks


def _utilisation(found: Found) -> list[Block]:
    """As Figure 3 of arXiv 2602.04852, of a sweep; a run has the picture that `analyze` drew."""
    looked = [(entry, entry.analysis) for entry in found.entries if entry.analysis is not None]
    if not found.sweep or not looked:
        return []
    told = [{**analysis["settings"], "models": None} for _entry, analysis in looked]
    methods = [entry.axes.get("method") for entry, _analysis in looked]
    one_each = len(set(methods)) == len(methods)
    series: dict[str, Series] = {}
    for (entry, analysis), settings in zip(looked, told, strict=True):
        if settings != told[0]:
            continue  # other text or positions: no line to be laid beside the others
        for label, values in analysis["utilisation"].items():
            cell = str(entry.axes["method"]) if one_each else entry.name
            name = "unpruned" if label == "base" else cell if label == "sliced" else f"{cell}, {label}"
            points = [Point(x, y) for x, y in zip(analysis["positions"], values, strict=True)]
            # Thinned from the end, so that markers can be told apart.
            step = (len(points) + _MARKERS - 1) // _MARKERS
            points = tuple(points[::-step][::-1])
            # The unpruned model is the same one in every cell.
            series.setdefault(name, Series(name, points))
    return [
        Chart(
            "Rank utilisation of the states",
            "er(S) / min(K, V), mean over all heads, layers and samples, against the tokens seen, a line for each of "
            f"{_listed(series)}.",
            "tokens seen",
            "rank utilisation",
            tuple(series.values())[:_LINES],
        )
    ]


def _plain(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.3g}"


def _notes(found: Found) -> list[Block]:
    blocks: list[Block] = []
    broken = [f"{entry.name}: {entry.failure}" for entry in found.entries if entry.failure]
    if broken:
        blocks += [Paragraph("Not whole, and in none of the tables unless scores are there:"), Items(tuple(broken))]
    said: dict[str, None] = {}
    for evaluation in (found.base, *(entry.evaluation for entry in found.entries)):
        for note in evaluation_table(evaluation).notes if evaluation else ():
            if not note.startswith("\N{PLUS-MINUS SIGN}"):
                said[note] = None
    for entry in found.entries:
        said |= dict.fromkeys(f"{entry.name}: {warning}" for warning in entry.warnings)
    said |= dict.fromkeys(f"not in this report: {problem}" for problem in found.problems)
    unlike = {tuple(sorted(entry.evaluation.versions.items())) for entry in found.entries if entry.evaluation}
    if len(unlike) > 1:
        said["The cells were measured with different versions or devices; the table of models says which."] = None
    return [*blocks, Items(tuple(said))] if said else blocks


def _models(found: Found) -> list[Block]:
    rows: dict[tuple[str, ...], None] = {}
    for entry in found.entries:
        for model in entry.evaluation.models if entry.evaluation else ():
            name = "base" if model.label == "base" and found.sweep else f"{entry.name}: {model.label}"
            device = (entry.evaluation.versions if entry.evaluation else {}).get("device", "not noted")
            rows[name, (model.digest or "none")[:12], model.dtype, model.kernel, device, f"{model.parameters:,}"] = None
    blocks: list[Block] = []
    if rows:
        heads = ("model", "digest", "dtype", "kernel", "device", "parameters")
        blocks.append(Table("Models that were measured", heads, tuple(rows)))
    blocks += _measured(found)
    settings = {
        f"{stage}: {', '.join(f'{name} {value}' for name, value in values.items() if value is not None)}": None
        for entry in found.entries
        for stage, values in entry.settings.items()
        if values
    }
    if settings:
        blocks += [Paragraph("Settings of the stages, each set once:"), Items(tuple(sorted(settings)))]
    return blocks


_PLACES = {
    f"--task-data {UNKNOWN_FOLDER}": f"{UNKNOWN_FOLDER} stands for the folder with local copies of task data; results "
    "do not name it.",
    f"--niah-haystack {UNKNOWN_FILE}": f"{UNKNOWN_FILE} stands for the text that needles were hidden in; results do "
    "not name it.",
}


def _measured(found: Found) -> list[Block]:
    """Of each task what its numbers depend on, once for each way in which it was measured."""
    rows: dict[tuple[str, ...], None] = {}
    for evaluation in (found.base, *(entry.evaluation for entry in found.entries)):
        for each in measured(evaluation, found.folders) if evaluation else ():
            rows[
                each.task, each.origin, (each.digest or "none")[:12], each.said_items, each.said_limit,
                *("\N{EN DASH}" if value is None else str(value) for value in (each.max_length, each.stride)),
                _listed(each.lengths) or "\N{EN DASH}", each.bos or "not noted",
                "\N{EN DASH}" if each.seed is None else str(each.seed),
            ] = None  # fmt: skip
    heads = ("task", "data from", "digest", "items", "limit", "max length", "stride", "lengths", "BOS", "seed")
    note = "A digest is of the texts, or of what was asked; a dash stands where a setting does not enter."
    return [Table("How each task was measured", heads, tuple(rows), text_columns=3, note=note)] if rows else []


def _commands(found: Found) -> list[Block]:
    blocks: list[Block] = []
    typed = [" ".join(each["command"]) for each in (found.sweep.sessions if found.sweep else ()) if each.get("command")]
    if typed:
        blocks += [Paragraph("As typed:"), Listing(tuple(dict.fromkeys(typed)))]
    lines = [line for entry in found.entries for line in entry.commands]
    if lines:
        blocks += [
            Paragraph("The same chains by single commands, with the settings that are stored with the results:"),
            Listing(tuple(lines)),
        ]
        told = [said for option, said in _PLACES.items() if any(f" {option}" in line for line in lines)]
        blocks += [Paragraph(" ".join(told))] if told else []
    return blocks
