"""`lapcli slice`: cut the dropped channels out of the weights."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lapcli.cli import options
from lapcli.pipeline import stage


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("slice", help=stage("slice").summary)(run)


def run(
    model: options.Model = None,
    selection: Annotated[Path | None, typer.Argument(help="A selection. Default: the run's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to write. Default: RUN/sliced.")] = None,
    run_path: options.Run = options.DEFAULT_RUN,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write the sliced model; needs no torch model and no GPU."""
    from lapcli.cli import context, display
    from lapcli.families.source import resolve_model
    from lapcli.stages.evaluation_file import forget_stale
    from lapcli.stages.slicing import load_selection, plan_slicing, slice_into

    directory = context.run_directory(run_path)
    chosen = load_selection(selection or directory.selection)
    source = context.base_model(model or _base_of(chosen.lineage.model, directory.read_record()), directory)
    context.refuse_within(output, source)
    target = output or directory.sliced
    plan = plan_slicing(source, chosen)
    facts = {key: value for key, value in asdict(plan).items() if key != "layers" and value is not None}
    if dry_run:
        display.would_do({**facts, "writes": str(target)}, as_json)
        return
    reporter = display.DisplayReporter(quiet)
    with directory.lock():
        _plan, worked = slice_into(source, chosen, target, overwrite=overwrite, reporter=reporter)
        if worked and target == directory.sliced:
            forget_stale(directory.evaluation, "sliced", resolve_model(str(target)).digest, reporter)
        directory.note(source.describe(), "slice", {"selection": str(chosen.path), "output": str(target)})
    if as_json:
        display.emit({"sliced": str(target), "worked": worked, **facts})
    done = "sliced" if worked else "nothing to do, it is there already"
    display.closing(
        f"{done}: {target} (state {display.size(plan.state_bytes_before)} -> {display.size(plan.state_bytes_after)} a "
        f"sequence){context.loading(target)}\nnext: lapcli eval builtin niah{options.run_flag(run_path)}",
        quiet=quiet,
    )


def _base_of(model: dict[str, str], record: object) -> str | None:
    """The model that a selection was made for, where no run says which it is."""
    return None if record is not None else model["name"]
