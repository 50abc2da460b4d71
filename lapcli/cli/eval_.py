"""`lapcli eval`: measure models on tasks, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.cli import options
from lapcli.cli.processes import check_processes, in_several
from lapcli.parallel import jointly, processes
from lapcli.pipeline import stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lapcli.artifacts import RunDirectory
    from lapcli.evaluation.checks import Check
    from lapcli.evaluation.results import Evaluation
    from lapcli.evaluation.tasks import TaskInfo
    from lapcli.families.source import ModelSource


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval", help=stage("eval").summary)(jointly(run))


def run(
    tasks: Annotated[list[str], typer.Argument(help="Task names (`lapcli list tasks`), text:PATH, or lm-eval's own.")],
    model: Annotated[str | None, typer.Option(help="The model. Default: the run's sliced (and recovered) one.")] = None,
    baseline: options.Baseline = None,
    task_data: Annotated[
        Path | None, typer.Option(help="Folder with local copies of task data; what lies there is not fetched.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Items of each task. Default: all; NIAH and RULER: 25 a length.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a window. Default: 2048, or what the model takes.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens that each window scores anew. Default: all of them.")
    ] = None,
    niah_lengths: Annotated[str, typer.Option(help="Prompt lengths of niah, in tokens.")] = "512,1024,2048",
    ruler_lengths: Annotated[
        str | None,
        typer.Option(help="Prompt lengths of RULER's tasks, in tokens. Default: 1024,2048,4096, as the model takes."),
    ] = None,
    niah_haystack: Annotated[
        Path | None, typer.Option(help="Text or JSONL to hide needles in. Default: held-out builtin text.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="EXPR",
            help='Exit with code 3 if so of the last model: "wikitext.word_perplexity > 1.1x" (times the base\'s), '
            '"zeroshot.mean < 0.45". May be repeated.',
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a forward pass; changes no result.")] = None,
    bos: Annotated[
        str, typer.Option(help="Begin prompts with BOS: auto (as the tokenizer does), always, never.")
    ] = "auto",
    compat: options.Compat = None,
    seed: options.Seed = 0,
    gpus: options.Gpus = None,
    run_path: options.Run = options.DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.Kernel = "auto",
    require_fast: options.RequireFast = False,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again what was measured already.")] = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write `RUN/evaluation.json` and print a table of the models, their differences and standard errors."""
    from lapcli.cli import context, display
    from lapcli.evaluation.checks import parse_check
    from lapcli.evaluation.names import check_spelling
    from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
    from lapcli.evaluation.tasks import parse_tasks

    directory = context.run_directory(run_path)
    settings = EvaluationSettings(
        max_length=max_length,
        stride=stride,
        bos=bos,  # pyright: ignore[reportArgumentType] -- checked there
        limit=limit,
        niah_lengths=tuple(context.whole_numbers("niah-lengths", niah_lengths)),
        niah_haystack=niah_haystack,
        ruler_lengths=None if ruler_lengths is None else tuple(context.whole_numbers("ruler-lengths", ruler_lengths)),
        seed=seed,
    )
    ours = processes()
    chosen_options = EvaluationOptions(task_data=task_data, batch_size=batch_size, processes=ours)
    checks = [parse_check(text) for text in fail_if or ()]
    infos = parse_tasks(tasks)
    check_spelling(infos)
    models = _compatible(_models(model, baseline, directory), compat)
    if checks:
        _check_checks(checks, infos, len(models))

    from lapcli.machine import Machine
    from lapcli.stages.evaluation import evaluate_into, help_evaluate, plan_stage

    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    check_processes(gpus, device)
    plan = plan_stage(
        directory.evaluation, models, tasks, settings,
        options=chosen_options, machine=machine, overwrite=overwrite, dry_run=dry_run,
    )  # fmt: skip
    if dry_run:
        display.would_do(
            {
                "models": {label: source.name for label, source in models},
                "measures": {label: [info.name for info in plan.missing(label)] or None for label, _ in models},
                "has already": {label: plan.there(label) or None for label, _ in models},
                "data from the hub": list(plan.fetched) or None,
                "lengths": list(plan.remarks) or None,
                "writes": str(directory.evaluation),
            },
            as_json,
        )
        return
    if any(plan.missing(label) for label, _ in models) and in_several(gpus):
        return
    # All have read what is there before any is done with a task, which takes all of them.
    ours.wait()
    if not ours.leader:
        help_evaluate(
            directory.evaluation, models, tasks, settings, options=chosen_options, machine=machine, overwrite=overwrite
        )
        return
    reporter = display.DisplayReporter(quiet)
    with directory.lock():
        evaluation, worked = evaluate_into(
            directory.evaluation,
            models,
            tasks,
            settings,
            options=chosen_options,
            machine=machine,
            overwrite=overwrite,
            reporter=reporter,
        )
    if as_json:
        display.emit(evaluation.to_json())
    else:
        display.evaluation(evaluation, quiet=quiet)
    done = "evaluated" if worked else "nothing to do, all of it was measured already"
    display.closing(f"{done}: {directory.evaluation}", quiet=quiet)
    _raise_failures(evaluation, checks, plan.lengths)


def _check_checks(checks: "list[Check]", infos: "list[TaskInfo]", models: int) -> None:
    from lapcli.evaluation.checks import check_checks
    from lapcli.evaluation.harness import metrics_of

    check_checks(checks, infos, models=models, metrics_of=metrics_of)


def _raise_failures(evaluation: "Evaluation", checks: "list[Check]", lengths: "Mapping[str, Sequence[int]]") -> None:
    from lapcli.errors import CheckFailed
    from lapcli.evaluation.checks import failures

    found = failures(evaluation, checks, lengths)
    if found:
        raise CheckFailed("\n".join(found), "the results are written; they fail what --fail-if says")


def _compatible(models: "list[tuple[str, ModelSource]]", compat: str | None) -> "list[tuple[str, ModelSource]]":
    """The models, those that are a Q-Delta to be run as `compat` says; the last has to be one."""
    from lapcli.families.source import with_compat

    checked = with_compat(models[-1][1], compat)
    others = [
        (label, with_compat(source, compat if source.config.get("model_type") == "qdelta" else None))
        for label, source in models[:-1]
    ]
    return [*others, (models[-1][0], checked)]


def _models(model: str | None, baseline: str | None, run: "RunDirectory") -> "list[tuple[str, ModelSource]]":
    """The models to evaluate, the base of the differences first."""
    from lapcli.cli import context
    from lapcli.errors import ArtifactError

    if model is not None:
        return context.named_models(model, baseline)
    if run.read_record() is None:
        raise ArtifactError(
            f"there is no run in {run.path} and no --model was given",
            "make a run with `lapcli prune --ratio 0.5`, or name a model with --model",
        )
    from lapcli.stages.evaluation import models_of

    chosen = models_of(run, context.base_model(baseline, run))
    if len(chosen) == 1:
        raise ArtifactError(
            f"there is no sliced model in {run.path} to compare with its base",
            f"make one with `lapcli slice --run {run.path}`, or measure one model alone with --model",
        )
    return chosen
