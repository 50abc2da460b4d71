"""`lapcli run`: a whole recipe, each step skipped where its result is there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.cli import options
from lapcli.parallel import jointly, launched

if TYPE_CHECKING:
    from lapcli.artifacts import RunDirectory
    from lapcli.families.source import ModelSource
    from lapcli.recipe import Recipe
    from lapcli.stages.pruning import PrunePlan


def register(app: typer.Typer) -> None:
    """Add the command."""
    summary = "Run a recipe: calibrate, select, slice, recover and evaluate, going on from what is there."
    app.command("run", help=summary)(jointly(run))


def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or the name of one that ships (`lapcli list recipes`).")],
    model: Annotated[str | None, typer.Option(help="The model, instead of the recipe's.")] = None,
    task_data: Annotated[Path | None, typer.Option(help="Folder with local copies of task data.")] = None,
    validate_only: Annotated[bool, typer.Option("--validate", help="Check the recipe and stop.")] = False,
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
    """Leave the chain's results in the run directory."""
    from lapcli.cli import context, display
    from lapcli.errors import RecipeError, UsageError
    from lapcli.evaluation.tasks import parse_tasks
    from lapcli.recipe import read_recipe
    from lapcli.shipped import find_recipe

    if launched():
        raise UsageError(
            "torchrun can start calibrate and prune, not run",
            "let `lapcli prune --gpus N` do its part, then run the rest",
        )
    recipe = find_recipe(recipe)
    plan = read_recipe(recipe)
    if plan.sweep is not None:
        raise RecipeError(f"{recipe} is a sweep, of many chains", f"lapcli sweep {recipe}")
    if (plan.selection.ratio is None) == (plan.selection.keep is None):
        raise RecipeError(f"{recipe}: selection: give either ratio or keep")
    if plan.evaluation is not None:
        parse_tasks(plan.evaluation.tasks)
    if validate_only:
        display.closing(f"{recipe} is valid", quiet=quiet)
        return
    from lapcli.families.source import resolve_model

    directory = context.run_directory(run_path)
    source = resolve_model(model or plan.model)

    from lapcli.machine import Machine
    from lapcli.stages.lineage import STALE_HINT
    from lapcli.stages.pruning import plan_document, plan_pruning, prune

    pruning = plan_pruning(source, plan.calibration, plan.selection, directory, overwrite=overwrite)
    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    if machine.split and plan.evaluation is not None:
        raise UsageError(
            "--device split is for calibrate and prune, and the recipe evaluates",
            "prune with it first; then run the recipe without it, which finds the calibration there",
        )
    layers = () if pruning.calibration_ready else pruning.layers
    machine.check(source.config, layers, needs_gradient=pruning.needs_saliency)
    if plan.recovery is not None:
        from lapcli.stages.query_feedback import plan_feedback
        from lapcli.stages.recovery import (
            check_recovery,
            check_text,
            micro_batch,
            note_recovery,
            plan_recovery,
            recover_into,
        )
        from lapcli.training.engine import Execution

        # The base stands in for the slice that is not there yet.
        plan_feedback(source, plan.recovery, directory)
        guide = source if plan.recovery.kl_weight else None
        check_recovery(source, guide, plan.recovery, trust_remote_code=trust_remote_code)
        check_text(source, plan.recovery, trust_remote_code=trust_remote_code)
        machine.check(source.config, pruning.layers, needs_gradient=True)
    if plan.evaluation is not None:
        from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
        from lapcli.stages.evaluation import evaluate_into, models_of, plan_stage

        tasks = plan.evaluation.tasks
        settings = EvaluationSettings(limit=plan.evaluation.limit)
        chosen_options = EvaluationOptions(task_data=task_data)
        # What the end of the chain would refuse is refused now.
        plan_stage(
            directory.evaluation, [("base", source)], tasks, settings,
            options=chosen_options, machine=machine, dry_run=True,
        )  # fmt: skip
    if dry_run:
        if as_json:
            tokens = plan.recovery.tokens if plan.recovery else 0
            asked = plan.evaluation.tasks if plan.evaluation else []
            added = plan.recovery is not None and plan.recovery.add_query_feedback
            display.emit(
                {"dry_run": True, **plan_document(pruning), "recovery_tokens": tokens, "adds_query_feedback": added,
                 "tasks": asked}
            )  # fmt: skip
        else:
            display.facts("would do (nothing was done)", _in_words(plan, pruning, source, directory))
        return
    reporter = display.DisplayReporter(quiet)
    with directory.lock():
        result = prune(
            source,
            plan.calibration,
            plan.selection,
            directory,
            machine=machine,
            overwrite=overwrite,
            reporter=reporter,
        )
        recovery = None
        if plan.recovery is not None:
            student = source if plan.recovery.control else resolve_model(str(directory.sliced))
            if feedback := plan_feedback(student, plan.recovery, directory):
                student = feedback.write(overwrite=overwrite, mend=STALE_HINT, reporter=reporter)
            healing = plan_recovery(
                student, guide, plan.recovery, directory,
                overwrite=overwrite, trust_remote_code=trust_remote_code, reporter=reporter,
            )  # fmt: skip
            recovery = recover_into(
                healing, directory, machine=machine, reporter=reporter,
                execution=Execution(micro_batch=micro_batch(plan.recovery.seq_len)),
            )  # fmt: skip
            note_recovery(healing, directory)
        evaluation = None
        if plan.evaluation is not None:
            evaluation, _worked = evaluate_into(
                directory.evaluation,
                models_of(directory, source),
                tasks,
                settings,
                options=chosen_options,
                machine=machine,
                reporter=reporter,
            )
    if as_json:
        document = result.document(directory)
        document["recovery"] = recovery.document() if recovery else None
        display.emit({**document, "evaluation": evaluation.to_json() if evaluation else None})
    elif evaluation is not None:
        display.evaluation(evaluation, quiet=quiet)
    made = recovery.output if recovery else directory.sliced
    display.closing(f"done: {made}{context.loading(made)}", quiet=quiet)


def _in_words(plan: "Recipe", pruning: "PrunePlan", source: "ModelSource", run: "RunDirectory") -> dict[str, str]:
    """What a recipe would do, stage by stage, for a person."""
    from lapcli.cli.prune import pruning_in_words
    from lapcli.stages.query_feedback import plan_feedback

    facts = pruning_in_words(source, pruning, plan.calibration.data)
    facts["selector"] = plan.selection.method
    writes = [f"{run.calibration}", run.selection.name, f"{run.sliced.name}/"]
    if plan.recovery is not None:
        training = plan.recovery.training()
        what = "of the unpruned model, as a control" if plan.recovery.control else "of the slice"
        if plan.recovery.add_query_feedback:
            what += ", made a Q-Delta first"
        facts["recovery"] = (
            f"{what}, {training.steps} steps of {training.batch} x {plan.recovery.seq_len} = "
            f"{plan.recovery.tokens:,} tokens of {plan.recovery.data}"
        )
        if feedback := plan_feedback(source, plan.recovery, run):
            writes.append(f"{feedback.place.name}/")
        writes.append(f"{(run.control if plan.recovery.control else run.recovered).name}/")
    if plan.evaluation is not None:
        limit = "" if plan.evaluation.limit is None else f", {plan.evaluation.limit} items of each"
        facts["evaluation"] = ", ".join(plan.evaluation.tasks) + limit
        writes.append(run.evaluation.name)
    return {**facts, "writes": ", ".join(writes)}
