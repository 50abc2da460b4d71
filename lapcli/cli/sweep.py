"""`lapcli sweep`: selectors, ratios, seeds and texts side by side, each cell a run of its own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.parallel import launched

if TYPE_CHECKING:
    from lapcli.families.source import ModelSource
    from lapcli.recipe import Recipe
    from lapcli.stages.sweeping import SweepPlan
    from lapcli.sweeps.record import SweepRecord

_METHOD = "What the numbers depend on"
_MACHINE = "This machine"
DEFAULT_SWEEP = Path("lapcli-sweep")


def _axis(text: str, *names: str) -> Any:
    return typer.Option(*names, help=f"{text}; several with commas.", rich_help_panel=_METHOD)


def register(app: typer.Typer) -> None:
    """Add the command."""
    summary = "Sweep over selectors, ratios, seeds and texts: a run for each, going on from what is there."
    app.command("sweep", help=summary)(run)


def run(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file, or the name of one that ships (`lapcli list recipes`). Default: options alone."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, instead of the recipe's. Default: demo:gdn.")] = None,
    method: Annotated[str | None, _axis("Selectors: drrqr, grad, s-wanda, l1, rand; experimental: pca")] = None,
    ratio: Annotated[str | None, _axis("Fractions of the key width to remove")] = None,
    keep: Annotated[str | None, _axis("Key widths to keep, instead of --ratio")] = None,
    score_from: Annotated[str | None, _axis("Decide from both, key, query")] = None,
    data: Annotated[str | None, _axis("Calibration texts, as of `prune`; a mixture goes into a recipe")] = None,
    samples: Annotated[str | None, _axis("Token sequences of a calibration")] = None,
    seq_len: options.SeqLen = None,
    seed: Annotated[str | None, _axis("Seeds")] = None,
    seed_of: Annotated[str | None, _axis("What seeds are for: calibration, selection, recovery")] = None,
    recover: Annotated[
        bool | None,
        typer.Option(
            "--recover/--no-recover",
            help="Recover every cell, by the recipe's `recovery` or the default one. Default: as the recipe says.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    tasks: Annotated[str | None, _axis("What is measured at the end. Default: the recipe's, or builtin,niah")] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task.", rich_help_panel=_METHOD)] = None,
    task_data: Annotated[Path | None, typer.Option(help="Folder with local copies of task data.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs to use, a cell on each at a time. Default: one device.", rich_help_panel=_MACHINE),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Cells at a time on a GPU, or on the CPU.", rich_help_panel=_MACHINE)] = 1,
    run_path: Annotated[Path, typer.Option("--run", help="The sweep's directory.")] = DEFAULT_SWEEP,
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
    """Leave `DIR/sweep.json` and a run directory `DIR/cells/NAME` for each cell."""
    from lapcli.cli import context, display
    from lapcli.errors import LapcliError, UsageError
    from lapcli.machine import Machine
    from lapcli.stages.sweeping import plan_sweep, run_sweep, slots_for
    from lapcli.sweeps.cells import expand
    from lapcli.sweeps.record import SweepDirectory

    if launched():
        raise UsageError("sweep starts its own processes", "drop torchrun and pass --gpus N")
    holder = context.run_directory(run_path)
    axes = {
        "method": _words(method), "ratio": _words(ratio), "keep": _numbers("keep", keep),
        "score_from": _words(score_from), "data": _words(data), "samples": _numbers("samples", samples),
        "seed": _numbers("seed", seed), "seed_of": _words(seed_of),
    }  # fmt: skip
    request, source = _request(recipe, model, axes, seq_len, recover, _words(tasks), limit)
    where = "the options" if recipe is None else str(recipe)
    cells = expand(request, where)
    directory = SweepDirectory(run_path)
    slots = slots_for(gpus, jobs, device)
    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    plan = plan_sweep(
        source, cells, request.evaluation, directory, machine=machine, task_data=task_data, overwrite=overwrite
    )
    if dry_run:
        _would_do(plan, run_path, as_json)
        return
    with holder.lock():
        watch = display.SweepDisplay(quiet, [cell.name for cell in cells])
        with watch:
            record = run_sweep(plan, directory, slots, command=["lapcli", *sys.argv[1:]], listener=watch)
    failed = record.failed()
    if as_json:
        display.emit({**record.document(), "failed": list(failed)})
    elif not quiet:
        _show(record, [cell.name for cell in cells])
    wanted = {cell.name for cell in cells} | {"base"} | {f"calibration {name}" for name in plan.calibrations}
    failed = {name: entry for name, entry in failed.items() if name in wanted}
    if failed:
        raise LapcliError(
            f"{len(failed)} of the sweep's parts failed, the others are there:\n{_causes(failed)}",
            "the same command tries these again, and leaves the others alone",
        )
    done = "swept" if plan.to_do else "nothing to do, all cells are there already"
    display.closing(f"{done}: {directory.record}\nnext: lapcli report {run_path}", quiet=quiet)


def _causes(failed: "dict[str, dict[str, Any]]") -> str:
    """Why parts failed, each cause once with those that it stopped."""
    causes: dict[str, list[str]] = {}
    hints: dict[str, str | None] = {}
    for name, entry in failed.items():
        failure = entry["failure"]
        cause = failure.get("cause") or failure["message"]
        # Those that failed by themselves first.
        named = causes.setdefault(cause, [])
        named.insert(len(named) if failure.get("cause") else 0, name)
        hints[cause] = hints.get(cause) or failure.get("hint")
    lines: list[str] = []
    for cause, names in causes.items():
        others = f" (and for that {len(names) - 1} more: {', '.join(names[1:])})" if len(names) > 1 else ""
        lines.append(f"  {names[0]}: {cause}{others}")
        if hints[cause]:
            lines.append(f"    {hints[cause]}")
    return "\n".join(lines)


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(name: str, text: str | None) -> list[int] | None:
    from lapcli.cli import context

    return None if text is None else context.whole_numbers(name, text)


def _request(
    path: Path | None,
    model: str | None,
    axes: dict[str, Any],
    seq_len: int | None,
    recover: bool | None,
    tasks: list[str] | None,
    limit: int | None,
) -> "tuple[Recipe, ModelSource]":
    """The recipe, with what the options say in place of what it says."""
    from lapcli.cli import context
    from lapcli.evaluation.tasks import parse_tasks
    from lapcli.families.source import DEFAULT_MODEL, resolve_model
    from lapcli.recipe import EvaluationRequest, Recipe, SweepSettings, default_recovery, read_recipe
    from lapcli.shipped import find_recipe
    from lapcli.stages.lineage import made_of_a_demo

    given = {name: value for name, value in axes.items() if value is not None}
    if path is not None:
        found = read_recipe(find_recipe(path))
        source = resolve_model(model or found.model)
        values = found.model_dump(exclude_unset=True)
    else:
        source = resolve_model(model or DEFAULT_MODEL)
        calibration = context.calibration_settings(source, data=None, samples=None, seq_len=None, seed=0)
        budget = {} if "ratio" in given or "keep" in given else {"ratio": options.DEFAULT_RATIO}
        values = {
            "calibration": calibration.model_dump(),
            "selection": budget,
            "evaluation": {"tasks": ["builtin", "niah"]},
        }
    swept = values.get("sweep") or {}
    for one, other in (("ratio", "keep"), ("keep", "ratio")):
        if one in given and other not in given:
            swept.pop(other, None)
    if given:
        # Checked alone first, so that an error names the option.
        context.from_command_line(SweepSettings, given)
    values["sweep"] = {**swept, **given}
    if seq_len is not None:
        values["calibration"]["seq_len"] = seq_len
    if recover is False:
        values["recovery"] = None
        values["sweep"].pop("recoveries", None)
    elif recover and values.get("recovery") is None:
        values["recovery"] = default_recovery(made_of_a_demo(source))
    if tasks is not None or limit is not None:
        evaluation = values.get("evaluation") or {"tasks": ["builtin", "niah"]}
        chosen = {"tasks": tasks or evaluation["tasks"], "limit": evaluation.get("limit") if limit is None else limit}
        values["evaluation"] = context.from_command_line(EvaluationRequest, chosen).model_dump()
    request = context.from_command_line(Recipe, values)
    if request.evaluation is not None:
        parse_tasks(request.evaluation.tasks)
    return request, source


def _would_do(plan: "SweepPlan", path: Path, as_json: bool) -> None:
    from lapcli.cli import display

    document = plan.document()
    if as_json:
        display.would_do(document, as_json)
        return
    calibrations = [
        f"{name} ({'there already' if found['ready'] else str(found['tokens']) + ' tokens'}"
        + (", forward and backward" if found["saliency"] and not found["ready"] else "")
        + ")"
        for name, found in document["calibrations"].items()
    ]
    facts = {
        "model": f"{plan.source.name} ({plan.source.digest[:12]})",
        "cells": f"{document['cells']}, {len(document['cells_there'])} there already, {document['slices']} slices",
        "to do": ", ".join(document["cells_to_do"]) or "nothing",
        "calibrations": "; ".join(calibrations),
        "tokens": f"{document['calibration_tokens']:,} of calibration, {document['recovery_tokens']:,} of recovery",
        "measures": ", ".join(document["tasks"]) or "nothing",
        "data from the hub": ", ".join(document["data_from_the_hub"]) or None,
        "base model": "measured already" if document["base_evaluated"] else "measured once",
        "writes": f"{path}/sweep.json, {path}/cells/",
    }
    display.would_do(facts, as_json)


def _show(record: "SweepRecord", names: list[str]) -> None:
    from lapcli.cli import display
    from lapcli.sweeps.headline import columns_of, score_cells

    entries = {name: record.cells[name] for name in names}
    columns = columns_of(record)
    sizes = [entry["state_bytes"]["before"] for entry in entries.values() if "state_bytes" in entry]
    rows = [["base", "", display.size(sizes[0]) if sizes else "", *score_cells(record.base, "base", columns)]]
    for name, entry in entries.items():
        if entry["state"] != "done":
            continue
        after = display.size(entry["state_bytes"]["after"])
        rows.append([name, "sliced", after, *score_cells(entry, "sliced", columns)])
        if entry.get("recovery"):
            rows.append([name, "recovered", after, *score_cells(entry, "recovered", columns)])
    display.table(None, ["cell", "", "state", *(column.title for column in columns)], rows, text_columns=2)
