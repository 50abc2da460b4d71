"""`lapcli convert`: a model of one architecture becomes one of another."""

from pathlib import Path
from typing import Annotated

import typer

from lapcli.cli import options

_METHOD = "What the numbers depend on"
_TARGETS = ("qdelta",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert", help="Give a model another architecture: qdelta, a Gated DeltaNet with query feedback.")(run)


def run(
    model: Annotated[
        str | None, typer.Argument(help="A directory, a hub id, or demo:NAME; a pruned one too. Default: demo:gdn.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="What it becomes: qdelta.", rich_help_panel=_METHOD)] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to write.")] = None,
    lambda_init: Annotated[
        float | None,
        typer.Option(
            help="qdelta: the feedback of every token at first, in (0, 1). Default: a learned gain for each value head "
            "that begins at 0, so that the function stays what it is.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write the converted model; needs no torch model and no GPU."""
    from lapcli.errors import UsageError

    if to not in _TARGETS:
        asked = "--to is missing" if to is None else f"--to {to!r} is not known"
        raise UsageError(f"{asked}; a model becomes {' or '.join(_TARGETS)}", "for example: lapcli convert --to qdelta")
    if output is None:
        raise UsageError(
            "--output is missing", f"for example: lapcli convert {model or 'demo:gdn'} --to {to} --output DIR"
        )
    _to_qdelta(model, output, lambda_init, overwrite, as_json, dry_run, quiet)


def _to_qdelta(
    model: str | None,
    output: Path,
    lambda_init: float | None,
    overwrite: bool,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    from lapcli.cli import display
    from lapcli.families.source import DEFAULT_MODEL, resolve_model
    from lapcli.stages.conversion import QDeltaSettings, convert_into, plan_conversion

    plan = plan_conversion(resolve_model(model or DEFAULT_MODEL), QDeltaSettings(lambda_init))
    document = plan.document()
    if dry_run:
        display.would_do({**document, "writes": str(output)}, as_json)
        return
    worked = convert_into(plan, output, overwrite=overwrite, reporter=display.DisplayReporter(quiet or as_json))
    if as_json:
        display.emit({"converted": str(output), "worked": worked, **document})
        return
    done = "converted" if worked else "nothing to do, it is there already"
    display.closing(
        f"{done}: {output} ({document['added_parameters']:,} numbers more; it computes {document['computes']})\n"
        f"next: lapcli recover --model {output}, or lapcli eval builtin niah --model {output}",
        quiet=quiet,
    )
