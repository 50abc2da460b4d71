"""`lapcli analyze`: what the state of each head holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options

if TYPE_CHECKING:
    from lapcli.analysis.settings import AnalysisSettings
    from lapcli.artifacts import RunDirectory
    from lapcli.families.source import ModelSource
    from lapcli.stages.analysis import AnalysisInputs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "analyze",
        help="Look into the states: rank utilisation, spectra, conditioning, overlap, errors layer by layer; pictures.",
    )(run)


def run(
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the run's base, sliced and recovered ones.")
    ] = None,
    baseline: options.Baseline = None,
    data: options.Data = None,
    samples: Annotated[int, typer.Option(help="Token sequences.", rich_help_panel="What the numbers depend on")] = 128,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens a sequence. Default: 2048, or what the model takes.",
            rich_help_panel="What the numbers depend on",
        ),
    ] = None,
    stride: Annotated[
        int,
        typer.Option(
            help="Tokens between two positions at which states are looked at.",
            rich_help_panel="What the numbers depend on",
        ),
    ] = 32,
    skip: Annotated[
        int,
        typer.Option(help="Tokens passed over at the start.", rich_help_panel="What the numbers depend on"),
    ] = 128,
    compare: Annotated[
        Path | None, typer.Option(help="A second selection, or its run, whose channels are compared with the run's.")
    ] = None,
    seed: options.Seed = 0,
    run_path: options.Run = options.DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.Kernel = "auto",
    require_fast: options.RequireFast = False,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write `RUN/analysis/`: numbers as one artifact, tables as CSV, pictures as PNG and SVG."""
    from lapcli.artifacts import ANALYSIS_FILE
    from lapcli.cli import context, display
    from lapcli.data import check_source, parse_mixture
    from lapcli.machine import Machine
    from lapcli.reporting import SilentReporter
    from lapcli.stages.analysis import analyse, plan_analysis

    directory = context.run_directory(run_path)
    inputs = _inputs(model, baseline, compare, directory)
    settings = _settings(inputs.base, data, samples, seq_len, stride, skip, seed)
    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    folder = directory.analysis
    for part in parse_mixture(settings.data):
        check_source(part.name)
    if dry_run:
        plan = plan_analysis(inputs, settings, machine=machine, reporter=SilentReporter())
        states = len(settings.positions) * settings.samples
        matrices = sum(states * layer.value_heads for layers in plan.layers.values() for layer in layers)
        facts = {
            "models": {label: source.name for label, source in inputs.models},
            "artifacts": {name: str(artifact.path) for name, artifact in inputs.artifacts.items()} or None,
            "text": settings.data,
            "tokens": settings.samples * settings.positions[-1],
            "states": matrices,
            "writes": str(folder),
        }
        display.would_do(facts, as_json)
        return
    reporter = display.DisplayReporter(quiet)
    with directory.lock():
        analysis, worked, written = analyse(
            inputs, settings, folder, machine=machine, overwrite=overwrite, reporter=reporter
        )
    summary = analysis.summary()
    if as_json:
        files = [str(path) for path in written]
        display.emit({"analysis": str(folder / ANALYSIS_FILE), "worked": worked, **summary, "files": files})
    elif not quiet:
        _show(summary)
    done = "analysed" if worked else "nothing to measure, it is there already; tables and pictures were made anew"
    display.closing(f"{done}: {folder} ({len(written)} tables and pictures)", quiet=quiet)


def _settings(
    source: "ModelSource",
    data: str | None,
    samples: int,
    seq_len: int | None,
    stride: int,
    skip: int,
    seed: int,
) -> "AnalysisSettings":
    """The settings, with the model's default text and length."""
    from lapcli.analysis.settings import AnalysisSettings
    from lapcli.cli import context
    from lapcli.errors import UsageError
    from lapcli.recipe import default_calibration
    from lapcli.stages.lineage import made_of_a_demo

    values: dict[str, Any] = {
        "data": data or default_calibration(made_of_a_demo(source))["data"],
        "samples": samples,
        "seq_len": context.fitting_length(source, 2048) if seq_len is None else seq_len,
        "stride": stride,
        "skip": skip,
        "seed": seed,
    }
    length = values["seq_len"]
    if length > 1 and stride > 0 and skip >= 0 and skip + stride > length:
        mend = "--skip 0" if stride <= length else f"--skip 0 --stride {max(1, length // 4)}"
        raise UsageError(
            f"no position: skip + stride is {skip + stride}, seq_len {length}",
            f"pass {mend}, or --seq-len {skip + stride} and more",
        )
    return context.from_command_line(AnalysisSettings, values)


def _selection_at(path: Path) -> Path:
    """The selection that was named, or that of the run that was."""
    from lapcli.artifacts import RunDirectory
    from lapcli.errors import ArtifactError

    found = RunDirectory(path).selection if path.is_dir() else path
    if path.is_dir() and not found.is_file():
        raise ArtifactError(
            f"--compare: there is no selection in {path}",
            "make one with `lapcli prune --ratio 0.5`, or name another run or a selection.safetensors",
        )
    return found


def _inputs(model: str | None, baseline: str | None, compare: Path | None, run: "RunDirectory") -> "AnalysisInputs":
    """What was named, or what the run holds."""
    from lapcli.artifacts import read_artifact
    from lapcli.cli import context
    from lapcli.errors import ArtifactError, UsageError
    from lapcli.stages.analysis import AnalysisInputs
    from lapcli.stages.evaluation import models_of

    if model is not None:
        if compare is not None:
            raise UsageError("--compare holds a selection against the run's, and --model is of no run", "drop one")
        return AnalysisInputs(context.named_models(model, baseline))
    models = models_of(run, context.base_model(baseline, run))
    selection = read_artifact(run.selection, "selection") if run.selection.is_file() else None
    calibration = read_artifact(run.calibration, "calibration") if run.calibration.is_file() else None
    if compare is not None and selection is None:
        raise ArtifactError(
            f"--compare: there is no selection in {run.path} to compare with",
            "make one with `lapcli prune --ratio 0.5`",
        )
    other = None if compare is None else read_artifact(_selection_at(compare), "selection")
    return AnalysisInputs(models, selection, calibration if selection is not None else None, other)


def _number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else f"{value:{form}}"


def _show(summary: dict[str, Any]) -> None:
    from lapcli.cli import display

    rows: list[list[str]] = []
    for label, found in summary["models"].items():
        error = found["output_error"] or {"own": None, "base": None}
        rows.append(
            [
                label,
                _number(found["utilisation"]),
                _number(found["effective_rank"]),
                _number(found["pearson"], ".2f"),
                _number(found["kappa_median"]),
                _number(found["kappa_at_floor"], ".1%"),
                _number(error["own"]),
                _number(error["base"]),
            ]
        )
    columns = [
        "model",
        "utilisation",
        "effective rank",
        "Pearson",
        "κ(S), median",
        "lower limits",
        "output error",
        "on base's inputs",
    ]
    display.table("states, mean over heads", columns, rows)
    states = [
        [label, str(row["state"]), *(_number(row[name]) for name in ("utilisation", "effective_rank", "kappa_median"))]
        for label, found in summary["models"].items()
        for row in found.get("states", ())
    ]
    if states:
        columns = ["model", "state", "utilisation", "effective rank", "κ(S), median"]
        display.table("states of each key head, by their number", columns, states, text_columns=2)
    bounds = [
        [label, name, str(bound["states"]), _number(bound["share"], ".4%"), _number(bound["margin"], ".4g")]
        for label, found in summary["models"].items()
        for name, bound in found["bounds"].items()
    ]
    display.table("bounds", ["model", "bound", "states", "satisfied", "smallest ratio"], bounds, text_columns=2)
    tracked = {label: found["stability"] for label, found in summary["models"].items() if "stability" in found}
    if tracked:
        figures = ("mean", "p01", "p99", "outside", "rho", "drift", "value_drift", "prediction_drift", "cosine")
        rows = [
            [label, *(_number(found[name]) for name in figures), _number(found["bound_share"], ".4%")]
            for label, found in tracked.items()
        ]
        columns = [
            "model",
            "β k·x",
            "1 %",
            "99 %",
            "outside",
            "ρ",
            "drift",
            "values'",
            "predictions'",
            "cosine",
            "bounded",
        ]
        display.table("stability: β k·x, outside of (0, 2); drift of errors; cosine of Sq and Sk", columns, rows)
    if "conditioning" in summary:
        names = ("all channels", "kept", "compared")
        parts = [[name, *map(_number, row)] for name, row in zip(names, summary["conditioning"], strict=False)]
        display.table("joint columns, medians over heads", ["", "σ_min", "σ_max", "κ"], parts)
    if "overlap" in summary:
        shared, jaccard = summary["overlap"]
        display.table(
            "overlap of the selections, medians over heads",
            ["shared channels", "Jaccard"],
            [[_number(shared), _number(jaccard)]],
            text_columns=0,
        )
