"""The study's tables, from its lines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies import page as page_of
from studies.lines import Line

from serving.lines import ENDURANCE, FIXED, MEMORY, MODES, TRACE, lines_of

BEGIN, END = "<!-- serving-study: begin -->", "<!-- serving-study: end -->"

PAPER = 2.29
"""Times the normalised latency of `adaptive` that unconverted serving has in arXiv 2506.09316."""
_MIB = 2.0**20
_ORDER = ("never", "static", "adaptive")
_LATENCIES = (
    ("normalised latency, mean", "normalised_seconds", "mean"),
    ("normalised latency, p99", "normalised_seconds", "p99"),
    ("first token, p95", "first_token_seconds", "p95"),
    ("between tokens, p95", "inter_token_seconds", "p95"),
    ("whole answer, p99", "answer_seconds", "p99"),
)


def write(files: Sequence[Path]) -> str:
    """The tables as Markdown.

    Raises:
        DataError: a file is missing, or a line is damaged or of something else.
        SystemExit: there is nothing to show.
    """
    parts = [_modes(lines) for lines in _alike(lines_of(files, MODES), TRACE)]
    parts += [_fixed(lines) for lines in _alike(lines_of(files, FIXED), MEMORY)]
    parts += [_endurance(line) for line in lines_of(files, ENDURANCE)]
    if not parts:
        raise SystemExit(f"no lines in {', '.join(map(str, files))}")
    return "\n\n".join(parts) + "\n"


def put(tables: str, page: Path) -> None:
    """Put tables between the marks of a page."""
    page_of.put(tables, page, BEGIN, END)


def _alike(lines: Sequence[Line], names: Sequence[str]) -> list[list[Line]]:
    """Lines that agree in these fields, the largest group first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return sorted(groups.values(), key=lambda group: -len(group))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _modes(lines: list[Line]) -> str:
    """Modes side by side: served, simulated behind a comma, and what is divided by what."""
    names = sorted({line["mode"] for line in lines}, key=lambda name: _ORDER.index(name.partition(":")[0]))
    by_key = {(line["mode"], line["served"]): line["figures"] for line in lines}
    first = lines[0]
    about = (
        f"{first['model']}, {first['dtype']}, {first['memory']}, requests of up to {first['max_length']} tokens; "
        f"{first['requests']} requests of {first['trace']}, time times {first['time_scale']:.3g}, lengths times "
        f"{first['length_scale']:g}; {first['machine']}, {_dates(lines)}. Served, simulated."
    )
    drawn = " Weights were drawn at random: times and bytes do not depend on them, perplexities are of no model."

    def row(label: str, of: Callable[[dict[str, Any]], str]) -> list[str]:
        both = [[by_key.get((name, served)) for served in (True, False)] for name in names]
        return [label, *(", ".join("-" if found is None else of(found) for found in pair) for pair in both)]

    rows = [row(label, _milliseconds(figure, column)) for label, figure, column in _LATENCIES]
    rows += [
        row("tokens a second", lambda found: f"{found['tokens_per_second']:.0f}"),
        row("done, refused, failed", lambda found: f"{found['done']}/{found['refused']}/{found['failed']}"),
        row("pages at most", lambda found: f"{found['rows_peak_bytes'] / _MIB:.0f} MiB"),
        row("memory of the engine at most", _mib("peak_memory_bytes")),
        row("layers converted, mean over tokens", lambda found: f"{100 * (found['share_converted'] or 0):.1f} %"),
        *([] if first["drawn"] else [row("perplexity above the base's", _percent("ppl_increase"))]),
        row(
            "steps, of these of several configurations",
            lambda found: f"{found['steps']:.0f}/{found['mixed_steps']:.0f}",
        ),
        row("of such a step, for splitting and rejoining", _percent("split_percent_of_mixed", 1.0)),
        row("handed over, by replay", lambda found: f"{sum(found['switches'].values()):.0f}/{found['replays']:.0f}"),
        row("tokens replayed", lambda found: f"{found['switch_tokens']:.0f}"),
        row("until a replay is done", _milliseconds("switch_mean_seconds")),
        row("set back for want of memory", lambda found: f"{found['set_back']:.0f}"),
    ]
    parts = [about + (drawn if first["drawn"] else ""), _table(["", *names], rows), _ratios(by_key, names)]
    commands = [f"    {line['command']}" for line in lines if line["served"] or (line["mode"], True) not in by_key]
    return "\n\n".join([*(part for part in parts if part), "\n".join(commands)])


def _ratios(by_key: dict[tuple[str, bool], dict[str, Any]], names: Sequence[str]) -> str:
    """What others take over what `adaptive` takes, and how far simulations are off."""
    said: list[str] = []
    for served in (True, False):
        last = by_key.get(("adaptive", served))
        found = [
            f"{name} / adaptive {_mean(by_key[name, served]) / _mean(last):.2f}"
            for name in names
            if last is not None and name != "adaptive" and (name, served) in by_key and _mean(last)
        ]
        if found:
            said.append(f"Normalised latency, {'served' if served else 'simulated'}: {', '.join(found)}.")
    if said:
        said.append(f"The paper has {PAPER} for never / adaptive.")
    off = [
        f"{name} {100 * (_mean(by_key[name, False]) / _mean(by_key[name, True]) - 1):+.0f} %"
        for name in names
        if (name, True) in by_key and (name, False) in by_key and _mean(by_key[name, True])
    ]
    if off:
        said.append(f"Simulated over served: {', '.join(off)}.")
    return " ".join(said)


def _mean(figures: dict[str, Any]) -> float:
    return (figures["normalised_seconds"] or {}).get("mean", 0.0)


def _fixed(lines: list[Line]) -> str:
    """A model and its cut at one memory."""
    first = lines[0]
    about = (
        f"{first['memory']} for weights and states, {first['dtype']}, {first['requests']} requests of {first['trace']} "
        f"at once, lengths times {first['length_scale']:g}; {first['machine']}, {_dates(lines)}:"
    )
    rows = [
        ["requests at once", *(str(line["rows"]) for line in lines)],
        ["tokens a second", *(f"{line['figures']['tokens_per_second']:.0f}" for line in lines)],
        ["between tokens, p95", *(_milliseconds("inter_token_seconds", "p95")(line["figures"]) for line in lines)],
        ["whole answer, mean", *(_milliseconds("answer_seconds", "mean")(line["figures"]) for line in lines)],
        ["done of all", *(f"{line['figures']['done']} of {line['figures']['requests']}" for line in lines)],
        ["memory at most", *(f"{line['peak_memory_bytes'] / _MIB:.0f} MiB" for line in lines)],
    ]
    commands = "\n".join(f"    {line['command']}" for line in lines)
    return "\n\n".join([about, _table(["", *(line["model"] for line in lines)], rows), commands])


def _endurance(line: Line) -> str:
    """Growth of memory over many requests."""
    found = line["figures"]
    parts = "; ".join(
        f"{name} {found[name]['bytes_a_request']} ± {found[name]['standard_error']} bytes a request (of "
        f"{found[name]['bytes_last'] / _MIB:.0f} MiB)"
        for name in ("front", "engine")
    )
    return (
        f"{found['requests']} requests, {line['concurrency']} at a time, to {line['model']} in {found['seconds']} s "
        f"({line['machine']}, {line['date']}), memory: {parts}; left over {sum(found['left_over'].values()):.0f}.\n\n"
        f"    {line['command']}"
    )


def _milliseconds(figure: str, column: str | None = None) -> Callable[[dict[str, Any]], str]:
    def said(found: dict[str, Any]) -> str:
        value = found.get(figure)
        value = value.get(column) if column is not None and value is not None else value
        return "-" if value is None else f"{1e3 * value:.1f} ms" if value < 10 else f"{value:.1f} s"

    return said


def _percent(figure: str, factor: float = 100.0) -> Callable[[dict[str, Any]], str]:
    return lambda found: "-" if found.get(figure) is None else f"{factor * found[figure]:.1f} %"


def _mib(figure: str) -> Callable[[dict[str, Any]], str]:
    return lambda found: "-" if found.get(figure) is None else f"{found[figure] / _MIB:.0f} MiB"


def _dates(lines: Sequence[Line]) -> str:
    dates = sorted({line["date"] for line in lines})
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
