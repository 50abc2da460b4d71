"""Write docs/performance.md from what `lapcli bench` measured: tables, goals, crossings; no figure of its own.

python scripts/performance.py RESULTS.json... [--notes FILE.md] [--output docs/performance.md]

Each file is one that `lapcli bench --output` wrote. `--notes` is put in as it is, under "What stands in between".
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.artifacts.atomic import atomic_file
from lapcli.benchmarks.speed.paper import paper_tables
from lapcli.benchmarks.speed.results import Row, read_results
from lapcli.benchmarks.speed.tables import generation_crossings, notes, prefill_crossings, ratio, tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
HEAD = """# Performance

Made by `scripts/performance.py` from what `lapcli bench` measured; do not edit. [Benchmarks](benchmarks.md) says how
everything is measured and what a floor is. A way whose results were wrong has no figure; a cell without room says so.
"""


@dataclass(frozen=True)
class Goal:
    """Something to reach.

    Attributes:
        what: in words.
        wanted: the bound.
        at_least: whether the figure must be that large; else that small.
        found: the figure, from rows.
    """

    what: str
    wanted: float
    at_least: bool
    found: Callable[[Sequence[Row]], float | None]


def find(rows: Sequence[Row], **cell: Any) -> Row | None:
    """The first measured row whose cell is like that; widths and ratios by `key_width` and `ratio`."""
    return next(
        (
            row
            for row in rows
            if row.seconds is not None and all(getattr(row.cell, name) == value for name, value in cell.items())
        ),
        None,
    )


def _decode(share: float, batch: int, way: str = "lapcli") -> dict[str, Any]:
    return {"what": "decode", "model": "gdn", "ratio": share, "batch": batch, "way": way}


def _against_unpruned(share: float, batch: int) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: ratio(find(rows, **_decode(0.0, batch, "fla graph")), find(rows, **_decode(share, batch)))


def _of_floor(**cell: Any) -> Callable[[Sequence[Row]], float | None]:
    def found(rows: Sequence[Row]) -> float | None:
        row = find(rows, **cell)
        return None if row is None else row.over_floor

    return found


def _worst_step(state: str, batch: int) -> Callable[[Sequence[Row]], float | None]:
    """Over all widths of all layers."""

    def found(rows: Sequence[Row]) -> float | None:
        shares = [
            row.over_floor
            for row in rows
            if row.cell.what == "decode operator"
            and (row.cell.way, row.cell.state_dtype, row.cell.batch) == ("lapcli", state, batch)
            and row.over_floor is not None
        ]
        return max(shares, default=None)

    return found


def _best(rows: Sequence[Row], ways: Sequence[str], **cell: Any) -> Row | None:
    found = [row for way in ways if (row := find(rows, way=way, **cell)) is not None]
    return min(found, key=lambda row: row.seconds or 0.0, default=None)


_PROMPT: dict[str, Any] = {
    "what": "prefill operator",
    "model": "qwen3.5",
    "batch": 8,
    "tokens": 8192,
    "backward": False,
}


def _prompt_operator(rows: Sequence[Row]) -> float | None:
    row = _best(rows, ("lapcli", "triton"), key_width=64, **_PROMPT)
    return None if row is None or row.seconds is None else row.seconds * 1e3


def _prompt_operator_against(way_of: Sequence[str], width: int) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: ratio(
        _best(rows, way_of, key_width=width, **_PROMPT), _best(rows, ("lapcli", "triton"), key_width=64, **_PROMPT)
    )


def _prefill(rows: Sequence[Row]) -> float | None:
    cell: dict[str, Any] = {"what": "prefill", "model": "gdn", "batch": 8, "tokens": 8192}
    return ratio(find(rows, ratio=0.0, way="fla", **cell), _best(rows, ("lapcli", "triton"), ratio=0.5, **cell))


def _sequences(share: float) -> Callable[[Sequence[Row]], float | None]:
    def found(rows: Sequence[Row]) -> float | None:
        base = find(rows, what="memory", model="gdn", ratio=0.0)
        row = find(rows, what="memory", model="gdn", ratio=share)
        return None if base is None or row is None else row.more["fit"] / base.more["fit"]

    return found


def _generate(rows: Sequence[Row]) -> float | None:
    """Of the base, or where that was not measured of what is left of it; against the library's with the same model."""
    for share in (0.0, 0.5, 0.75):
        cell: dict[str, Any] = {"what": "generate", "model": "gdn", "ratio": share}
        times = ratio(find(rows, way="library", **cell), find(rows, way="lapcli", **cell))
        if times is not None:
            return times
    return None


GOALS = (
    Goal("decode, batch 64, half the state: times unpruned fla with a graph", 2.2, True, _against_unpruned(0.5, 64)),
    Goal("decode, batch 64, a quarter of the state: the same", 3.2, True, _against_unpruned(0.75, 64)),
    Goal("decode, batch 64, half the state: of the floor", 1.25, False, _of_floor(**_decode(0.5, 64))),
    Goal("decode, batch 64, a quarter of the state: of the floor", 1.25, False, _of_floor(**_decode(0.75, 64))),
    Goal("decode, batch 1, half the state: of the floor", 1.5, False, _of_floor(**_decode(0.5, 1))),
    Goal("generation, batch 1: times the library's `generate` of the same model", 15, True, _generate),
    Goal("state operator, fp32, batch 256: of the floor, the worst width", 1.10, False, _worst_step("float32", 256)),
    Goal("state operator, fp32, batch 64: the same", 1.15, False, _worst_step("float32", 64)),
    Goal("state operator, bf16, batch 256: the same", 1.20, False, _worst_step("bfloat16", 256)),
    Goal("prefill operator, Qwen3.5 layer at K 64, 8 x 8192: ms", 0.9, False, _prompt_operator),
    Goal("… times fla's at K 64", 3, True, _prompt_operator_against(("fla",), 64)),
    Goal("… times the best kernel at K 128", 1.4, True, _prompt_operator_against(("FlashQLA", "fla"), 128)),
    Goal("prefill, whole model, 8 x 8192, half the state: times unpruned fla", 1.3, True, _prefill),
    Goal("sequences in the same memory, half the state: times the base", 1.9, True, _sequences(0.5)),
    Goal("sequences in the same memory, a quarter of the state: the same", 3.5, True, _sequences(0.75)),
)


def goals_table(rows: Sequence[Row]) -> list[str]:
    """Lines of the goals that something was measured for."""
    lines: list[str] = []
    for goal in GOALS:
        value = goal.found(rows)
        if value is not None:
            reached = value >= goal.wanted if goal.at_least else value <= goal.wanted
            sign = ">=" if goal.at_least else "<="
            lines.append(f"| {goal.what} | {sign} {goal.wanted:g} | {value:.2f} | {'yes' if reached else 'no'} |")
    return ["| what | goal | measured | reached |", "| --- | --- | --- | --- |", *lines] if lines else []


def machine_line(machine: dict[str, Any]) -> str:
    """What figures were measured on, in a line."""
    versions = machine.get("versions", {})
    names = ("torch", "triton", "fla-core", "transformers", "flash-qla", "flashinfer-python", "tilelang")
    shown = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return (
        f"{machine['device']}, {machine['date']}; {shown}; copies {machine['copy_bytes'] / 1e12:.3g} TB/s, products "
        f"{machine['product_flops'] / 1e12:.3g} TFLOP/s in the same run."
    )


def page(paths: Sequence[Path], remarks: str = "") -> str:
    """The whole page."""
    documents = read_results(paths)
    rows = [row for _document, some in documents for row in some]
    lines = [HEAD]
    goals = goals_table(rows)
    if goals:
        lines += ["## Against the goals", "", *goals, ""]
    if remarks:
        lines += ["## What stands in between", "", remarks.strip(), ""]
    for document, some in documents:
        lines += [f"## `{document['command']}`", "", machine_line(document["machine"]), ""]
        found = paper_tables(some) if "--paper" in document["command"] else tables(some)
        for table in found:
            lines += [f"{table.title}:", "", *table.markdown(), ""]
        remarked = [*prefill_crossings(some), *notes(some)]
        lines += [*(f"- {text}" for text in remarked), ""] if remarked else []
    crossed = generation_crossings(rows)
    if crossed:
        lines += ["## Prompt and generation together", "", *(f"- {text}" for text in crossed), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    text = page(given.results, given.notes.read_text() if given.notes else "")
    with atomic_file(given.output) as temporary:
        temporary.write_text(text)


if __name__ == "__main__":
    main()
