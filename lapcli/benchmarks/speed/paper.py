"""The paper's Tables 17 to 19, measured here (arXiv 2602.04852, appendix G.1)."""

from collections.abc import Sequence

import torch

from lapcli.benchmarks.speed.chunk_operator import chunk_operator_benchmark
from lapcli.benchmarks.speed.configs import Subject, read_config, subject
from lapcli.benchmarks.speed.decode import DecodeSettings, Models, decode_benchmark
from lapcli.benchmarks.speed.layers import shapes_of
from lapcli.benchmarks.speed.prefill import prefill_benchmark
from lapcli.benchmarks.speed.results import Results, Row
from lapcli.benchmarks.speed.tables import Table, ratio

RATIOS = ("0", "0.5", "0.75")
MODELS = ("gdn", "delta-net")
BATCHES = (64, 1, 16, 4)
PROMPTS = ((8, 2048), (1, 2048), (4, 2048), (8, 8192), (1, 8192), (1, 16384), (4, 16384))
MIXERS = ((8, 2048), (16, 2048), (32, 2048))

PRINTED = {
    ("gdn", 1): (2.72, 1.03, 1.05),
    ("gdn", 16): (4.96, 1.25, 1.45),
    ("gdn", 64): (11.61, 1.47, 1.94),
    ("delta-net", 1): (2.22, 1.03, 1.04),
    ("delta-net", 64): (8.68, 1.41, 1.78),
}
"""Table 17 on an H100: ms a token of the base, and how many times as fast at 50 % and 75 %. Rows that are not here were
not at hand."""
PRINTED_PROMPTS = "1.00 at batch 1-2 of 2K; 1.14-1.16 from batch 4 on"
PRINTED_MIXER = "1.26-1.28 as fast; 0.72-0.73 of the peak memory"


def paper_benchmark(
    results: Results, models: Models, *, quick: bool = False, settings: DecodeSettings | None = None
) -> None:
    """Measure what the tables hold, by fla with a graph as the paper did, and by lapcli.

    Args:
        results: where rows go.
        models: makes the models.
        quick: toy sizes.
        settings: how much is measured.
    """
    names = ("toy",) if quick else MODELS
    batches: Sequence[int] = (2, 1) if quick else BATCHES
    subjects = {name: _subjects(name) for name in names}
    for name in names:
        decode_benchmark(
            subjects[name], batches, results, models, contexts=(16,) if quick else (512,),
            ways=("fla graph", "lapcli"), latency=False, generate=False, settings=settings,
        )  # fmt: skip
    first = subjects[names[0]]
    prompts = ((2, 64), (1, 64)) if quick else PROMPTS
    prefill_benchmark(first[:2], prompts, results, models, ways=("fla", "lapcli"), settings=settings)
    models.only(first[0])
    shapes = shapes_of("toy", (32, 16)) if quick else shapes_of("gdn", (256, 128))
    mixers = ((2, 64),) if quick else MIXERS
    dtype = models.dtype if models.device.type == "cuda" else torch.float32
    chunk_operator_benchmark(shapes, mixers, results, models.device, dtype, ways=("fla", "lapcli"), settings=settings)


def _subjects(name: str) -> list[Subject]:
    called, config = read_config(name)
    return [subject(called, config, each) for each in RATIOS]


def paper_tables(rows: Sequence[Row]) -> list[Table]:
    """The three tables, each way beside what the paper printed for an H100."""
    return [
        table
        for table in (
            _speedups("Table 17: decode, a token", "decode", rows, ("fla graph", "lapcli"), printed=True),
            _speedups(f"Table 18: prefill (paper: {PRINTED_PROMPTS})", "prefill", rows, ("fla", "lapcli")),
            _mixers(rows),
        )
        if table.rows
    ]


def _speedups(title: str, what: str, rows: Sequence[Row], ways: Sequence[str], *, printed: bool = False) -> Table:
    ours = [row for row in rows if row.cell.what == what]
    ratios = sorted({row.cell.ratio for row in ours} - {0.0})
    columns = ["model", "batch", "tokens"]
    for way in ways:
        columns += [f"{way}: base, ms", *(f"{way}: x at {share:.0%}" for share in ratios)]
    columns += ["paper: base, ms", "paper: x at 50%", "paper: x at 75%"] if printed else []
    body: list[list[str]] = []
    for model, batch, tokens in dict.fromkeys((row.cell.model, row.cell.batch, row.cell.tokens) for row in ours):
        line = [model, str(batch), str(tokens)]
        for way in ways:
            some = {
                row.cell.ratio: row
                for row in ours
                if (row.cell.model, row.cell.batch, row.cell.tokens, row.cell.way) == (model, batch, tokens, way)
            }
            base = some.get(0.0)
            line.append("-" if base is None else base.status if base.seconds is None else f"{base.seconds * 1e3:.3g}")
            line += [_times(ratio(base, some.get(share))) for share in ratios]
        if printed:
            line += [f"{value:.2f}" for value in PRINTED.get((model, batch), ())] or ["-"] * 3
        body.append(line)
    return Table(title, columns, body)


def _mixers(rows: Sequence[Row]) -> Table:
    ours = [row for row in rows if row.cell.what == "prefill operator"]
    body: list[list[str]] = []
    for batch, tokens, way in dict.fromkeys((row.cell.batch, row.cell.tokens, row.cell.way) for row in ours):
        some = [row for row in ours if (row.cell.batch, row.cell.tokens, row.cell.way) == (batch, tokens, way)]
        base = next((row for row in some if row.cell.ratio == 0), None)
        for row in some:
            if row.cell.ratio == 0 or row.status == "not here":
                continue
            peaks = (None if base is None else base.peak_bytes, row.peak_bytes)
            body.append(
                [
                    way, str(batch), str(tokens), f"{row.cell.ratio:.0%}",
                    "-" if row.seconds is None else f"{row.seconds * 1e3:.3g}",
                    _times(ratio(base, row)),
                    _times(peaks[1] / peaks[0] if peaks[0] and peaks[1] else None),
                ]
            )  # fmt: skip
    return Table(
        f"Table 19: the sequence mixer alone (paper: {PRINTED_MIXER})",
        ["way", "batch", "tokens", "removed", "ms", "x", "peak memory, of base"],
        body,
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
