"""How long whole commands take, as processes of their own, from outside."""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lapcli.errors import LapcliError
from lapcli.reporting import Reporter, SilentReporter


@dataclass(frozen=True)
class CommandRow:
    """One command.

    Attributes:
        command: as typed.
        runs: how often it ran.
        seconds: the median.
        slowest: the longest.
    """

    command: str
    runs: int
    seconds: float
    slowest: float


def _time(arguments: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "lapcli", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LapcliError(f"`lapcli {' '.join(arguments)}` failed: {done.stderr.strip()[-500:]}")
    return time.perf_counter() - started


def command_benchmark(
    model: str, *, quick_runs: int = 7, prune_runs: int = 1, reporter: Reporter | None = None
) -> list[CommandRow]:
    """Time `--help`, `inspect` and the main job.

    Args:
        model: what is inspected and pruned.
        quick_runs: runs of the two quick commands, after one that is not counted.
        prune_runs: runs of `prune`, each in an empty run directory.
        reporter: told of the progress.

    Raises:
        LapcliError: a command fails.
    """
    reporter = reporter or SilentReporter()
    rows: list[CommandRow] = []
    with reporter.task("commands", total=3, unit="commands") as task:
        for arguments in (["--help"], ["inspect", model]):
            _time(arguments)
            seconds = [_time(arguments) for _ in range(quick_runs)]
            rows.append(_row(arguments, seconds))
            task.advance(1)
        job = ["prune", model, "--method", "drrqr", "--ratio", "0.5"]
        seconds = []
        for _ in range(prune_runs):
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(_time([*job, "--run", str(Path(folder) / "run")]))
        rows.append(_row(job, seconds))
        task.advance(1)
    return rows


def _row(arguments: list[str], seconds: list[float]) -> CommandRow:
    return CommandRow("lapcli " + " ".join(arguments), len(seconds), statistics.median(seconds), max(seconds))
