"""Measure every selector at several ratios on the shipped model, before any recovery: the table of docs/results.md.

python scripts/results_table.py measure --work DIR --books FILE [--share 1/2]
python scripts/results_table.py write --work DIR

`measure` leaves one JSON file a cell and passes over those that are there, so that it can be stopped and split over
processes. `--books` is a JSONL of held-out books (`gutenberg_valid.jsonl.xz` in the tables shown).
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from lapcli.artifacts import RunDirectory
from lapcli.evaluation.results import Evaluation
from lapcli.evaluation.run import evaluate
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.families.loading import ModelSource, resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings, default_calibration
from lapcli.selectors.registry import CHANNEL_SELECTORS
from lapcli.stages.calibration import calibrate
from lapcli.stages.pruning import prune

RATIOS = ("0.25", "0.5", "0.75")
MODEL = "demo:gdn"
PROMPTS = 100
WINDOWS = 100
COLUMNS = {
    "builtin": ("builtin", "token_perplexity", None),
    "books": ("text", "token_perplexity", None),
    "niah 512": ("niah", "exact_match", 512),
    "niah 1024": ("niah", "exact_match", 1024),
    "niah 2048": ("niah", "exact_match", 2048),
    "noise 1024": ("niah_noise", "exact_match", 1024),
}


def cells() -> list[tuple[str, str | None, str | None]]:
    """Name, method and ratio of each cell, the base first."""
    pruned = [(f"{method}-{ratio}", method, ratio) for ratio in RATIOS for method in CHANNEL_SELECTORS]
    return [("base", None, None), *pruned]


def measure(work: Path, books: Path, share: tuple[int, int]) -> None:
    """Fill in the cells of one share of the work."""
    machine = Machine(device="cpu")
    source = resolve_model(MODEL)
    settings = CalibrationSettings(**default_calibration(True))
    for number, (name, method, ratio) in enumerate(cells()):
        target = work / f"{name}.json"
        if number % share[1] != share[0] or target.is_file():
            continue
        model = source if method is None else _pruned(source, settings, method, str(ratio), work / name, machine)
        document = {"method": method, "ratio": ratio, "values": _values(model, books), **_where()}
        target.write_text(json.dumps(document, indent=1) + "\n")
        print(name, document["values"], flush=True)


def _pruned(
    source: ModelSource, settings: CalibrationSettings, method: str, ratio: str, place: Path, machine: Machine
) -> ModelSource:
    """One calibration serves all cells of a process; each cell selects and slices for itself."""
    shared = place.parent / f"calibration-{os.getpid()}.safetensors"
    calibrate(source, settings, shared, machine=machine, saliency=True)
    run = RunDirectory(place)
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shared, run.calibration)
    selection = SelectionSettings(method=method, ratio=ratio)
    prune(source, settings, selection, run, machine=machine, overwrite=True)
    return resolve_model(str(run.sliced))


def _values(model: ModelSource, books: Path) -> dict[str, list[float | None]]:
    drawn = EvaluationSettings(limit=WINDOWS, niah_samples=PROMPTS)
    found: dict[tuple[str, str, int | None], list[float | None]] = {}
    for tasks, settings in (
        (["builtin"], EvaluationSettings()),
        ([f"text:{books}", "niah"], drawn),
        (["niah_noise"], dataclasses.replace(drawn, niah_lengths=(1024,))),
    ):
        found |= _scores(evaluate([("model", model)], tasks, settings))
    return {column: found[key] for column, key in COLUMNS.items()}


def _scores(evaluation: Evaluation) -> dict[tuple[str, str, int | None], list[float | None]]:
    return {
        (score.task.split(":")[0], score.metric, score.length): [score.estimate.value, score.estimate.stderr]
        for score in evaluation.models[0].scores
    }


def _where() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
    }


def write(work: Path) -> str:
    """The table as Markdown."""
    found = {name: json.loads((work / f"{name}.json").read_text()) for name, _method, _ratio in cells()}
    lines = ["| removed | selector | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for name, method, ratio in cells():
        values = found[name]["values"]
        shown = [_cell(column, *values[column]) for column in COLUMNS]
        lines.append(f"| {ratio or 'nothing'} | {method or '(base)'} | " + " | ".join(shown) + " |")
    base = found["base"]
    return "\n".join([*lines, "", f"Measured {base['date']} on {base['machine']}."]) + "\n"


def _cell(column: str, value: float, stderr: float | None) -> str:
    digits = 2 if column.startswith(("niah", "noise")) else (1 if value < 1000 else 0)
    error = "" if stderr is None else f" ± {stderr:.{digits}f}"
    return f"{value:.{digits}f}{error}"


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "write"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--books", type=Path)
    parser.add_argument("--share", default="1/1", help="which part of how many, from 1")
    arguments = parser.parse_args()
    if arguments.command == "write":
        sys.stdout.write(write(arguments.work))
        return
    if arguments.books is None:
        parser.error("measure needs --books")
    part, parts = (int(number) for number in arguments.share.split("/"))
    arguments.work.mkdir(parents=True, exist_ok=True)
    measure(arguments.work, arguments.books, (part - 1, parts))


if __name__ == "__main__":
    main()
