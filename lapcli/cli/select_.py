"""`lapcli select`: choose the channels that each head keeps."""

from pathlib import Path
from typing import Annotated

import typer

from lapcli.cli import options
from lapcli.pipeline import stage


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("select", help=stage("select").summary)(run)


def run(
    calibration: Annotated[Path | None, typer.Argument(help="A calibration. Default: the run's.")] = None,
    method: options.Method = "drrqr",
    ratio: options.Ratio = None,
    keep: options.Keep = None,
    score_from: options.ScoreFrom = "both",
    align: options.Align = None,
    f: options.Tolerance = 1.5,
    output: Annotated[Path | None, typer.Option(help="File to write. Default: RUN/selection.safetensors.")] = None,
    seed: options.Seed = 0,
    run_path: options.Run = options.DEFAULT_RUN,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a selection."""
    from lapcli.artifacts import read_artifact
    from lapcli.cli import context, display
    from lapcli.recipe import SelectionSettings

    directory = context.run_directory(run_path)
    place = calibration or directory.calibration
    artifact = read_artifact(place, "calibration")
    if ratio is None and keep is None:
        ratio = options.DEFAULT_RATIO
    chosen = {"method": method, "ratio": ratio, "keep": keep, "score_from": score_from, "align": align, "f": f}
    settings = context.from_command_line(SelectionSettings, {**chosen, "seed": seed})
    target = output or directory.selection

    from lapcli.stages.selection import plan_selection, select

    width = plan_selection(artifact, settings)
    if dry_run:
        facts = {"calibration": str(place), "method": method, "key width": str(width), "writes": str(target)}
        display.would_do(facts, as_json)
        return
    reporter = display.DisplayReporter(quiet)
    with directory.lock():
        selected, worked = select(artifact, settings, target, overwrite=overwrite, reporter=reporter)
        directory.note(artifact.lineage.model, "select", {"settings": settings.document(), "output": str(target)})
    if as_json:
        record = selected.lineage.record
        display.emit(
            {"selection": str(target), "worked": worked, "kept_width": width.width, "layers": record["layers"]}
        )
    done = "selected" if worked else "nothing to do, it is there already"
    display.closing(f"{done}: {target}, {width}\nnext: lapcli slice{options.run_flag(run_path)}", quiet=quiet)
