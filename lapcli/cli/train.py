"""`lapcli train`: train a model of one's own from a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.cli.processes import check_processes, in_several
from lapcli.parallel import jointly, processes

if TYPE_CHECKING:
    from lapcli.machine import Machine
    from lapcli.stages.pretraining import TrainingPlan, TrainingRequest
    from lapcli.training.engine import Execution
    from lapcli.training_recipe import PretrainingSettings

SUMMARY = "Train a model of one's own, or train one on, from a recipe: the whole model, on streamed text."
DEFAULT_RUN = Path("lapcli-train")

_METHOD = "What the numbers depend on, instead of the recipe's"
_MACHINE = "This machine"
_NAMES = {"base": "from"}
"""Options that are not called as the settings are."""


def _option(text: str, *names: str, panel: str = _METHOD, least: int | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, min=least)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train", help=SUMMARY)(jointly(run))


def run(
    recipe: Annotated[
        Path, typer.Argument(help="A YAML file, or the name of one that ships (`lapcli list recipes`, train/...).")
    ],
    base: Annotated[
        str | None, _option("A model to train on from: a directory, a hub id, demo:NAME.", "--from")
    ] = None,
    tokenizer: Annotated[str | None, _option("Whose tokenizer: a directory, a hub id, demo:NAME.")] = None,
    data: Annotated[
        str | None,
        _option(
            "Text: builtin, recall, a text/JSONL/parquet file or folder, a hub set (fineweb, wikitext, pg19, pile), or "
            "a mixture a:0.9,b:0.1."
        ),
    ] = None,
    tokens: Annotated[int | None, _option("Tokens of all steps together.")] = None,
    steps: Annotated[int | None, _option("Optimiser steps, instead of --tokens.")] = None,
    batch_tokens: Annotated[int | None, _option("Tokens of a step, over all GPUs.")] = None,
    seq_len: Annotated[int | None, _option("Tokens a sequence.")] = None,
    lr: Annotated[float | None, _option("Largest learning rate; the last becomes a tenth of it.")] = None,
    optimizer: Annotated[str | None, _option("adamw, or muon: of hidden matrices, with adamw for all else.")] = None,
    validation: Annotated[int | None, _option("Sequences held out for validation.")] = None,
    seed: Annotated[int | None, _option("Of the first weights, of the order of text, and of recall.")] = None,
    gpus: options.Gpus = None,
    sharding: Annotated[
        str, _option("How several GPUs hold the model: none (DDP, each whole), fsdp (each a share).", panel=_MACHINE)
    ] = "none",
    micro_batch: options.MicroBatch = None,
    gradient_checkpointing: options.GradientCheckpointing = False,
    compile_: Annotated[
        bool,
        _option(
            "Compile the blocks (torch.compile); the recipe's documents must be joined.", "--compile", panel=_MACHINE
        ),
    ] = False,
    validate_every: options.ValidateEvery = 100,
    save_every: options.SaveEvery = 500,
    tracker: options.Trackers = None,
    restart: Annotated[
        bool, _option("Throw an earlier training of the run away and begin anew.", "--restart", panel="Output")
    ] = False,
    run_path: Annotated[
        Path, typer.Option("--run", help="Run directory: the model is left in RUN/trained, the rest in RUN/training.")
    ] = DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: Annotated[
        str, _option("Of products: auto (bf16 on a GPU), bfloat16, float32. Weights stay fp32.", panel=_MACHINE)
    ] = "auto",
    kernel: options.Kernel = "auto",
    require_fast: options.RequireFast = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Leave a model directory in `RUN/trained`, and curve and checkpoints in `RUN/training`."""
    from lapcli.cli import context, display
    from lapcli.errors import CheckFailed, UsageError
    from lapcli.shipped import find_recipe

    options.check_sharding(sharding)
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError(f"--dtype {dtype!r} is none of auto, float32, bfloat16")
    given = {
        "base": base, "tokenizer": tokenizer, "data": data, "tokens": tokens, "steps": steps,
        "batch_tokens": batch_tokens, "seq_len": seq_len, "lr": lr, "optimizer": optimizer, "validation": validation,
        "seed": seed,
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = _settings(find_recipe(recipe), chosen)
    if compile_ and settings.documents != "joined":
        raise UsageError(
            "--compile takes rows of one length without boundaries, and the recipe keeps documents apart",
            "set `documents: joined` in the recipe, or leave --compile out",
        )
    if tracker:
        from lapcli.training.trackers import check_trackers

        check_trackers(tracker)

    from lapcli.machine import Machine
    from lapcli.stages.pretraining import plan_training, request_training, train_into
    from lapcli.stages.recovery import micro_batch as default_micro_batch
    from lapcli.training.engine import Execution

    directory = context.run_directory(run_path)
    machine = Machine(device, dtype, kernel, require_fast)
    batch = settings.training().batch
    check_processes(gpus, device, batch, option="a step's sequences: batch_tokens / seq_len =")
    request = request_training(settings)
    half = _half(machine)
    machine.check(
        {**request.config.to_dict(), "dtype": "bfloat16" if half else "float32"}, request.layers, needs_gradient=True
    )
    execution = Execution(
        micro_batch=min(micro_batch or default_micro_batch(settings.seq_len), batch),
        gradient_checkpointing=gradient_checkpointing,
        autocast=half,
        validate_every=validate_every,
        save_every=save_every,
        sharding=sharding,  # pyright: ignore[reportArgumentType] -- checked above
        compile=compile_,
    )
    reporter = display.DisplayReporter(quiet)
    ours = processes()
    plan = plan_training(
        request, directory,
        execution=execution, half=half, restart=restart, processes=ours, devices=gpus or ours.size, reporter=reporter,
    )  # fmt: skip
    if dry_run:
        _would_do(plan, execution, as_json)
        return
    if plan.finished is None and in_several(gpus):
        return
    options_of_stage: dict[str, Any] = {
        "machine": machine, "execution": execution, "trackers": tracker or (), "reporter": reporter, "processes": ours,
    }  # fmt: skip
    ours.wait()
    if not ours.leader:
        train_into(plan, directory, **options_of_stage)
        return
    with directory.lock():
        result = train_into(plan, directory, **options_of_stage)
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
    done = "trained" if result.worked else "nothing to do, it is there already"
    display.closing(f"{done}: {result.output}\nnext: lapcli eval builtin niah --model {result.output}", quiet=quiet)


def _settings(path: Path, chosen: dict[str, Any]) -> "PretrainingSettings":
    """The recipe's settings, those that were chosen first.

    Raises:
        RecipeError: it is none, or what it says does not fit.
        UsageError: an option does not.
    """
    from lapcli.errors import UsageError
    from lapcli.recipe import SettingsError
    from lapcli.training_recipe import read_training_recipe

    if "tokens" in chosen and "steps" in chosen:
        raise UsageError("give either --tokens or --steps")
    try:
        return read_training_recipe(path, **chosen)
    except SettingsError as error:
        (name, *others) = error.fields or ("",)
        if others or name not in chosen:
            raise
        option = _NAMES.get(name, name).replace("_", "-")
        raise UsageError(f"--{option}: {error.complaint}", error.hint) from error


def _half(machine: "Machine") -> bool:
    """Whether products are in bf16.

    Raises:
        UsageError: they are asked for where there is no GPU.
    """
    from lapcli.errors import UsageError

    on_gpu = machine.torch_device().type == "cuda"
    if machine.dtype == "bfloat16" and not on_gpu:
        raise UsageError("--dtype bfloat16: on a CPU training is in float32", "leave --dtype out")
    return on_gpu and machine.dtype != "float32"


def _would_do(plan: "TrainingPlan", execution: "Execution", as_json: bool) -> None:
    from lapcli.cli import display

    request = plan.request
    settings, training = request.settings, request.settings.training()
    if as_json:
        display.emit({"dry_run": True, **plan.document(), "settings": settings.document()})
        return
    costs = plan.costs
    facts = {
        "trains": _begins(request),
        "parameters": f"{request.whole.trained:,}, all of them trained",
        "state of a sequence": f"{display.size(costs.state_bytes)} in fp32, {len(request.layers)} layers",
        "tokenizer": f"that of {request.tokenizer.name}",
        "text": f"{settings.data}, documents {settings.documents}, {training.validation} sequences held out",
        "budget": f"{training.steps} steps of {training.batch} x {settings.seq_len} = {settings.seen:,} tokens",
        "optimizer": {"adamw": "AdamW", "muon": "Muon of the blocks' matrices, AdamW of all else"}[training.optimizer],
        "rate": f"{training.lr:g} after {training.warmup:.2%} of the steps, {training.lr_min:g} at the end",
        "costs": f"about {costs.operations:.2g} floating-point operations",
        "memory": f"{display.size(costs.held_bytes)} for weights, gradients and moments, and about "
        f"{display.size(costs.passing_bytes)} in a step of {execution.micro_batch} sequences at once, a device",
        "goes on": "it is there already"
        if plan.finished is not None
        else "begins anew"
        if plan.resumes_after is None
        else f"after step {plan.resumes_after}",
        "writes": f"{plan.folder}/, {plan.output}/",
    }
    display.facts("would do (nothing was done)", facts)


def _begins(request: "TrainingRequest") -> str:
    settings = request.settings
    if request.base is not None:
        return f"{request.base.name} ({request.base.digest[:12]}), on from where it is"
    return f"a fresh {request.config.model_type}, weights from seed {settings.seed} ({settings.start})"


def _show(record: dict[str, Any]) -> None:
    from math import exp

    from lapcli.cli import display

    before, after = record["before"], record["after"]
    if before is None or after is None:
        return
    entropies = [before["cross_entropy"], after["cross_entropy"]]
    rows = [
        ["cross entropy", *(f"{value:.4f}" for value in entropies)],
        ["perplexity", *(f"{exp(min(value, 700)):.4g}" for value in entropies)],
    ]
    display.table(f"held-out text, after {record['tokens']:,} tokens", ["a token", "before", "after"], rows)
