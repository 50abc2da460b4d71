"""`lapcli convert`: a model of one architecture becomes one of another."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lapcli.cli import options

_METHOD = "What the numbers depend on"
_MACHINE = "This machine"
_OUTPUT = "Output"
_TARGETS = ("qdelta", "dsla")
_OPTIONS = {
    "order": "sensitivity",
    "batch": "batch-size",
    "align": "align-loss",
    "fit": "no-fit",
    "chained": "independent",
}
"""Options that are not called as the settings are."""


def _dsla(text: str, *names: str) -> Any:
    return typer.Option(*names, help=f"dsla: {text[0].lower()}{text[1:]}", rich_help_panel=_METHOD)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "convert",
        help="Give a model another architecture: qdelta, a Gated DeltaNet with query feedback; dsla, a Transformer "
        "some of whose attention layers keep two states instead of keys and values.",
    )(run)


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A directory, a hub id, or demo:NAME; for qdelta a pruned one too. Default: demo:gdn for qdelta, "
            "demo:transformer for dsla."
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="dsla: a YAML file, or the name of one that ships, with model, fraction and settings; options given "
            "here go first."
        ),
    ] = None,
    to: Annotated[str | None, typer.Option(help="What it becomes: qdelta or dsla.", rich_help_panel=_METHOD)] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory to write; dsla: of the whole conversion, with all its prefixes.")
    ] = None,
    lambda_init: Annotated[
        float | None,
        typer.Option(
            help="qdelta: the feedback of every token at first, in (0, 1). Default: a learned gain for each value head "
            "that begins at 0, so that the function stays what it is.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    fraction: Annotated[str | None, _dsla("Of the layers, above 0 and at most 1: 0.25 or 25%. Default: 0.25.")] = None,
    sensitivity: Annotated[
        str | None,
        _dsla(
            "Which layers first: loss or task:NAME (each replaced alone), entropy of their attention, outlier, or "
            "first (as they lie). Default: loss."
        ),
    ] = None,
    data: Annotated[
        str | None,
        _dsla(
            "Text, as of other commands. Default: builtin for demo models and what was made of them, fineweb otherwise."
        ),
    ] = None,
    samples: Annotated[
        int | None, _dsla("Windows of text on which layers are compared. Default: 64 (demo: 16).")
    ] = None,
    rows: Annotated[
        str | None, _dsla("Attention of the last token of a window, or of all. Default: last.", "--rows")
    ] = None,
    steps: Annotated[
        int | None, _dsla("Optimiser steps of each layer. Default: 128, a million tokens (demo: 32).")
    ] = None,
    batch_size: Annotated[int | None, _dsla("Sequences of a step. Default: 8 (demo: 4).")] = None,
    seq_len: Annotated[int | None, _dsla("Tokens of a sequence or window. Default: 1024, 2048 (demo: 512).")] = None,
    lr: Annotated[float | None, _dsla("Largest learning rate. Default: 1e-3 (demo: 3e-3).")] = None,
    lr_min: Annotated[float | None, _dsla("Last learning rate. Default: a tenth of --lr.")] = None,
    weight_decay: Annotated[float | None, _dsla("Of AdamW. Default: 0.01.")] = None,
    align_loss: Annotated[
        str | None, _dsla("Of a layer's output: mse over the teacher's variance, or kl of softmax. Default: mse.")
    ] = None,
    align_weight: Annotated[float | None, _dsla("What that counts. Default: 1.")] = None,
    kl_weight: Annotated[float | None, _dsla("What the KL of the final logits counts. Default: 1.")] = None,
    penalty: Annotated[float | None, _dsla("What the cosine similarity of gates counts. Default: 0.1.")] = None,
    validation: Annotated[int | None, _dsla("Sequences held out, to measure prefixes on. Default: 16.")] = None,
    states: Annotated[int | None, _dsla("States of a layer. Default: 2.")] = None,
    start: Annotated[
        str | None, _dsla("Gates begin graded, from history to recency, or all random. Default: graded.")
    ] = None,
    width: Annotated[int | None, _dsla("Key channels of a state, in the teacher's. Default: 1.")] = None,
    window: Annotated[
        str | None, _dsla("Instead of states, attention to so many last tokens; equal: of the states' memory.")
    ] = None,
    sinks: Annotated[int | None, _dsla("With --window: first tokens that it always sees. Default: 4.")] = None,
    no_fit: Annotated[bool, _dsla("Do not fit how much each head counts before training.", "--no-fit")] = False,
    independent: Annotated[
        bool, _dsla("Train each layer by itself, not with those before it in place.", "--independent")
    ] = False,
    task: Annotated[
        list[str] | None, _dsla("Measure each new prefix on this task too; may be given often.", "--task")
    ] = None,
    limit: Annotated[int | None, _dsla("Items of each --task.")] = None,
    seed: Annotated[int | None, _dsla("Of text and new weights. Default: 0.")] = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            help="dsla: write the model of this fraction from the conversion in --output, and do no more.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option(help="With --export: the model's directory.", rich_help_panel=_OUTPUT)
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="dsla: sequences computed at once. Default: about 8192 tokens.", rich_help_panel=_MACHINE, min=1
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: Annotated[
        str,
        typer.Option(help="dsla: of the new layers: auto, reference, chunked, fla.", rich_help_panel=_MACHINE),
    ] = "auto",
    no_cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--no-cuda-graphs",
            help="dsla: launch the kernels of training steps one by one, on a GPU.",
            rich_help_panel=_MACHINE,
        ),
    ] = False,
    require_fast: options.RequireFast = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write the converted model. qdelta needs no torch model and no GPU; dsla trains each new layer."""
    from lapcli.errors import UsageError

    if to is None and any(value is not None for value in (export, export_to, recipe)):
        to = "dsla"
    if to not in _TARGETS:
        asked = "--to is missing" if to is None else f"--to {to!r} is not known"
        raise UsageError(f"{asked}; a model becomes {' or '.join(_TARGETS)}", "for example: lapcli convert --to qdelta")
    given = {
        "order": sensitivity, "data": data, "samples": samples, "rows": rows, "steps": steps, "batch": batch_size,
        "seq_len": seq_len, "lr": lr, "lr_min": lr_min, "weight_decay": weight_decay, "align": align_loss,
        "align_weight": align_weight, "kl_weight": kl_weight, "penalty": penalty, "validation": validation,
        "states": states, "start": start, "width": width, "window": window, "sinks": sinks,
        "fit": False if no_fit else None, "chained": False if independent else None, "seed": seed,
    }  # fmt: skip
    of_dsla = {
        **given,
        "recipe": recipe,
        "fraction": fraction,
        "export": export,
        "export_to": export_to,
        "task": task,
        "limit": limit,
    }
    if to == "qdelta" and any(value is not None for value in of_dsla.values()):
        name = next(name for name, value in of_dsla.items() if value is not None)
        raise UsageError(f"--{_OPTIONS.get(name, name).replace('_', '-')} is about --to dsla, not --to qdelta")
    if to == "dsla" and lambda_init is not None:
        raise UsageError("--lambda-init is about --to qdelta, not --to dsla")
    if to == "qdelta" and kernel != "auto":
        raise UsageError("--kernel is about --to dsla, not --to qdelta, which runs none")
    if to == "qdelta" and no_cuda_graphs:
        raise UsageError("--no-cuda-graphs is about --to dsla, not --to qdelta, which trains nothing")
    if to == "qdelta" and require_fast:
        raise UsageError("--require-fast is about --to dsla, not --to qdelta, which runs no kernel")
    if output is None:
        name = model or {"qdelta": "demo:gdn", "dsla": "demo:transformer"}[to]
        raise UsageError("--output is missing", f"for example: lapcli convert {name} --to {to} --output DIR")
    if to == "qdelta":
        _to_qdelta(model, output, lambda_init, overwrite, as_json, dry_run, quiet)
        return
    from lapcli.cli import convert_dsla

    said = {"overwrite": overwrite, "as_json": as_json, "dry_run": dry_run, "quiet": quiet}
    if export is not None:
        other = next((name for name, value in of_dsla.items() if value is not None and "export" not in name), None)
        if other is not None or model is not None:
            what = "a model" if other is None else f"--{_OPTIONS.get(other, other).replace('_', '-')}"
            raise UsageError(f"{what} beside --export: it writes what was converted before, and converts nothing")
        convert_dsla.export(export, output, export_to, **said)
        return
    if export_to is not None:
        raise UsageError("--export-to without --export: which fraction is to be written?", "pass --export 0.25")
    convert_dsla.to_dsla(
        model, fraction, output, given, recipe=recipe,
        tasks=task, limit=limit, micro_batch=micro_batch, device=device, dtype=dtype, kernel=kernel,
        cuda_graphs=not no_cuda_graphs, require_fast=require_fast, **said,
    )  # fmt: skip


def _to_qdelta(
    model: str | None,
    output: Path,
    lambda_init: float | None,
    overwrite: bool,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    from lapcli.cli import context, display
    from lapcli.families.source import DEFAULT_MODEL, resolve_model
    from lapcli.stages.conversion import QDeltaSettings, check_output, convert_into, plan_conversion

    source = resolve_model(model or DEFAULT_MODEL)
    context.refuse_within(output, source)
    plan = plan_conversion(source, QDeltaSettings(lambda_init))
    document = plan.document()
    if dry_run:
        there, _wrong = check_output(plan, output, overwrite=overwrite)
        display.would_do({**document, "writes": str(output), "there_already": there}, as_json)
        return
    worked = convert_into(plan, output, overwrite=overwrite, reporter=display.DisplayReporter(quiet))
    if as_json:
        display.emit({"converted": str(output), "worked": worked, **document})
    done = "converted" if worked else "nothing to do, it is there already"
    display.closing(
        f"{done}: {output} ({document['added_parameters']:,} numbers more; it computes {document['computes']})\n"
        f"next: lapcli recover --model {output}, or lapcli eval builtin niah --model {output}",
        quiet=quiet,
    )
