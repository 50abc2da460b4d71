"""Put what `kernels/benchmarks/delta_rule.py` measured into docs/chunks.md: its table, and the picture of its roofline.

python scripts/chunks_page.py [docs/chunks.jsonl] [docs/chunks.md]

The lines are that benchmark's, to each of which whoever keeps it adds the `command`, `machine` and `date` it came from.
Of lapkernels' rows of a shape the fastest tiles are shown, which are those that `choose_tiles` takes.
"""

import argparse
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.boundary import answer
from studies.lines import Lines
from studies.page import put

from lapcli.artifacts.atomic import atomic_file

BEGIN, END = "<!-- chunks: begin -->", "<!-- chunks: end -->"
_DOCS = Path(__file__).resolve().parent.parent / "docs"
_CHUNK = 64
_COPY, _PRODUCTS = 4.25e12, 780e12
"""Of the H200 that the lines are from: bytes a second of a large copy, operations a second of a large bf16 product."""
_SHAPE = ("batch", "time", "key_heads", "value_heads", "key_width", "value_width")

_LINES = Lines(
    {"delta rule": (*_SHAPE, "impl", "kernels_us", "machine", "date", "command")},
    "kernels/benchmarks/delta_rule.py",
    unsaid="delta rule",
)


def operations(row: Mapping[str, Any]) -> float:
    """Operations of a call: in each chunk q k^T and x k^T, the inverse, its product with V, and three by the state."""
    key, value = row["key_width"], row["value_width"]
    shared = row["key_heads"] / row["value_heads"]
    a_step = 2 * _CHUNK * key * shared + _CHUNK**2 / 2 + 2 * _CHUNK * value + 3 * key * value
    return 2.0 * row["batch"] * row["time"] * row["value_heads"] * a_step


def least_bytes(row: Mapping[str, Any]) -> float:
    """What a call must read and write: q, k, v, gates and the output once."""
    channels = 2 * row["key_heads"] * row["key_width"] + 2 * row["value_heads"] * row["value_width"]
    return row["batch"] * row["time"] * (2.0 * channels + 6 * row["value_heads"])


def moved_bytes(row: Mapping[str, Any]) -> float:
    """What lapkernels' two kernels move: q and k twice, and the two triangles (40 blocks of 16 x 16) between them."""
    again = row["batch"] * row["time"] * 4.0 * row["key_heads"] * row["key_width"]
    chunks = row["batch"] * -(-row["time"] // _CHUNK) * row["value_heads"]
    return least_bytes(row) + again + chunks * 2 * (2 * 10 * 16 * 16 * 2 + 4 * _CHUNK * 4)


def fastest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each shape and maker (`triton` with whatever tiles, `fla`) the row that took least, forward alone."""
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        key = (*(row[name] for name in _SHAPE), row["impl"].split()[0])
        if row.get("ms") and "passes" not in row and (key not in best or row["ms"] < best[key]["ms"]):
            best[key] = row
    return list(best.values())


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| rows x tokens | heads | K x V | by | ms | memory's floor | products' floor | of the larger floor | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in fastest(rows):
        memory, products = least_bytes(row) / _COPY * 1e3, operations(row) / _PRODUCTS * 1e3
        tiles = row["impl"].split()[1:3]
        by = f"lapkernels, {tiles[0]} columns" if tiles else {"triton": "lapkernels"}.get(row["impl"], row["impl"])
        lines.append(
            f"| {row['batch']} x {row['time']} | {row['key_heads']} / {row['value_heads']} | {row['key_width']} x "
            f"{row['value_width']} | {by} | {row['ms']:.3f} | {memory:.3f} | {products:.3f} | "
            f"{row['ms'] / max(memory, products):.1f} | {row['error']:.4f} |"
        )
    sources = {f"{row['machine']}, {row['date']}: `{row['command']}`" for row in fastest(rows)}
    return "\n".join([*lines, "", *(f"- {source}" for source in sorted(sources)), ""])


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the roofline: operations a second over operations a byte that must move."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lapcli"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.6))
    low, high, ridge = 40.0, 700.0, _PRODUCTS / _COPY
    limits = [low * _COPY / 1e12, _PRODUCTS / 1e12, _PRODUCTS / 1e12]
    axes.plot([low, ridge, high], limits, color="black", linewidth=1.2)
    axes.annotate("copies, 4.25 TB/s", (48, 52 * _COPY / 1e12), rotation=37, va="bottom", fontsize=8)
    axes.annotate("bf16 products, 780 TFLOP/s", (250, 1.03 * _PRODUCTS / 1e12), va="bottom", fontsize=8)
    for row, letter in zip(fastest(rows), string.ascii_lowercase, strict=False):
        ours = row["impl"].startswith("triton")
        at, rate = operations(row) / least_bytes(row), operations(row) / row["ms"] / 1e9
        name = f"{letter}  {row['key_width']} x {row['value_width']}, {row['batch']} x {row['time']}"
        filled = "full" if ours else "none"
        axes.plot(at, rate, "o", color="black", fillstyle=filled, ls="", label=name if ours else f"{name}, fla")
        axes.annotate(letter, (at, rate), textcoords="offset points", xytext=(6, -3), fontsize=9)
        if ours:
            moved = operations(row) / moved_bytes(row)
            axes.plot([moved, at], [rate, rate], color="grey", linewidth=0.8, zorder=0)
            axes.plot(moved, rate, marker="|", color="grey", zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(50, 1200))
    axes.set(xlabel="operations a byte that must move (grey: a byte that lapkernels move)", ylabel="TFLOP/s")
    axes.set_title("The chunked delta rule, forward", fontsize=10)
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(title="K x V, rows x tokens", fontsize=8, title_fontsize=8, frameon=False, handlelength=1.0, **place)
    figure.tight_layout()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip("."), metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", nargs="?", type=Path, default=_DOCS / "chunks.jsonl")
    parser.add_argument("page", nargs="?", type=Path, default=_DOCS / "chunks.md")
    answer(parser, None, _do)


def _do(given: argparse.Namespace) -> None:
    rows = _LINES.read([given.lines])
    put(table(rows), given.page, BEGIN, END)
    (given.page.parent / "img").mkdir(exist_ok=True)
    draw(rows, given.page.parent / "img" / "chunks-roofline.svg")


if __name__ == "__main__":
    main()
