"""Evaluation as a stage: models and tasks in, `evaluation.json` out. The measuring is `lapcli.evaluation`'s."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lapcli.artifacts import RunDirectory
from lapcli.errors import ArtifactError
from lapcli.evaluation.results import Evaluation
from lapcli.evaluation.run import EvaluationPlan, evaluate, plan_evaluation, read_local_data
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.registry import find_family
from lapcli.families.source import ModelSource, resolve_model
from lapcli.machine import Machine
from lapcli.reporting import Reporter
from lapcli.stages.evaluation_file import (
    KeptScores,
    previous,
    read_evaluation,
    set_aside,
    what_left,
    write_evaluation,
)
from lapcli.stages.lineage import altered


def models_of(run: RunDirectory, base: ModelSource) -> list[tuple[str, ModelSource]]:
    """The models of a run with their labels, the base first.

    Raises:
        ModelError: one of them is damaged.
    """
    made = {"sliced": run.sliced, "recovered": run.recovered, "control": run.control}
    return [("base", base), *((label, resolve_model(str(folder))) for label, folder in made.items() if folder.is_dir())]


def plan_stage(
    output: Path,
    models: Sequence[tuple[str, ModelSource]],
    tasks: Sequence[str],
    settings: EvaluationSettings,
    *,
    options: EvaluationOptions,
    machine: Machine,
    overwrite: bool = False,
    dry_run: bool = False,
) -> EvaluationPlan:
    """Refuse what can be known to fail, and say what there is to measure.

    Args:
        output: the evaluation's file; it, or what lies beside it, may hold some of it.
        models: label and source of each.
        tasks: task names.
        settings: what the numbers depend on.
        options: what they do not.
        machine: where it will run.
        overwrite: whether what is there will be measured again.
        dry_run: whether to read the tasks' data too, as far as it lies on this machine; an evaluation does so anyway.

    Raises:
        LapcliError: see `lapcli.evaluation.run.evaluate`.
    """
    for _label, source in models:
        # Stateful layers are asked for only where they matter: a model of a family that is not known can be measured.
        family = find_family(source.config) if machine.require_fast else None
        machine.check(source.config, () if family is None else family.layers(source.config))
    plan = plan_evaluation(
        models, tasks, settings, options,
        earlier=None if overwrite else KeptScores(output, read_evaluation(output)), **_where(machine, models),
    )  # fmt: skip
    return replace(plan, fetched=read_local_data(plan, settings, options)) if dry_run else plan


def evaluate_into(
    output: Path,
    models: Sequence[tuple[str, ModelSource]],
    tasks: Sequence[str],
    settings: EvaluationSettings,
    *,
    options: EvaluationOptions,
    machine: Machine,
    overwrite: bool = False,
    reporter: Reporter,
) -> tuple[Evaluation, bool]:
    """Measure models on tasks and write the result beside what was measured before.

    What was measured once is not measured again: all of it is kept in `evaluations/`, a file for each model, task and
    settings. The file is written after each task of each model, so that a run that is stopped loses one task at most.
    It shows what was asked for last of each task; what leaves it is said. Where scores of an older evaluation do not
    belong beside these at all (another base, other versions of torch and so on), a copy of it stays as
    `evaluation.previous.json` too.

    Args:
        output: the JSON file to write.
        models: label and source of each; the first is the base of the differences.
        tasks: task names.
        settings: what the numbers depend on.
        options: what they do not.
        machine: where it runs.
        overwrite: whether to measure again what is there.
        reporter: where progress goes.

    Returns:
        The scores that were asked for, and whether any was measured now.

    Raises:
        LapcliError: see `lapcli.evaluation.run.evaluate`.
    """
    for _label, source in models:
        if altered(source):
            reporter.warn(
                f"{source.name} is no longer as lapcli wrote it: other weights or another config are measured; "
                "`lapcli prune` and `lapcli recover` mend what they made"
            )
    before = beside = _there(output, overwrite, reporter)
    kept = KeptScores(output, before)
    worked = copied = False

    def show(found: Evaluation) -> None:
        nonlocal beside, copied
        merged, whole = (found, True) if beside is None else found.merged_with(beside)
        if beside is not None and _by_label(merged) == _by_label(beside):
            return
        if beside is not None:
            # Scores may be there that an older lapcli measured, or that a sweep shared.
            kept.store(beside)
        if not whole:
            set_aside(output)
            copied = True
        beside = merged
        write_evaluation(merged, output)

    def keep(found: Evaluation) -> None:
        nonlocal worked
        worked = True
        kept.store(found, anew=overwrite)
        show(found)

    try:
        evaluation = evaluate(
            models,
            tasks,
            settings,
            options=options,
            earlier=None if overwrite else kept,
            keep=keep,
            reporter=reporter,
            require_fast=machine.require_fast,
            **_where(machine, models),
        )
        # What was measured long ago may have been out of sight.
        show(evaluation)
    finally:
        left = what_left(before, beside) if before and beside else []
        if left:
            also = f" (and as they stood in {previous(output)})" if copied else ""
            reporter.notice(
                f"{output} shows what was asked for last, no longer {'; '.join(left)}: kept in {kept.folder}{also}"
            )
    return evaluation, worked


def help_evaluate(
    output: Path,
    models: Sequence[tuple[str, ModelSource]],
    tasks: Sequence[str],
    settings: EvaluationSettings,
    *,
    options: EvaluationOptions,
    machine: Machine,
    overwrite: bool = False,
) -> None:
    """Take a share of an evaluation that another process leads with `evaluate_into`, and write nothing.

    The arguments are those of `evaluate_into`.

    Raises:
        LapcliError: see `lapcli.evaluation.run.evaluate`.
    """
    evaluate(
        models,
        tasks,
        settings,
        options=options,
        earlier=None if overwrite else KeptScores(output, read_evaluation(output)),
        require_fast=machine.require_fast,
        **_where(machine, models),
    )


def _where(machine: Machine, models: Sequence[tuple[str, ModelSource]]) -> dict[str, Any]:
    """What `lapcli.evaluation.run` is told of the machine; all models run in the base's dtype."""
    return {
        "device": machine.torch_device(),
        "dtype": machine.torch_dtype(models[0][1].config),
        "kernel": machine.kernel,
        "trust_remote_code": machine.trust_remote_code,
    }


def _by_label(evaluation: Evaluation) -> dict[str, Any]:
    """What an evaluation says, in whatever order its models are."""
    document = evaluation.to_json()
    return {"versions": document["versions"], **{model["label"]: model for model in document["models"]}}


def _there(output: Path, overwrite: bool, reporter: Reporter) -> Evaluation | None:
    """The evaluation that is there; a damaged one gives way when told, and a copy of it stays."""
    try:
        return read_evaluation(output)
    except ArtifactError:
        if not overwrite:
            raise
        set_aside(output)
        reporter.notice(f"{output} is damaged and is written anew; a copy of it is {previous(output)}")
        return None
