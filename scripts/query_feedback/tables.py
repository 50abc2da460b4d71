"""The study's tables, from its lines."""

from collections.abc import Callable, Iterable, Sequence
from math import exp, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from studies import page as page_of
from studies.lines import Line

from query_feedback.corpora import MIXTURES
from query_feedback.lines import LINES, PILOT, RECOVERY, THROUGHPUT, TRAINING, key_of
from query_feedback.variants import BASE, NEEDLES, TRAINED, TRAINED_LENGTH, UNTRAINED, VARIANTS

BEGIN, END = "<!-- query-feedback-study: begin -->", "<!-- query-feedback-study: end -->"

Column = tuple[str, int | None]
_BUILTIN: Column = ("builtin", None)


def write(files: Sequence[Path]) -> str:
    """The tables as Markdown: one for each budget, text, number of prompts, since only those compare.

    Raises:
        DataError: a file is missing, or a line is damaged or of something else.
        SystemExit: there is nothing to show.
    """
    found = {key_of(each): each for each in LINES.read(files)}
    parts: list[str] = []
    for kind, shown, compare in (
        (TRAINING, _tables, ("tokens", "text", "limit", "dtype", "mixture", "batch", "optimizer", "lr")),
        (PILOT, _pilots, ("tokens", "text", "limit", "dtype")),
        (THROUGHPUT, _throughput, ("machine", "batch", "dtype")),
    ):
        alike = _alike((line for key, line in found.items() if key[0] == kind), compare)
        parts += [shown(lines) for lines in alike]
    parts += _recoveries([line for key, line in found.items() if key[0] == RECOVERY])
    if not parts:
        raise SystemExit(f"no runs in {', '.join(map(str, files))}")
    return "\n\n".join(parts) + "\n"


def put(tables: str, page: Path) -> None:
    """Put tables between the marks of a page."""
    page_of.put(tables, page, BEGIN, END)


def _alike(lines: Iterable[Line], names: Sequence[str]) -> list[list[Line]]:
    """Lines that agree in these fields, the largest group first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return [group for _, group in sorted(groups.items(), key=lambda pair: -len(pair[1]))]


def _tables(runs: list[Line]) -> str:
    """Means and spreads, then differences from the base by seed."""
    by_variant = {
        name: sorted((each for each in runs if each["variant"] == name), key=lambda each: each["seed"])
        for name in VARIANTS
    }
    present = {name: each for name, each in by_variant.items() if each}
    example = runs[0]
    lengths = _lengths(runs)
    columns: list[Column] = [_BUILTIN, *((task, length) for task in NEEDLES for length in lengths)]
    lines = _head("", ["seeds", "held-out training text", *map(_title, columns)])
    for name, each in present.items():
        cells = [str(len(each)), _spread([_perplexity(run) for run in each], 2)]
        lines.append(_row(VARIANTS[name], [*cells, *_cells(each, columns)]))
    base = {run["seed"]: run for run in present.get(BASE, [])}
    paired = {
        name: [(run, base[run["seed"]]) for run in each if run["seed"] in base]
        for name, each in present.items()
        if name != BASE
    }
    if any(paired.values()):
        lines += [
            "",
            f"Differences from {VARIANTS[BASE]}, seed by seed (same text in the same order), mean ± standard error:",
            "",
            *_differences({VARIANTS[name]: pairs for name, pairs in paired.items()}, lengths),
        ]
    lines += [
        "",
        f"{example['tokens']:,} tokens a run of the mixture `{example['mixture']}` by {example['optimizer']} "
        f"at {example['lr']:g}, {example['batch']:,} a step, in rows of {TRAINED_LENGTH}, so that longer prompts are "
        f"beyond what was trained; {example['limit']} prompts a length, in {example['dtype']}; means ± standard "
        "deviations over seeds. "
        f"{_when_and_where(runs)}. Text {example['text'][:12]}. For example:",
        "",
        *(f"    {command}" for command in example["commands"]),
    ]
    return "\n".join(lines)


def _pilots(runs: list[Line]) -> str:
    """What Gated DeltaNet recalls after as many tokens of several mixtures, in steps of several sizes."""
    lengths, example = _lengths(runs), runs[0]
    columns: list[Column] = [_BUILTIN, *((task, length) for task in NEEDLES for length in lengths)]
    lines = _head("mixture", ["optimizer", "learning rate", "tokens a step", *map(_title, columns)])
    for name, shares in MIXTURES.items():
        for run in sorted((each for each in runs if each["mixture"] == name), key=lambda each: -each["batch"]):
            said = ", ".join(f"{share:.0%} {part}" for part, share in shares.items())
            lines.append(
                _row(
                    f"`{name}`: {said}",
                    [run["optimizer"], f"{run['lr']:g}", f"{run['batch']:,}", *_cells([run], columns)],
                )
            )
    lines += [
        "",
        f"{VARIANTS[example['variant']]}, {example['tokens']:,} tokens, one seed; {example['limit']} prompts a length, "
        f"in {example['dtype']}. "
        f"{_when_and_where(runs)}. Text {example['text'][:12]}.",
    ]
    return "\n".join(lines)


def _throughput(rows: list[Line]) -> str:
    """Thousands of tokens a second, and how many times those of the base."""
    by_place = {(row["variant"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    lines = _head("thousand tokens of prompts a second", [f"{length}" for length in lengths])
    for name in VARIANTS:
        if any((name, length) in by_place for length in lengths):
            lines.append(_row(VARIANTS[name], [_rate(by_place, name, length) for length in lengths]))
    example = rows[0]
    kernels = dict.fromkeys(row["detail"].removeprefix("kernel: ") for row in rows if row["detail"])
    lines += [
        "",
        f"{example['batch']} prompts side by side, {example['dtype']}, random weights, kernel {', '.join(kernels)}; "
        f"the median of {len(example['trials'])} trials, which lie within {_width(rows):.1%} of it; in brackets, how "
        f"many times {VARIANTS[BASE]}'s. {_when_and_where(rows)}. For example:",
        "",
        f"    {example['command']}",
    ]
    return "\n".join(lines)


def _rate(by_place: dict[tuple[str, int], Line], name: str, length: int) -> str:
    row, base = by_place.get((name, length)), by_place.get((BASE, length))
    if row is None:
        return "not measured"
    said = f"{row['tokens_per_second'] / 1000:.4g}"
    if base is None or name == BASE:
        return said
    return f"{said} ({row['tokens_per_second'] / base['tokens_per_second']:.2f})"


def _width(rows: Sequence[Line]) -> float:
    """How far from its median a trial is at most."""
    return max(abs(trial / row["seconds"] - 1) for row in rows for trial in row["trials"])


def _recoveries(lines: list[Line]) -> list[str]:
    """A table for each budget, text, model and ratio: what was only measured stands beside what was trained."""
    trained = [line for line in lines if line["arm"] in TRAINED]
    untrained = [line for line in lines if line["arm"] in UNTRAINED]
    by_model: dict[tuple[Any, ...], list[Line]] = {}
    for line in trained:
        ratios = {line["ratio"]} if line["method"] else {each["ratio"] for each in trained if each["method"]} or {"0"}
        for ratio in ratios:
            steps = tuple(line.get(name) for name in ("batch", "length", "lr"))
            alike = (line["tokens"], line["text"], steps, line["limit"], line["base"], ratio)
            by_model.setdefault(alike, []).append(line)
    parts: list[str] = []
    for (_tokens, _text, _steps, limit, base, ratio), some in by_model.items():
        digests = {line["digest"] for line in some}
        beside = [
            line for line in untrained
            if line["base"] == base and line["limit"] == limit and line["digest"] in digests
            and line["ratio"] in (ratio, "0")
        ]  # fmt: skip
        parts.append(_recovery(base, ratio, beside, some))
    return parts


def _recovery(base: str, ratio: str, untrained: list[Line], trained: list[Line]) -> str:
    everything = [*untrained, *trained]
    lengths = _lengths(everything)
    columns: list[Column] = [_BUILTIN, *((task, length) for task in NEEDLES for length in lengths)]
    methods = list(dict.fromkeys(line["method"] for line in everything if line["method"]))
    lines = _head("cut by", ["", "seeds", *map(_title, columns)])
    for method in ["", *methods]:
        for arm, said in {**UNTRAINED, **TRAINED}.items():
            some = [line for line in everything if (line["method"], line["arm"]) == (method, arm)]
            if some:
                # Of one model that was only measured, no seed says anything.
                seeds = "–" if arm in UNTRAINED and len(some) == 1 else str(len(some))
                lines.append(_row(method or "nothing", [said, seeds, *_cells(some, columns)]))
    pairs = {
        method: [
            (line, other)
            for line in trained
            for other in trained
            if (line["method"], line["arm"], other["method"], other["arm"]) == (method, "feedback", method, "plain")
            and (line["seed"], line["digest"]) == (other["seed"], other["digest"])
        ]
        for method in methods
    }
    if any(pairs.values()):
        lines += [
            "",
            "What query feedback adds to a recovery, seed by seed (same slice, text and order), mean ± standard error:",
            "",
            *_differences(pairs, lengths, "cut by"),
        ]
    shares = _returned(untrained, trained, methods, lengths)
    if shares:
        lines += [
            "",
            f"Of the recall that pruning took (S-NIAH-1 to 3, {TRAINED_LENGTH} tokens and shorter, the mean of all), "
            "the share that is back, mean ± standard deviation over seeds:",
            "",
            *shares,
        ]
    example = next((line for line in trained if line["arm"] == "feedback"), trained[0])
    lines += [
        "",
        f"`{base}`, {ratio} of its key width removed; {example['tokens']:,} tokens of recovery, of the text that the "
        f"small models are trained on; {example['limit']} prompts a length. {_when_and_where(everything)}. "
        "For example:",
        "",
        *(f"    {command}" for command in example["commands"]),
    ]
    return "\n".join(lines)


def _returned(untrained: list[Line], trained: list[Line], methods: Sequence[str], lengths: Sequence[int]) -> list[str]:
    near: list[Column] = [(task, n) for task in NEEDLES for n in lengths if n <= TRAINED_LENGTH]

    def recall(line: Line | None) -> float | None:
        values = [] if line is None else [value for each in near if (value := _value(line, *each)) is not None]
        return mean(values) if values else None

    def beside(line: Line, arm: str, method: str) -> Line | None:
        """The untrained model that a trained one came from: of its seed, where there are several."""
        some = [
            each for each in untrained
            if (each["arm"], each["method"], each["digest"]) == (arm, method, line["digest"])
        ]  # fmt: skip
        return next((each for each in some if each["seed"] == line["seed"]), some[0] if len(some) == 1 else None)

    rows: list[str] = []
    for method in methods:
        for arm in ("plain", "feedback"):
            shares: list[float | None] = []
            for line in trained:
                if (line["method"], line["arm"]) != (method, arm):
                    continue
                whole, cut = recall(beside(line, "base", "")), recall(beside(line, "sliced", method))
                now = recall(line)
                if whole is not None and cut is not None and now is not None and whole > cut:
                    shares.append((now - cut) / (whole - cut))
            if shares:
                rows.append(_row(method, [TRAINED[arm], str(len(shares)), _spread(shares, 2)]))
    return [*_head("cut by", ["", "seeds", "share"]), *rows] if rows else []


def _differences(pairs: dict[str, list[tuple[Line, Line]]], lengths: Sequence[int], corner: str = "") -> list[str]:
    """A row for each name: the first less the second of its pairs."""
    shown = ["seeds", "builtin", *(f"S-NIAH-{task[-1]}, {TRAINED_LENGTH} and shorter" for task in NEEDLES), "… beyond"]
    near, far = ([n for n in lengths if (n <= TRAINED_LENGTH) is inside] for inside in (True, False))
    groups: list[list[Column]] = [[(task, n) for n in near] for task in NEEDLES]
    groups.append([(task, n) for task in NEEDLES for n in far])
    lines = _head(corner, shown)
    for name, some in pairs.items():
        if some:
            cells = [str(len(some)), _error([_gap(*pair, [_BUILTIN]) for pair in some], 2)]
            cells += [_error([_gap(*pair, group) for pair in some], 3) for group in groups]
            lines.append(_row(name, cells))
    return lines


def _head(corner: str, titles: Sequence[str]) -> list[str]:
    return [_row(corner, titles), "| --- " * (len(titles) + 1) + "|"]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |" if name else "| | " + " | ".join(cells) + " |"


def _title(column: Column) -> str:
    task, length = column
    return task if length is None else f"S-NIAH-{task[-1]} {length}"


def _lengths(lines: Iterable[Line]) -> list[int]:
    return sorted({row["length"] for line in lines for row in line["rows"] if row["task"] in NEEDLES})


def _cells(lines: Sequence[Line], columns: Sequence[Column]) -> list[str]:
    return [
        _spread([_value(line, *column) for line in lines], 2 if column[1] is None else 3) for column in columns
    ]  # fmt: skip


def _when_and_where(lines: Sequence[Line]) -> str:
    dates, machines = sorted({line["date"] for line in lines}), sorted({line["machine"] for line in lines})
    said = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{said}, {'; '.join(machines)}"


def _perplexity(run: Line) -> float:
    return exp(run["training"]["after"]["cross_entropy"])


def _value(run: Line, task: str, length: int | None) -> float | None:
    """What a run scored; `None` where it was not measured, since a prompt of that length has no room for the task."""
    metric = "token_perplexity" if length is None else None
    found = [
        row["values"]["model"]["value"]
        for row in run["rows"]
        if row["task"] == task and row["length"] == length and metric in (None, row["metric"])
    ]
    if len(found) > 1:
        raise SystemExit(f"{key_of(run)}: {len(found)} values of {task} at {length}")
    return found[0] if found else None


def _gap(one: Line, other: Line, group: Sequence[Column]) -> float | None:
    """The mean difference of two runs over some scores; `None` where both have none of them."""
    pairs = [(_value(one, *each), _value(other, *each)) for each in group]
    gaps = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    return mean(gaps) if gaps else None


def _spread(found: Sequence[float | None], digits: int) -> str:
    return _said(found, lambda values: f"{mean(values):.{digits}f}", stdev, digits)


def _error(found: Sequence[float | None], digits: int) -> str:
    return _said(
        found, lambda values: f"{mean(values):+.{digits}f}", lambda values: stdev(values) / sqrt(len(values)), digits
    )


def _said(
    found: Sequence[float | None],
    middle: Callable[[list[float]], str],
    width: Callable[[list[float]], float],
    digits: int,
) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return "not measured"
    return middle(values) + (f" ± {width(values):.{digits}f}" if len(values) > 1 else "")
