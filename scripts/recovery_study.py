"""Recover the shipped model, cut by several selectors at several ratios, with several seeds: the tables of
docs/results.md, from the commands a user would type.

python scripts/recovery_study.py clean FILE OUTPUT
python scripts/recovery_study.py run --work DIR --data SOURCE --books FILE --output FILE [--gpus 2 --workers 14]
python scripts/recovery_study.py write FILE

`clean` copies a JSONL of text without the paragraphs that occur in the held-out part of `builtin`, on which models are
measured afterwards. `run` starts `lapcli prune`, `lapcli recover` and `lapcli eval` in processes of their own,
`--workers` at a time, and writes the file anew after every cell; cells that are in it already are not run again.
`write` prints the tables.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from results_table import COLUMNS
from studies.arguments import count
from studies.boundary import answer
from studies.documents import read_object

from lapcli.errors import ArtifactError

METHODS = ("drrqr", "grad", "l1", "rand")
RATIOS = ("0.5", "0.75")
_CELL = ("recovery", "rows", "command", "machine")
"""What an entry of the file holds."""


class Cell(NamedTuple):
    """One training: a selector at a ratio (none for the control) with a seed."""

    method: str
    ratio: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its entry."""
        return f"{self.method}-{self.ratio}-{self.seed}" if self.ratio else f"control-{self.seed}"


def cells(seeds: int) -> list[Cell]:
    """All of them, those of one seed together, the control first."""
    pruned = [(method, ratio) for ratio in RATIOS for method in METHODS]
    which = [("control", ""), *pruned]
    return [Cell(method, ratio, seed) for seed in range(seeds) for method, ratio in which]


class Study:
    """The study under way.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.work: Path = options.work
        self.output: Path = options.output
        self.done: dict[str, Any] = read_object(self.output) if self.output.exists() else {}
        self.lock = threading.Lock()
        self.begun = time.monotonic()

    def lapcli(self, gpu: int, *arguments: str) -> float:
        """Run a command on one GPU; the seconds it took.

        Raises:
            RuntimeError: it failed.
        """
        place = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.options.gpus else {}
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "lapcli", *arguments],
            capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", **place},
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"lapcli {' '.join(arguments)}: {done.stderr[-800:]}")
        return time.monotonic() - begun

    def run(self) -> None:
        """Everything that is not there yet."""
        self.work.mkdir(parents=True, exist_ok=True)
        calibration = self.work / "calibration.safetensors"
        if not calibration.is_file():
            self.lapcli(0, "calibrate", "demo:gdn", "--grad", "--kernel", "chunked", "--output", str(calibration),
                        "--run", str(self.work / "first"))  # fmt: skip
        wanted = [cell for cell in cells(self.options.seeds) if cell.name not in self.done]
        with ThreadPoolExecutor(self.options.workers) as pool:
            list(pool.map(lambda number: self._cell(number, wanted[number], calibration), range(len(wanted))))

    def _cell(self, number: int, cell: Cell, calibration: Path) -> None:
        options = self.options
        gpu = number % max(1, options.gpus)
        run = self.work / cell.name
        place = ("--run", str(run))
        # Only the unpruned model and slices that were not measured yet are measured beside the trained one.
        made = "recovered" if cell.ratio else "control"
        again = cell.seed > 0 and cell.method != "rand"
        alone = ("--model", str(run / made)) if again else ()
        try:
            self._prune(cell, run, gpu, calibration)
            training = [
                "recover", "--data", options.data, "--steps", str(options.steps), "--batch-size", str(options.batch),
                "--seq-len", str(options.seq_len), "--lr", str(options.lr), "--micro-batch", str(options.micro_batch),
                "--seed", str(cell.seed), "--validate-every", "50", "--save-every", "1000", *place,
                "--kernel", options.kernel,
            ]  # fmt: skip
            seconds = self.lapcli(gpu, *training, *([] if cell.ratio else ["--control"]))
            # As the CPU's tables are measured: in fp32.
            measured = self.lapcli(
                gpu, "eval", "builtin", f"text:{options.books}", "niah", "niah_noise", "--limit", str(options.limit),
                "--dtype", "float32", "--kernel", "chunked", *alone, *place,
            )  # fmt: skip
            folder = run / ("recovery" if cell.ratio else "recovery-control")
            found = {
                "recovery": json.loads((folder / "recovery.json").read_text()),
                "rows": json.loads((run / "evaluation.json").read_text())["rows"],
                "command": " ".join(training),
                "seconds": {"recover": round(seconds, 1), "eval": round(measured, 1)},
                "machine": self._machine(),
            }
        except RuntimeError as error:
            self._say(f"{cell.name}: {error}")
            return
        with self.lock:
            self.done[cell.name] = found
            temporary = self.output.with_name(f".{self.output.name}.partial")
            temporary.write_text(json.dumps(self.done))
            os.replace(temporary, self.output)
        self._say(f"{cell.name}: recover {seconds:.0f} s, eval {measured:.0f} s")

    def _prune(self, cell: Cell, run: Path, gpu: int, calibration: Path) -> None:
        if (run / "run.json").is_file():
            return
        run.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(calibration, run / calibration.name)
        # The control's slice is never looked at; it makes the run that knows its base.
        method, ratio = (cell.method, cell.ratio) if cell.ratio else ("rand", "0.5")
        # Channels drawn at random are drawn anew with every seed of the training.
        seed = cell.seed if method == "rand" else 0
        self.lapcli(gpu, "select", "--method", method, "--ratio", ratio, "--seed", str(seed), "--run", str(run))
        self.lapcli(gpu, "slice", "--run", str(run))

    def _machine(self) -> str:
        import torch

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
        return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self.begun:6.0f} s  {text}\n")
        sys.stderr.flush()


def clean(source: Path, output: Path) -> str:
    """Write a JSONL without what is held out of `builtin`; one line about it."""
    from lapcli.data.builtin import heldout_builtin_text
    from lapcli.data.files import read_path
    from lapcli.data.overlap import HeldOutIndex

    index = HeldOutIndex(document.text for document in heldout_builtin_text())
    cleaned = [index.clean(document.text) for document in read_path(source)]
    kept = [each.text for each in cleaned if each.text.strip()]
    output.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept), encoding="utf-8")
    return f"{output}: {len(kept)} texts, {sum(each.dropped for each in cleaned)} paragraphs taken out\n"


def write(path: Path) -> str:
    """The tables as Markdown: before and after every recovery, means and standard deviations over seeds.

    Raises:
        ArtifactError: the file is missing or damaged, or holds something else, or no cell that measured the base.
    """
    making = f"make it with: recovery_study.py run --work DIR --data SOURCE --books FILE --output {path}"
    found: dict[str, Any] = read_object(path, (), making)
    for name, cell in found.items():
        missing = [each for each in _CELL if not isinstance(cell, dict) or each not in cell]
        if missing:
            raise ArtifactError(f"{path}: {name} is no cell of the study: it lacks {', '.join(missing)}", making)
    lines = ["| removed | selector | | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 3) + "|"]
    every = [found[name] for name in sorted(found)]
    base = next((each for each in every if _has(each, "base")), None)
    if base is None:
        raise ArtifactError(f"{path}: none of {len(every)} cells measured the base", making)
    lines.append(_row("nothing", "(base)", "as it is", [_values(base, "base")]))
    controls = [_values(found[name], "control") for name in sorted(found) if name.startswith("control-")]
    if controls:
        lines.append(_row("nothing", "(control)", "trained alike", controls))
    for ratio in RATIOS:
        for method in METHODS:
            cell = [found[name] for name in sorted(found) if name.startswith(f"{method}-{ratio}-")]
            # Slices of one selection are one model, measured once.
            for label, said in (("sliced", "before"), ("recovered", "after")):
                if rows := [_values(each, label) for each in cell if label != "sliced" or _has(each, label)]:
                    lines.append(_row(ratio, method, said, rows))
    example = every[0]
    budget = {each["recovery"]["record"]["tokens"] for each in every}
    lines += [
        "",
        f"{min(budget):,} to {max(budget):,} tokens that counted; {example['machine']}. `lapcli {example['command']}`",
    ]
    return "\n".join(lines) + "\n"


def _has(cell: dict[str, Any], label: str) -> bool:
    return label in cell["rows"][0]["values"]


def _values(cell: dict[str, Any], label: str) -> list[tuple[float, float | None]]:
    """Value and standard error of each column; of the trained model where it was measured alone."""
    if not _has(cell, label) and label in ("recovered", "control"):
        label = "model"
    by_key = {
        (row["task"].split(":")[0], row["metric"], row["length"]): row["values"].get(label) for row in cell["rows"]
    }
    return [(by_key[key]["value"], by_key[key]["stderr"]) for key in COLUMNS.values()]


def _row(ratio: str, method: str, said: str, rows: list[list[tuple[float, float | None]]]) -> str:
    shown: list[str] = []
    for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        digits = 2 if column.startswith(("niah", "noise")) else 1
        numbers = [value for value, _error in values]
        # Over seeds the spread of the runs; of one model the standard error of the measurement.
        spread = stdev(numbers) if len(numbers) > 1 else values[0][1]
        shown.append(f"{mean(numbers):.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}"))
    return f"| {ratio} | {method} | {said} | " + " | ".join(shown) + " |"


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is not there yet")
    run.add_argument("--work", type=Path, required=True)
    run.add_argument("--data", required=True, help="as of `lapcli recover`")
    run.add_argument("--books", type=Path, required=True, help="held-out books, JSONL")
    run.add_argument("--output", type=Path, required=True, help="JSON; cells that it holds are not run again")
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--steps", type=int, default=310)
    run.add_argument("--batch", type=int, default=64)
    run.add_argument("--micro-batch", type=int, default=32)
    run.add_argument("--seq-len", type=int, default=1024)
    run.add_argument("--limit", type=int, default=100, help="windows and prompts of each task")
    run.add_argument("--lr", type=float, default=2e-3)
    run.add_argument("--kernel", default="chunked", help="that trains; `chunked` calibrates and measures")
    run.add_argument("--gpus", type=int, default=0, help="0: on the CPU")
    run.add_argument("--workers", type=count, default=1)
    shown = commands.add_parser("write", help="print the tables")
    shown.add_argument("file", type=Path)
    cleaned = commands.add_parser("clean", help="take out what is held out of `builtin`")
    cleaned.add_argument("source", type=Path)
    cleaned.add_argument("output", type=Path)
    answer(parser, commands, _do)


def _do(options: argparse.Namespace) -> None:
    """One command."""
    if options.command == "write":
        sys.stdout.write(write(options.file))
    elif options.command == "clean":
        sys.stdout.write(clean(options.source, options.output))
    else:
        Study(options).run()


if __name__ == "__main__":
    main()
