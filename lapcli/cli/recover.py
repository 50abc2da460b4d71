"""`lapcli recover`: heal a pruned model by LoRA and distillation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.cli.processes import check_processes, in_several
from lapcli.parallel import jointly, processes
from lapcli.pipeline import stage

if TYPE_CHECKING:
    from lapcli.artifacts import RunDirectory
    from lapcli.families.source import ModelSource
    from lapcli.recipe import RecoverySettings
    from lapcli.reporting import Reporter
    from lapcli.stages.query_feedback import FeedbackPlan
    from lapcli.stages.recovery import RecoveryPlan
    from lapcli.training.adapters import AdapterPlan

_METHOD = "What the numbers depend on"
_MACHINE = "This machine"


_NAMES = {"batch": "batch-size", "rank": "lora-rank", "alpha": "lora-alpha", "targets": "lora-target"}
"""Options that are not called as the settings are."""


def _option(text: str, *names: str, panel: str = _METHOD, least: int | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, min=least)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("recover", help=stage("recover").summary)(jointly(run))


def run(
    model: Annotated[str | None, typer.Option(help="The model to train. Default: the run's sliced one.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The model it learns from. Default: the one it was pruned from.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Take the settings of a recipe's `recovery`; options given here go first.")
    ] = None,
    data: options.Data = None,
    samples: Annotated[
        int | None, _option("Sequences of all steps together. Default: 32000 (demo models: 512), unless --steps.")
    ] = None,
    steps: Annotated[int | None, _option("Optimiser steps, instead of --samples.")] = None,
    batch_size: Annotated[
        int | None, _option("Sequences of a step, over all GPUs. Default: 16 (demo models: 8).")
    ] = None,
    seq_len: Annotated[int | None, _option("Tokens a sequence. Default: 2048 (demo models: 512).")] = None,
    lr: Annotated[float | None, _option("Largest learning rate. Default: 1e-4 (demo models: 2e-3).")] = None,
    lr_min: Annotated[float | None, _option("Last learning rate. Default: a tenth of --lr.")] = None,
    warmup: Annotated[float | None, _option("Share of the steps in which the rate rises. Default: 0.05.")] = None,
    weight_decay: Annotated[float | None, _option("Of AdamW. Default: 0.")] = None,
    kl_weight: Annotated[
        float | None, _option("w in cross entropy + w T^2 KL; 0: no teacher is loaded. Default: 1.")
    ] = None,
    temperature: Annotated[float | None, _option("T in it. Default: 2.")] = None,
    lora_rank: Annotated[
        int | None, _option("Rank of the LoRA matrices. Default: 32, or what the narrowest projection takes.")
    ] = None,
    lora_alpha: Annotated[
        int | None, _option("LoRA's product counts alpha / rank times. Default: 64, or twice a lower rank.")
    ] = None,
    lora_target: Annotated[
        list[str] | None,
        _option("Modules that get LoRA, by (the end of) their names: a,b, or given often. Default: those of q, k, v."),
    ] = None,
    full: Annotated[bool, _option("Train the mixers whole, without LoRA.", "--full")] = False,
    add_query_feedback: Annotated[
        bool,
        _option(
            "Make a Gated DeltaNet a Q-Delta first (RUN/converted), whose feedback begins at 0 and is trained in full.",
            "--add-query-feedback",
        ),
    ] = False,
    lambda_init: Annotated[
        float | None, _option("With --add-query-feedback: what the feedback begins at instead, in (0, 1).")
    ] = None,
    control: Annotated[
        bool, _option("Train the unpruned model by the same budget, into RUN/control.", "--control")
    ] = False,
    validation: Annotated[int | None, _option("Sequences held out for validation. Default: 64.")] = None,
    seed: Annotated[int | None, _option("Of LoRA's first values, of the order of text, and of recall.")] = None,
    gpus: options.Gpus = None,
    sharding: Annotated[
        str, _option("How several GPUs hold the models: none (DDP, each whole), fsdp (each a share).", panel=_MACHINE)
    ] = "none",
    micro_batch: options.MicroBatch = None,
    gradient_checkpointing: options.GradientCheckpointing = False,
    validate_every: options.ValidateEvery = 100,
    save_every: options.SaveEvery = 100,
    teacher_device: Annotated[
        str | None, _option("Where the teacher lies. Default: beside the student.", panel=_MACHINE)
    ] = None,
    tracker: options.Trackers = None,
    restart: Annotated[
        bool, _option("Throw an earlier recovery of the run away and begin anew.", "--restart", panel="Output")
    ] = False,
    run_path: options.Run = options.DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.Kernel = "auto",
    require_fast: options.RequireFast = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Leave a merged model in `RUN/recovered`, and adapter, curve and checkpoints in `RUN/recovery`."""
    from lapcli.cli import context, display
    from lapcli.errors import CheckFailed, UsageError
    from lapcli.families.source import resolve_model

    options.check_sharding(sharding)
    for option, value in (("--lora-rank", lora_rank), ("--lora-alpha", lora_alpha)):
        if full and value is not None:
            raise UsageError(f"{option} beside --full, which trains the mixers whole, without LoRA", "drop one of them")
    given = {
        "data": data, "samples": samples, "steps": steps, "batch": batch_size, "seq_len": seq_len, "lr": lr,
        "lr_min": lr_min, "warmup": warmup, "weight_decay": weight_decay, "kl_weight": kl_weight,
        "temperature": temperature, "rank": lora_rank, "alpha": lora_alpha, "targets": _names(lora_target),
        "full": full or None, "control": control or None, "validation": validation, "seed": seed,
        "add_query_feedback": add_query_feedback or None, "lambda_init": lambda_init,
    }  # fmt: skip
    if tracker:
        from lapcli.training.trackers import check_trackers

        check_trackers(tracker)
    directory = context.run_directory(run_path)
    settings, student, guide = _request(directory, model, teacher, recipe, given)

    from lapcli.machine import Machine
    from lapcli.stages.query_feedback import plan_feedback
    from lapcli.stages.recovery import plan_recovery, recover_into

    feedback = plan_feedback(student, settings, directory)

    reporter = display.DisplayReporter(quiet)
    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    check_processes(gpus, device, settings.batch)
    _check_machine(student, guide, machine, teacher_device, sharding)
    ours = processes()
    plan_of_stage: dict[str, Any] = {"trust_remote_code": trust_remote_code, "processes": ours}
    plan = None
    if feedback is not None and not dry_run and ours.leader and feedback.interrupted():
        with directory.lock():
            feedback.undo()
    if feedback is not None and (dry_run or not feedback.there()):
        # What can be refused is refused before a conversion is written, let alone one replaced.
        stand_in, anew = feedback.stand_in(student, restart=restart)
        plan = plan_recovery(
            stand_in, guide, settings, directory, restart=anew, reporter=reporter if dry_run else None, **plan_of_stage
        )
    if feedback is not None and not dry_run:
        if ours.leader:
            with directory.lock():
                _convert(feedback, restart, reporter)
        # All others wait for the one that writes.
        ours.wait()
        student = resolve_model(str(feedback.place))
    if plan is None or not dry_run:
        plan = plan_recovery(student, guide, settings, directory, restart=restart, reporter=reporter, **plan_of_stage)
    if dry_run:
        _would_do(plan, feedback, as_json)
        return
    if plan.finished is None and in_several(gpus):
        return
    if plan.finished is None and ours.leader:
        reporter.notice(f"LoRA: {_lora_in_words(plan.adapters)}")

    from lapcli.stages.recovery import micro_batch as default_micro_batch
    from lapcli.stages.recovery import note_recovery
    from lapcli.training.engine import Execution

    execution = Execution(
        micro_batch=micro_batch or default_micro_batch(settings.seq_len),
        gradient_checkpointing=gradient_checkpointing,
        validate_every=validate_every,
        save_every=save_every,
        sharding=sharding,  # pyright: ignore[reportArgumentType] -- checked above
    )
    options_of_stage: dict[str, Any] = {
        "machine": machine, "teacher_device": teacher_device, "execution": execution, "trackers": tracker or (),
        "reporter": reporter, "processes": ours, "beside": () if feedback is None else (feedback.place,),
    }  # fmt: skip
    ours.wait()
    if not ours.leader:
        recover_into(plan, directory, **options_of_stage)
        return
    with directory.lock():
        result = recover_into(plan, directory, **options_of_stage)
        note_recovery(plan, directory)
    if as_json:
        display.emit(result.document())
    elif not quiet:
        _show(result.record)
    if result.record["stopped"]:
        raise CheckFailed(
            f"training stopped early: {result.record['stopped']}; {result.output} has the parameters of step "
            f"{result.record['step']}",
            "pass a lower --lr, and --restart",
        )
    made = "trained alike" if settings.control else "recovered"
    done = made if result.worked else "nothing to do, it is there already"
    tasks = "builtin niah"
    display.closing(
        f"{done}: {result.output}{context.loading(result.output)}\n"
        f"next: lapcli eval {tasks}{options.run_flag(run_path)}",
        quiet=quiet,
    )


def _names(given: list[str] | None) -> list[str] | None:
    """Modules' names, which hold no comma, of an option that may be given often."""
    return [name.strip() for each in given or () for name in each.split(",") if name.strip()] or None


def _convert(feedback: "FeedbackPlan", restart: bool, reporter: "Reporter") -> None:
    if restart:
        feedback.write_anew(reporter=reporter)
    else:
        feedback.write(reporter=reporter)


def _request(
    run: "RunDirectory", model: str | None, teacher: str | None, recipe: Path | None, given: dict[str, Any]
) -> "tuple[RecoverySettings, ModelSource, ModelSource | None]":
    """The settings, the model to train and its teacher."""
    from lapcli.cli import context
    from lapcli.errors import ArtifactError, RecipeError, UsageError
    from lapcli.families.source import resolve_model
    from lapcli.recipe import RecoverySettings, default_recovery, read_recipe
    from lapcli.shipped import find_recipe
    from lapcli.stages.lineage import made_of_a_demo
    from lapcli.stages.recovery import teacher_of

    base: dict[str, Any] | None = None
    if recipe is not None:
        path = find_recipe(recipe)
        found = read_recipe(path).recovery
        if found is None:
            raise RecipeError(f"{path} has no `recovery`", "add one, or give the settings as options")
        base = found.model_dump(exclude_unset=True)
    chosen = (base or {}) | {name: value for name, value in given.items() if value is not None}
    if chosen.get("control") and model is None:
        if run.read_record() is None:
            raise ArtifactError(
                f"there is no run in {run.path} whose base a control could be", "name the unpruned model with --model"
            )
        student = context.base_model(None, run)
    elif model is not None:
        student = resolve_model(model)
    elif run.sliced.is_dir():
        student = resolve_model(str(run.sliced))
    else:
        raise ArtifactError(
            f"there is no sliced model in {run.path}",
            "make one with `lapcli prune --ratio 0.5`, or name a model with --model",
        )
    guide = None
    if chosen.get("kl_weight") != 0:
        if teacher is not None:
            guide = resolve_model(teacher)
        else:
            guide = student if chosen.get("control") else teacher_of(student)
    # A recipe means the same to `lapcli run`: what it does not say is what the settings say, not the model.
    defaults = {} if base is not None else default_recovery(made_of_a_demo(student))
    if chosen.get("steps") is not None and given["samples"] is None:
        for ours in (defaults, chosen):
            ours.pop("samples", None)
    elif given["samples"] is not None and given["steps"] is None:
        chosen.pop("steps", None)
    if "lambda_init" in chosen and not chosen.get("add_query_feedback"):
        raise UsageError("--lambda-init is about --add-query-feedback, which was not given", "give both or neither")
    if given["lr"] is not None and "lr_min" not in chosen:
        chosen["lr_min"] = chosen["lr"] / 10
    return context.from_command_line(RecoverySettings, defaults | chosen, _NAMES), student, guide


def _check_machine(
    student: "ModelSource", teacher: "ModelSource | None", machine: Any, teacher_device: str | None, sharding: str
) -> None:
    """Refuse what cannot run here."""
    from dataclasses import replace

    from lapcli.errors import UsageError
    from lapcli.families.registry import family_for

    layers = family_for(student.config).layers(student.config)
    machine.check(student.config, layers, needs_gradient=True)
    if teacher_device is not None and teacher is not None:
        if sharding == "fsdp":
            raise UsageError("--teacher-device: with --sharding fsdp the teacher is spread as the student is")
        try:
            replace(machine, device=teacher_device).check(teacher.config)
        except UsageError as error:
            raise UsageError(error.message.replace("--device", "--teacher-device"), error.hint) from error


def _would_do(plan: "RecoveryPlan", feedback: "FeedbackPlan | None", as_json: bool) -> None:
    from lapcli.cli import display

    document, converts = plan.document(), {}
    if feedback is not None and feedback.there():
        # Then it is what the plan is of.
        feedback = None
    if feedback is not None:
        # Planned with the model before conversion: what is added is trained beside it.
        converts = {"converts": feedback.document()}
    if as_json:
        display.emit({"dry_run": True, **converts, **document, "settings": plan.settings.document()})
        return
    if feedback is not None:
        added = feedback.plan.parameters
        display.facts(
            "would convert first (nothing was done)",
            {
                "makes": f"a Q-Delta of {plan.student.name}, in {feedback.place}/",
                "computes": feedback.plan.document()["computes"],
                "trained beside what follows": f"{added:,} numbers of query feedback, in full",
            },
        )
    training = plan.settings.training()
    share = plan.adapters.trained / max(plan.parameters, 1)
    facts = {
        "trains": f"{plan.student.name} ({plan.student.digest[:12]})",
        "teacher": "none" if plan.teacher is None else f"{plan.teacher.name} ({plan.teacher.digest[:12]})",
        "stateful layers": len(plan.adapters.layers),
        "LoRA": _lora_in_words(plan.adapters),
        "trained": f"{plan.adapters.trained:,} of {plan.parameters:,} numbers ({share:.1%})",
        "text": f"{plan.settings.data}, {training.steps} steps of {training.batch} x {plan.settings.seq_len} = "
        f"{plan.settings.tokens:,} tokens",
        "costs": f"about {plan.operations:.2g} floating-point operations",
        "goes on": _goes_on(plan),
        "writes": f"{plan.folder}/, {plan.output}/",
    }
    display.facts("would do (nothing was done)", facts)


def _lora_in_words(adapters: "AdapterPlan") -> str:
    """Which modules were matched in which layers; layers alike together."""
    from lapcli.cli.plan import ranges

    if not adapters.lora:
        return "none: mixers are trained whole"
    alike: dict[tuple[str, ...], list[int]] = {}
    for layer in adapters.layers:
        alike.setdefault(tuple(name.removeprefix(f"{layer.mixer}.") for name in layer.lora), []).append(layer.index)
    return "; ".join(f"{', '.join(names)} in layers {ranges(numbers)}" for names, numbers in alike.items())


def _goes_on(plan: "RecoveryPlan") -> str:
    if plan.finished is not None:
        lost = f", and gets back {', '.join(plan.lost)}" if plan.lost else ""
        return f"it is there already{lost}"
    return "begins anew" if plan.resumes_after is None else f"after step {plan.resumes_after}"


def _show(record: dict[str, Any]) -> None:
    from lapcli.cli import display

    before, after = record["before"], record["after"]
    if before is None or after is None:
        return
    rows = [
        [name, f"{before[key]:.4f}", f"{after[key]:.4f}"]
        for name, key in (("loss", "loss"), ("cross entropy", "cross_entropy"), ("KL", "kl"))
    ]
    display.table(f"held-out text, after {record['tokens']:,} tokens", ["mean per token", "before", "after"], rows)
