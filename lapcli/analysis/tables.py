"""The numbers of an analysis as CSV files, one a table."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.analysis.results import Analysis, rank_limit
from lapcli.artifacts import atomic_file

SETS = ("all", "kept", "compared")
SHARES = ("kept", "dropped")
SIGMAS = ("sigma_min", "sigma_max", "kappa")
STATE = ("state", "utilisation", "effective_rank", "kappa_median")
STABILITY = (
    "mean", "p01", "p50", "p99", "outside", "rho", "error_before", "error_after", "drift", "value_drift",
    "prediction_drift", "cosine", "bound_count", "bound_share",
)  # fmt: skip
"""The figures of a layer in `lapcli.analysis.stability.summary` that a table has."""


class Table(NamedTuple):
    """A table."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


def tables(analysis: Analysis) -> list[Table]:
    """All tables; without rows where an analysis has no numbers for one."""
    return [
        Table(
            "utilisation", ("model", "layer", "head", "tokens", "effective_rank", "utilisation"), [*_ranks(analysis)]
        ),
        Table(
            "heads", ("model", "layer", "head", "utilisation", "effective_rank", "kappa_median"), [*_heads(analysis)]
        ),
        Table("states", ("model", "layer", *STATE), [*_states(analysis)]),
        Table("spectra", ("model", "layer", "head", "number", "normalised_singular_value"), [*_spectra(analysis)]),
        Table("bounds", ("model", "layer", "bound", "states", "share", "smallest_ratio"), [*_bounds(analysis)]),
        Table("errors", ("model", "layer", "own_inputs", "base_inputs"), [*_errors(analysis)]),
        Table("stability", ("model", "layer", *STABILITY), [*_stability(analysis)]),
        Table("conditioning", ("layer", "head", "channels", *SIGMAS), [*_conditioning(analysis)]),
        Table("overlap", ("layer", "head", "shared", "jaccard"), [*_overlap(analysis)]),
        Table("filters", ("layer", "head", "side", "channels", "lag", "mean_absolute_tap"), [*_filters(analysis)]),
    ]


def write_tables(analysis: Analysis, folder: Path) -> list[Path]:
    """Write `NAME.csv` for each table; one from earlier that there are no numbers for now goes."""
    written: list[Path] = []
    for table in tables(analysis):
        path = folder / f"{table.name}.csv"
        if not table.rows:
            path.unlink(missing_ok=True)
            continue
        with atomic_file(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.columns)
            writer.writerows(table.rows)
        written.append(path)
    return written


def _ranks(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label in analysis.labels:
        for layer in analysis.layers(label):
            limit = rank_limit(layer)
            ranks = analysis.effective_rank(label, layer["index"])
            for head in range(ranks.shape[1]):
                for tokens, rank in zip(analysis.positions, ranks[:, head].tolist(), strict=True):
                    yield label, layer["index"], head, tokens, rank, rank / limit


def _heads(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label in analysis.labels:
        for layer in analysis.layers(label):
            limit = rank_limit(layer)
            ranks = analysis.effective_rank(label, layer["index"]).mean(0).tolist()
            kappas = analysis.kappa(label, layer["index"]).flatten(0, 1).median(0).values.tolist()
            for head, (rank, kappa) in enumerate(zip(ranks, kappas, strict=True)):
                yield label, layer["index"], head, rank / limit, rank, kappa


def _states(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label in analysis.labels:
        for layer in analysis.layers(label):
            for row in analysis.by_state(label, layer["index"]):
                yield label, layer["index"], *(row[name] for name in STATE)


def _spectra(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label in analysis.labels:
        for layer in analysis.layers(label):
            for head, values in enumerate(analysis.spectrum(label, layer["index"]).tolist()):
                for number, value in enumerate(values, 1):
                    yield label, layer["index"], head, number, value


def _bounds(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label in analysis.labels:
        for layer in analysis.layers(label):
            for name, bound in analysis.bounds(label, layer["index"]).items():
                yield label, layer["index"], name, bound.states, bound.share, bound.margin


def _errors(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label, rows in analysis.record["output_error"].items():
        for layer, row in zip(analysis.layers(label), rows, strict=True):
            yield label, layer["index"], row["own"], row["base"]


def _stability(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for label in analysis.labels:
        for row in (analysis.stability(label) or {"layers": []})["layers"]:
            yield label, row["layer"], *(row[name] for name in STABILITY)


def _conditioning(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for layer in analysis.base_layers:
        found = analysis.conditioning(layer["index"])
        for name, heads in zip(SETS, [] if found is None else found.tolist(), strict=False):
            for head, row in enumerate(heads):
                yield layer["index"], head, name, *row


def _overlap(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for layer in analysis.base_layers:
        found = analysis.overlap(layer["index"])
        for head, (shared, jaccard) in enumerate([] if found is None else found.tolist()):
            yield layer["index"], head, int(shared), jaccard


def _filters(analysis: Analysis) -> Iterable[Sequence[Any]]:
    for layer in analysis.base_layers:
        for side, found in analysis.filters(layer["index"]).items():
            for share, heads in zip(SHARES, found.tolist(), strict=True):
                for head, taps in enumerate(heads):
                    for lag, value in enumerate(reversed(taps)):
                        yield layer["index"], head, side, share, lag, value
