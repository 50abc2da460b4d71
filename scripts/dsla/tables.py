"""The study's tables, from its lines."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from studies import page as page_of
from studies.lines import Line

from dsla.arms import ARMS, BASE, BUDGET, CONVERSION, KEYS, LENGTHS, LINES, TEACHER

BEGIN, END = "<!-- dsla-study: begin -->", "<!-- dsla-study: end -->"

_SCORES = (
    ("WikiText-2 perplexity", "wikitext", "word_perplexity", 1.0),
    ("LAMBADA perplexity", "lambada", "perplexity", 1.0),
    ("LAMBADA, %", "lambada", "acc", 100.0),
    ("zero-shot mean, %", "zeroshot", "mean", 100.0),
)


def key_of(line: Line) -> tuple[Any, ...]:
    """What tells a line from others."""
    return tuple(line[name] for name in KEYS)


def write(files: Sequence[Path]) -> str:
    """The tables as Markdown: some for each model and budget, since only those compare.

    Raises:
        DataError: a file is missing, or a line is damaged or of something else.
        SystemExit: there is nothing to show.
    """
    found = {key_of(line): line for line in LINES.read(files, CONVERSION)}
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in found.values():
        groups.setdefault(tuple(line[name] for name in BUDGET), []).append(line)
    if not groups:
        raise SystemExit(f"no lines of conversions in {', '.join(map(str, files))}")
    return "\n\n".join(_group(lines) for _, lines in sorted(groups.items(), key=lambda pair: -len(pair[1]))) + "\n"


def put(tables: str, page: Path) -> None:
    """Put tables between the marks of a page."""
    page_of.put(tables, page, BEGIN, END)


def _group(lines: list[Line]) -> str:
    """All tables of one model and budget."""
    example = max(lines, key=lambda line: len(line["commands"]))
    tokens = example["steps"] * example["batch"] * example["seq_len"]
    dates = sorted({line["date"] for line in lines})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    items = f"{example['limit']} items a task" if example["limit"] else "all items of a task"
    about = (
        f"{example['model']} ({example['digest'][:12]}), {tokens:,} tokens a layer in sequences of "
        f"{example['seq_len']}, learning rate {example['lr']:g}, text {example['text'][:12]}, {items}; means ± "
        "standard deviations over seeds. "
        f"{', '.join(sorted({line['machine'] for line in lines}))}; {when}. For example:"
    )
    commands = [f"    {command}" for command in example["commands"]]
    parts = [*_quality(lines), "", about, "", *commands]
    for further in (_paired(lines), _bytes(lines), _layers(lines), _correlations(lines)):
        parts += ["", *further] if further else []
    return "\n".join(parts)


def _quality(lines: Sequence[Line]) -> list[str]:
    """Each arm at each fraction."""
    lengths = sorted({row["length"] for line in lines for row in line["rows"] if row["task"] == "niah"})
    titles = ["layers", "seeds", "held-out perplexity", *(score[0] for score in _SCORES)]
    rows = _head("", [*titles, *(f"NIAH at {length}, %" for length in lengths)])
    for arm in (TEACHER, *ARMS):
        mine = [line for line in lines if line["arm"] == arm]
        for fraction in sorted({line["fraction"] for line in mine}, key=float):
            each = [line for line in mine if line["fraction"] == fraction]
            name = TEACHER if arm == TEACHER else ARMS[arm][0]
            cells = [f"{100 * float(fraction):g} %", str(len(each)), _spread([_held_out(line) for line in each])]
            cells += [_spread([_score(line, *score[1:]) for line in each]) for score in _SCORES]
            cells += [_spread([_score(line, "niah", None, 100.0, length) for line in each]) for length in lengths]
            rows.append(_row(name, cells))
    return rows


def _paired(lines: Sequence[Line]) -> list[str]:
    """What other arms differ by from the base, seed by seed at the same fraction."""
    base = {(line["seed"], line["fraction"]): line for line in lines if line["arm"] == BASE}
    columns: list[tuple[str, Callable[[Line], float | None]]] = [("held-out perplexity", _held_out)]
    columns += [(title, lambda line, parts=parts: _score(line, *parts)) for title, *parts in _SCORES]
    columns.append(("NIAH, %", _needles))
    rows = _head(f"less {ARMS[BASE][0]}", ["layers", "seeds", *(title for title, _ in columns)])
    empty = len(rows)
    for arm, (name, _) in ARMS.items():
        mine = [line for line in lines if line["arm"] == arm != BASE]
        for fraction in sorted({line["fraction"] for line in mine}, key=float):
            pairs = [
                (line, base[line["seed"], fraction])
                for line in mine
                if line["fraction"] == fraction and (line["seed"], fraction) in base
            ]
            if pairs:
                gaps = [_spread([_gap(value(one), value(other)) for one, other in pairs]) for _, value in columns]
                rows.append(_row(name, [f"{100 * float(fraction):g} %", str(len(pairs)), *gaps]))
    return rows if len(rows) > empty else []


def _bytes(lines: Sequence[Line]) -> list[str]:
    """Keys, values and states of a sequence by its length, in MiB."""
    rows = _head("MiB a sequence keeps", ["layers", *(f"{length // 1024}K tokens" for length in LENGTHS)])
    for arm in (TEACHER, BASE, "dual", "wide", "window"):
        mine = {line["fraction"]: line for line in lines if line["arm"] == arm}
        for fraction in sorted(mine, key=float):
            kept, states = (mine[fraction]["conversion"][name] for name in ("kv_bytes_a_token", "state_bytes"))
            cells = [f"{(kept * length + states) / 2**20:.4g}" for length in LENGTHS]
            rows.append(_row(TEACHER if arm == TEACHER else ARMS[arm][0], [f"{100 * float(fraction):g} %", *cells]))
    return [*rows, "", "Keys and values in bf16, states in fp32, a window's keys and values in bf16."]


def _layers(lines: Sequence[Line]) -> list[str]:
    """What became of each layer of the base arm, at its largest fraction and first seed."""
    mine = [line for line in lines if line["arm"] == BASE]
    if not mine:
        return []
    line = max(mine, key=lambda each: (float(each["fraction"]), -each["seed"]))
    rows = _head("layer, in order of conversion", ["alignment before", "after", "KL", "perplexity", "mixture"])
    for each in line["conversion"]["layers"]:
        cells = [f"{each[name]:.4f}" for name in ("before", "after", "kl")] + [f"{each['perplexity']:.2f}"]
        rows.append(_row(str(each["layer"]), [*cells, " ".join(f"{share:.3f}" for share in each["mixture"])]))
    return [*rows, "", f"{ARMS[BASE][0].capitalize()}, seed {line['seed']}; the mixture is history first."]


def _correlations(lines: Sequence[Line]) -> list[str]:
    """Rank correlations of the measures of layers, wherever two were measured."""
    found = {
        name: value
        for line in lines
        for name, value in line["conversion"].get("rank_correlations", {}).items()
        if value is not None
    }
    rows = _head("measures of layers", ["rank correlation"])
    return [*rows, *(_row(name, [f"{found[name]:.3f}"]) for name in sorted(found))] if found else []


def _held_out(line: Line) -> float | None:
    return line["conversion"].get("perplexity")


def _score(line: Line, task: str, metric: str | None, factor: float, length: int | None = None) -> float | None:
    """A score; of a task with one metric, whatever that is called."""
    return next(
        (
            row["values"]["model"]["value"] * factor
            for row in line["rows"]
            if row["task"] == task and row["length"] == length and metric in (None, row["metric"])
        ),
        None,
    )


def _needles(line: Line) -> float | None:
    found = [row["values"]["model"]["value"] for row in line["rows"] if row["task"] == "niah" and row["length"]]
    return 100 * mean(found) if found else None


def _gap(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _spread(found: Iterable[float | None]) -> str:
    """Mean and standard deviation of what was measured."""
    values = [value for value in found if value is not None]
    if not values:
        return "-"
    said = f"{mean(values):.4g}"
    return said if len(values) < 2 else f"{said} ± {stdev(values):.2g}"


def _head(corner: str, titles: Sequence[str]) -> list[str]:
    return [_row(corner, titles), _row("---", ["---"] * len(titles))]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
