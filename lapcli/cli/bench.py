"""`lapcli bench`: what things take here, as ratios within one run, with the floor beside them."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

_WHAT = ("selection", "calibration", "slicing", "recovery", "commands")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "bench", help="Time selection, calibration, slicing, recovery or whole commands here; see docs/benchmarks.md."
    )(run)


def run(
    what: Annotated[str, typer.Argument(help=" | ".join(_WHAT))],
    model: Annotated[str, typer.Option(help="The model of calibration, recovery and commands.")] = "demo:gdn",
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes: shows that it runs, measures nothing.")] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.Kernel = "auto",
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Print a table, or JSON."""
    from lapcli.cli import display

    if what not in _WHAT:
        raise UsageError(f"there is no benchmark {what!r}; there is: {', '.join(_WHAT)}")
    reporter = display.DisplayReporter(quiet or as_json)
    if what == "selection":
        rows = _selection(quick, reporter)
    elif what == "calibration":
        rows = _calibration(model, quick, (device, dtype, kernel), reporter)
    elif what == "slicing":
        rows = _slicing(quick, reporter)
    elif what == "recovery":
        rows = _recovery(model, quick, (device, dtype, kernel), reporter)
    else:
        rows = _commands(model, quick, reporter)
    if as_json:
        display.emit(rows)
        return
    for row in rows:
        display.facts(None, {name.replace("_", " "): _shown(name, value) for name, value in row.items()} | {"": ""})


def _shown(name: str, value: Any) -> str:
    from lapcli.cli.display import size

    if value is None:
        return "-"
    if "bytes" in name:
        return size(value)
    if isinstance(value, float):
        return f"{value:.3g} s" if name.endswith(("seconds", "slowest")) else f"{value:.3g}"
    return str(value)


def _selection(quick: bool, reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.selection import SelectionCase, activations, selection_benchmark

    cases = [SelectionCase("toy", 1, 2, 16, 8, lambda head: activations(200, 16, head))] if quick else None
    return [
        {
            **asdict(row),
            "ratio": row.ratio,
            "ratio_with_bounds": row.ratio_with_bounds,
            "ratio_fp32": row.ratio_fp32,
            "note": row.note,
        }
        for row in selection_benchmark(cases, reporter=reporter)
    ]


def _calibration(model: str, quick: bool, machine: tuple[str, str, str], reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.calibration import calibration_benchmark
    from lapcli.families.source import resolve_model
    from lapcli.machine import Machine

    sizes: dict[str, int] = {"batch": 1, "seq_len": 64, "pairs": 2} if quick else {}
    return [asdict(calibration_benchmark(resolve_model(model), machine=Machine(*machine), reporter=reporter, **sizes))]


def _slicing(quick: bool, reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.slicing import slicing_benchmark

    sizes: dict[str, Any] = {"gib": 0.01, "small": True, "runs": 1} if quick else {}
    row = slicing_benchmark(reporter=reporter, **sizes)
    return [{**asdict(row), "ratio": row.ratio}]


def _recovery(model: str, quick: bool, machine: tuple[str, str, str], reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.recovery import SMALL, RecoverySizes, recovery_benchmark
    from lapcli.families.source import resolve_model
    from lapcli.machine import Machine

    toy: dict[str, Any] = {"sizes": RecoverySizes(64, 2, 1, 2), "random_model": SMALL} if quick else {}
    rows = recovery_benchmark(resolve_model(model), machine=Machine(*machine), reporter=reporter, **toy)
    return [asdict(row) for row in rows]


def _commands(model: str, quick: bool, reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.commands import command_benchmark

    runs = {"quick_runs": 1} if quick else {}
    return [asdict(row) for row in command_benchmark(model, reporter=reporter, **runs)]
