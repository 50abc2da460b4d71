"""`lapcli prune`: calibrate, select and slice in one go."""

from typing import TYPE_CHECKING

import typer

from lapcli.cli import options
from lapcli.cli.processes import check_processes, in_several
from lapcli.parallel import jointly, processes

if TYPE_CHECKING:
    from lapcli.families.source import ModelSource
    from lapcli.stages.pruning import PrunePlan


def register(app: typer.Typer) -> None:
    """Add the command."""
    summary = "Calibrate, select and slice: from a model to a smaller one, in a run directory."
    app.command("prune", help=summary)(jointly(run))


def run(
    model: options.Model = None,
    method: options.Method = "drrqr",
    ratio: options.Ratio = None,
    keep: options.Keep = None,
    score_from: options.ScoreFrom = "both",
    align: options.Align = None,
    f: options.Tolerance = 1.5,
    data: options.Data = None,
    samples: options.Samples = None,
    seq_len: options.SeqLen = None,
    seed: options.Seed = 0,
    gpus: options.Gpus = None,
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
    """Prune a model into `RUN/sliced`."""
    from lapcli.cli import context, display
    from lapcli.recipe import SelectionSettings

    directory = context.run_directory(run_path)
    source = context.base_model(model, directory)
    calibration = context.calibration_settings(source, data=data, samples=samples, seq_len=seq_len, seed=seed)
    if ratio is None and keep is None:
        ratio = options.DEFAULT_RATIO
    chosen = {"method": method, "ratio": ratio, "keep": keep, "score_from": score_from, "align": align, "f": f}
    selection = context.from_command_line(SelectionSettings, {**chosen, "seed": seed})

    from lapcli.machine import Machine
    from lapcli.stages.calibration import assist, existing_calibration
    from lapcli.stages.pruning import plan_document, plan_pruning, prune

    reporter = display.DisplayReporter(quiet)
    plan = plan_pruning(source, calibration, selection, directory, overwrite=overwrite)
    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    check_processes(gpus, device, samples=calibration.samples)
    layers = () if plan.calibration_ready else plan.layers
    machine.check(source.config, layers, needs_gradient=plan.needs_saliency)
    if dry_run:
        if as_json:
            asked = {"model": source.name, "selection": selection.document(), "calibration": calibration.document()}
            writes = [str(directory.calibration), str(directory.selection), str(directory.sliced)]
            display.emit({"dry_run": True, **asked, "writes": writes, **plan_document(plan)})
        else:
            writes = f"{directory.calibration}, {directory.selection.name}, {directory.sliced.name}/"
            facts = pruning_in_words(source, plan, calibration.data)
            display.facts("would do (nothing was done)", {**facts, "writes": writes})
        return
    _found, whole = existing_calibration(
        source, calibration, directory.calibration,
        machine=machine, saliency=plan.needs_saliency, overwrite=overwrite,
    )  # fmt: skip
    if not whole and in_several(gpus):
        return
    ours = processes()
    ours.wait()
    if not ours.leader:
        assist(source, calibration, directory.calibration, machine=machine, processes=ours)
        return
    with directory.lock():
        result = prune(
            source,
            calibration,
            selection,
            directory,
            machine=machine,
            overwrite=overwrite,
            reporter=reporter,
            processes=ours,
        )
    if as_json:
        display.emit(result.document(directory))
    elif not quiet:
        before, after = result.plan.bytes_before, result.plan.bytes_after
        rows = [
            ["key width a head", str(plan.width.original), str(plan.width.width)],
            ["state of a sequence, fp32", display.size(plan.state_bytes_before), display.size(plan.state_bytes_after)],
            ["weights", display.size(before), display.size(after)],
        ]
        display.table(f"{source.name}, {method}", ["", "base", "sliced"], rows)
    done = "pruned" if any(result.worked.values()) else "nothing to do, all of it is there already"
    display.closing(
        f"{done}: {directory.sliced}, {result.width}{context.loading(directory.sliced)}\n"
        f"next: lapcli eval builtin niah{options.run_flag(run_path)}",
        quiet=quiet,
    )


def pruning_in_words(source: "ModelSource", plan: "PrunePlan", data: str) -> dict[str, str]:
    """What pruning would do, for a person; `data` is the calibration's."""
    from lapcli.cli.plan import mtp_in_words

    return {
        "model": f"{source.name} ({source.digest[:12]})",
        "stateful layers": str(len(plan.layers)),
        "key width": str(plan.width),
        "state of a sequence, fp32": _change(plan.state_bytes_before, plan.state_bytes_after),
        **({} if plan.mtp is None else {"MTP head": mtp_in_words(plan.mtp)}),
        "calibration": _calibration_cost(plan.calibration_ready, plan.tokens, data, plan.needs_saliency),
    }


def _change(before: int, after: int) -> str:
    from lapcli.cli.display import size

    return f"{size(before)} -> {size(after)}"


def _calibration_cost(ready: bool, tokens: int, data: str, saliency: bool) -> str:
    if ready:
        return "there already"
    passes = "forward and backward" if saliency else "forward"
    return f"{tokens} tokens of {data}, {passes}"
