"""Training of whole models from a recipe: model directory, curve, card; the engine is recovery's.

Source: the settings of arXiv 2606.08804 and arXiv 2602.04852 are in `recipes/train`.
"""

import contextlib
import gc
import json
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import (
    CURVE_FILE,
    TRAINING_FILE,
    Lineage,
    RunDirectory,
    atomic_directory,
    digest_document,
    read_document,
    write_document,
)
from lapcli.data import check_source, fingerprint, parse_mixture
from lapcli.errors import ArtifactError, DataError, LapcliError, ModelError, RecipeError
from lapcli.families.base import StatefulLayer
from lapcli.families.loading import Weights, load_tokenizer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource, refuse_quantised, resolve_model, resolve_tokenizer, tokenizer_files
from lapcli.machine import Machine
from lapcli.parallel import ALONE, Processes
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.calibration import check_length
from lapcli.stages.giving_way import bring_back, check_ours, forget_aside, left_before, set_aside
from lapcli.stages.lineage import LINEAGE_FILE, OWN_DIGEST
from lapcli.training.adapters import trained_state
from lapcli.training.card import training_card
from lapcli.training.checkpoints import KIND as CHECKPOINT
from lapcli.training.checkpoints import Checkpoint, Checkpoints, latest_step
from lapcli.training.costs import Costs, costs_of
from lapcli.training.curve import Curve
from lapcli.training.engine import CHECKPOINTS, Execution, StepDone, TrainingEnd, train
from lapcli.training.fresh import (
    WholePlan,
    bare,
    class_of,
    fresh_config,
    fresh_model,
    to_train_on,
    train_whole,
)
from lapcli.training.picture import draw_curve
from lapcli.training.reload import Restored, check_trained
from lapcli.training.stability import Watching
from lapcli.training.stream import TrainingStream
from lapcli.training.trackers import TRACKERS, open_tracker
from lapcli.training.vocabulary import compare_vocabularies
from lapcli.training_recipe import PretrainingSettings
from lapkernels.delta_rule import Choice, select_impl, why_not

KIND = "training"
PICTURE = "curve.png"
CARD = "README.md"

_MEND = "pass --restart to begin anew, or --run DIR to keep both"
_CHECKED_TOKENS = 256
_OURS = frozenset({CHECKPOINTS, CURVE_FILE, TRAINING_FILE, PICTURE, LINEAGE_FILE, *TRACKERS})


@dataclass(frozen=True)
class TrainingRequest:
    """A recipe, looked up: which model, which tokenizer.

    Attributes:
        settings: of the training.
        config: of the model, as a config of transformers.
        base: the model to train on from, or `None` for a fresh one.
        tokenizer: its folder, as if the model lay there.
        layers: the stateful layers.
        whole: what is trained: everything.
    """

    settings: PretrainingSettings
    config: Any
    base: ModelSource | None
    tokenizer: ModelSource
    layers: tuple[StatefulLayer, ...]
    whole: WholePlan

    @property
    def name(self) -> str:
        """What the model is called."""
        return str(self.config.model_type) if self.base is None else self.base.name

    def describe(self) -> dict[str, Any]:
        """Name, revision and digest of what the training begins with, as lineages record a model."""
        if self.base is not None:
            return self.base.describe()
        return {"name": self.name, "revision": None, "digest": digest_document(_plain(self.config))}

    def lineage(self) -> Lineage:
        """What the training is known by: model, settings, tokenizer, and the text as it is now."""
        return Lineage(
            kind=KIND,
            model=self.describe(),
            family=family_for(_plain(self.config)).name,
            settings=self.settings.document(),
            parents={"tokenizer": self.tokenizer.tokenizer_digest, **fingerprint(self.settings.data)},
        )

    def checkpoint_lineage(self) -> Lineage:
        """What its checkpoints are known by. The text, the tokenizer and the sequences are checked by the stream."""
        return Lineage(
            kind=CHECKPOINT,
            model=self.describe(),
            family=family_for(_plain(self.config)).name,
            settings={
                **self.settings.training().document(),
                "start": self.settings.start,
                "parameters": digest_document(sorted((name, list(shape)) for name, shape in self.whole.shapes.items())),
            },
        )


@dataclass(frozen=True)
class TrainingPlan:
    """What a training will do.

    Attributes:
        request: what is asked for.
        folder: where checkpoints and curve lie.
        output: the model's directory.
        costs: of it.
        resumes_after: the step after which it goes on, or `None`.
        finished: what came of it, where it is there already.
        restart: whether an earlier training is thrown away.
    """

    request: TrainingRequest
    folder: Path
    output: Path
    costs: Costs
    resumes_after: int | None
    finished: Lineage | None
    restart: bool

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        request, settings = self.request, self.request.settings
        return {
            "model": request.name,
            "model_type": request.config.model_type,
            "tokenizer": request.tokenizer.name,
            "data": settings.data,
            "parameters": request.whole.trained,
            "layers": len(request.layers),
            "steps": settings.training().steps,
            "batch_tokens": settings.batch_tokens,
            "tokens": settings.seen,
            **asdict(self.costs),
            "resumes_after": self.resumes_after,
            "finished": self.finished is not None,
            "writes": [str(self.folder), str(self.output)],
        }


@dataclass(frozen=True)
class TrainingResult:
    """What a training left.

    Attributes:
        output: the model's directory.
        record: steps, tokens, seconds, validation before and after, the check of the written model.
        worked: whether anything was done now.
    """

    output: Path
    record: dict[str, Any]
    worked: bool

    def document(self) -> dict[str, Any]:
        """The result, JSON-able."""
        return {"trained": str(self.output), "worked": self.worked, **self.record}


def request_training(settings: PretrainingSettings) -> TrainingRequest:
    """Look a recipe's model and tokenizer up; neither weights nor text are read.

    Raises:
        LapcliError: the model, its config, the tokenizer or the sequences' length do not go together.
    """
    for part in parse_mixture(settings.data):
        check_source(part.name)
    if settings.base is not None:
        base = resolve_model(settings.base)
        refuse_quantised(base.config, base.name)
        assert base.headers  # raises where there are no safetensors, or damaged ones
        config = class_of(base.config.get("model_type")).config_class.from_pretrained(base.path)
        tokenizer = resolve_tokenizer(settings.tokenizer_name, base.config)
        load_tokenizer(tokenizer)
        check_length(base, settings.seq_len)
    else:
        base, asked = None, settings.model
        assert asked is not None, "either was given"
        class_of(asked.get("model_type"))
        tokenizer = resolve_tokenizer(settings.tokenizer_name, {"model_type": asked["model_type"]})
        config = fresh_config(asked, load_tokenizer(tokenizer), settings.seq_len)
        if config.max_position_embeddings < settings.seq_len:
            raise RecipeError(
                f"seq_len {settings.seq_len} is longer than the model's max_position_embeddings "
                f"{config.max_position_embeddings}",
                "leave the latter out, or raise it",
            )
    plain = _plain(config)
    try:
        layers = tuple(family_for(plain).layers(plain))
    except ModelError as error:
        if base is not None:
            raise
        # There is no such file; the fields are the recipe's.
        raise RecipeError(f"model: {error.message.removeprefix('config.json has ')}") from error
    return TrainingRequest(settings, config, base, tokenizer, layers, WholePlan.of(bare(config)))


def plan_training(
    request: TrainingRequest,
    run: RunDirectory,
    *,
    execution: Execution | None = None,
    half: bool = False,
    restart: bool = False,
    processes: Processes = ALONE,
    devices: int = 1,
    reporter: Reporter | None = None,
) -> TrainingPlan:
    """Check a request and say what it means and costs, without reading any weights.

    Args:
        request: of `request_training`.
        run: the run directory.
        execution: how it will run, for the memory it takes.
        half: whether products will be in bf16, likewise.
        restart: whether an earlier training in it gives way.
        processes: those that ask; the leader alone opens the text.
        devices: how many will train, for the memory that each takes.
        reporter: where remarks go; the leader's alone is used.

    Raises:
        LapcliError: whatever `train_into` would refuse and can be known now.
    """
    reporter = reporter if processes.leader and reporter is not None else SilentReporter()
    execution = execution or Execution()
    folder, output = run.training, run.trained
    settings = request.settings
    if settings.optimizer == "muon" and execution.sharding == "fsdp":
        raise RecipeError(
            "optimizer: muon takes matrices whole, and --sharding fsdp gives each device a share of them",
            "leave --sharding out, or set optimizer: adamw in the recipe",
        )
    _refuse_other_run(run)
    there = begun = None
    if not restart:
        there = _finished(request, folder, output, reporter)
        if there is None:
            begun = _begun(request, folder)
    if there is None:
        check_ours(folder, _OURS)
        _check_output(folder, output)
        if processes.leader:
            _compare_vocabularies(request, reporter)
            _stream(request).check(settings.validation)
        if settings.tokens not in (None, settings.seen):
            reporter.notice(
                f"{settings.tokens:,} tokens become {settings.seen:,}, since steps are whole: "
                f"{settings.training().steps} of {settings.batch_tokens:,}"
            )
    costs = costs_of(
        request.config, request.layers, settings.seen,
        seq_len=settings.seq_len, micro_batch=min(execution.micro_batch, settings.training().batch), half=half,
        checkpointing=execution.gradient_checkpointing, shards=devices if execution.sharding == "fsdp" else 1,
        muon=settings.optimizer == "muon",
    )  # fmt: skip
    return TrainingPlan(
        request=request,
        folder=folder,
        output=output,
        costs=costs,
        resumes_after=None if begun is None else begun.step,
        finished=there,
        restart=restart,
    )


def train_into(
    plan: TrainingPlan,
    run: RunDirectory,
    *,
    machine: Machine | None = None,
    execution: Execution | None = None,
    trackers: Sequence[str] = (),
    reporter: Reporter | None = None,
    processes: Processes = ALONE,
) -> TrainingResult:
    """Train, or go on where training was stopped; then write model, card and picture.

    Args:
        plan: of `plan_training`.
        run: the run directory; the leading process holds its lock.
        machine: where it runs.
        execution: how training runs.
        trackers: "tensorboard", "wandb": who else hears of the curve.
        reporter: where progress goes.
        processes: those that train together.

    Raises:
        LapcliError: see `lapcli.training.engine.train`; or the model that was written does not compute what the trained
            one computes.
    """
    machine, reporter = machine or Machine(), reporter or SilentReporter()
    if plan.finished is not None:
        reporter.notice(f"{plan.output} is there already")
        if processes.leader:
            # In case that the process which finished it was killed before it could.
            _settle(plan, run)
        return TrainingResult(plan.output, plan.finished.record, worked=False)
    places = (plan.folder, plan.output) if plan.restart and processes.leader else ()
    if places:
        check_ours(plan.folder, _OURS)
        _check_output(plan.folder, plan.output)
    for place in places:
        set_aside(place)
    processes.wait()
    begun = time.monotonic()
    try:
        trained = _train(plan, machine, execution or Execution(), trackers, reporter, processes)
    except BaseException:
        if not latest_step(plan.folder / CHECKPOINTS):
            # Nothing has taken its place: no text, no room, an interruption before the end of the first step.
            for place in places:
                bring_back(place)
        raise
    ended = trained.ended
    if ended.stopped and ended.step == 0:
        for place in places:
            bring_back(place)
        earlier = ", and the earlier model is in its place again" if any(place.exists() for place in places) else ""
        raise ModelError(
            f"{ended.stopped}; nothing was learned{earlier}", "lower lr in the recipe (or pass --lr), and --restart"
        )
    record: dict[str, Any] = {
        "step": ended.step,
        "tokens": ended.tokens,
        "before": None if ended.first is None else asdict(ended.first),
        "after": None if ended.last is None else asdict(ended.last),
        "stopped": ended.stopped,
        "processes": processes.size,
    }
    if not processes.leader:
        return TrainingResult(plan.output, record, worked=True)
    lines = Curve(plan.folder / CURVE_FILE).lines()
    record["contraction"] = next((line["contraction"] for line in reversed(lines) if "contraction" in line), None)
    record["seconds"] = round(sum(line.get("seconds", 0.0) for line in lines), 1)
    try:
        draw_curve(lines, plan.folder / PICTURE)
    except ImportError:
        reporter.notice(f"{plan.folder / PICTURE} was not drawn: that needs matplotlib")
    record["reloaded"] = asdict(_write(plan, record, trained, machine, reporter))
    record["digest"] = resolve_model(str(plan.output)).digest
    lineage = replace(plan.request.lineage(), record={**record, "wall_seconds": time.monotonic() - begun})
    write_document(plan.folder / TRAINING_FILE, lineage)
    _settle(plan, run)
    return TrainingResult(plan.output, record, worked=True)


def _settle(plan: TrainingPlan, run: RunDirectory) -> None:
    """Make a finished model the run's base, and remove what gave way to it."""
    run.note(_described(plan.output), "train", {"training": plan.request.settings.document()})
    for place in (plan.folder, plan.output):
        forget_aside(place)


def _plain(config: Any) -> dict[str, Any]:
    """A config as `config.json` would hold it, without what depends on the library's version."""
    document = json.loads(config.to_json_string(use_diff=False))
    for name in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        document.pop(name, None)
    return document


def _described(output: Path) -> dict[str, Any]:
    """A model directory as the base of a run, found from anywhere."""
    return resolve_model(str(output.resolve())).describe()


def _refuse_other_run(run: RunDirectory) -> None:
    """Refuse a run directory whose base is another model than the one that was, or will be, trained in it.

    Raises:
        ArtifactError: naming that model.
    """
    record = run.read_record()
    if record is None or Path(str(record["model"].get("name"))) == run.trained.resolve():
        return
    # A directory that was moved is the one that it was.
    try:
        moved = read_document(run.training / TRAINING_FILE, KIND).record.get("digest") == record["model"].get("digest")
    except ArtifactError:
        moved = False
    if not moved:
        raise ArtifactError(
            f"{run.path} is a run of {record['model'].get('name')}, which was not trained in it",
            "name another directory with --run DIR",
        )


def _check_output(folder: Path, output: Path) -> None:
    """See that a model directory that will give way is one that was trained here, whatever it may have lost since.

    Raises:
        ArtifactError: it holds something else.
    """
    if not (folder / TRAINING_FILE).is_file():
        check_ours(output, _OURS)


def _finished(request: TrainingRequest, folder: Path, output: Path, reporter: Reporter) -> Lineage | None:
    """What an earlier training of these inputs left, unless its model has to be written again.

    Raises:
        ArtifactError: it was of other inputs; or what is written of it cannot be read, and no checkpoint can say more.
    """
    found = left_before(folder / TRAINING_FILE, KIND, request.lineage, _MEND, reporter)
    if found is None:
        return None
    try:
        whole = resolve_model(str(output)).digest == found.record.get("digest")
        names = [*tokenizer_files(request.tokenizer.path), CARD, LINEAGE_FILE]
        whole = whole and all((output / name).is_file() for name in names)
    except LapcliError:
        whole = False
    if whole:
        return found
    reporter.warn(f"{output} is damaged; it is made again from the last checkpoint, where there is one")
    return None


def _begun(request: TrainingRequest, folder: Path) -> Checkpoint | None:
    """Where an unfinished training goes on, if there is one.

    Raises:
        ArtifactError: it has other settings, or no checkpoint of it is whole.
        DataError: its text was another.
    """
    found = Checkpoints(folder / CHECKPOINTS, request.checkpoint_lineage()).position()
    if found is not None:
        try:
            _stream(request).refuse_other(found.state["stream"])
        except DataError as error:
            raise DataError(error.message, _MEND) from error
    return found


def _compare_vocabularies(request: TrainingRequest, reporter: Reporter) -> None:
    """See that a tokenizer that was named means by its ids what the model to train on from does.

    Raises:
        ModelError: naming the first id that it does not.
    """
    base = request.base
    if base is None or request.tokenizer.path == base.path:
        return
    own = load_tokenizer(base) if base.has_tokenizer else None
    said = compare_vocabularies(base.name, request.config.vocab_size, own, load_tokenizer(request.tokenizer))
    if said is not None:
        reporter.notice(said)


def _stream(request: TrainingRequest, reporter: Reporter | None = None, processes: Processes = ALONE) -> TrainingStream:
    """The text, from its beginning."""
    settings = request.settings
    return TrainingStream(
        settings.data, load_tokenizer(request.tokenizer), settings.seq_len, seed=settings.seed,
        rank=processes.rank, world=processes.size, joined=settings.documents == "joined",
        reporter=reporter if processes.leader else None,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Trained:
    """What training leaves in memory.

    Attributes:
        ended: how it did.
        state: all values, whole, fp32.
        sample: some held-out tokens.
    """

    ended: TrainingEnd
    state: dict[str, Tensor]
    sample: list[int]


def _train(
    plan: TrainingPlan,
    machine: Machine,
    execution: Execution,
    trackers: Sequence[str],
    reporter: Reporter,
    processes: Processes,
) -> _Trained:
    """Train on all processes."""
    request, settings = plan.request, plan.request.settings
    stream = _stream(request, reporter, processes)
    weights: Weights = "on device"
    if processes.size > 1 and execution.sharding == "fsdp":
        # They come to the devices block by block, a share to each.
        weights = "in memory" if processes.leader else "nowhere"
    device = machine.torch_device()
    model = _model(request, device, weights)
    half = device.type == "cuda" and execution.autocast
    _choose_kernel(model, machine, device, half=half, compiled=execution.compile, reporter=reporter)
    train_whole(model)
    watching = Watching(model)
    shown = open_tracker(trackers if processes.leader else (), plan.folder, settings.document(), plan.output.name)
    try:
        ended = train(
            model,
            None,
            stream,
            request.whole,
            settings.training(),
            plan.folder,
            lineage=request.checkpoint_lineage(),
            execution=execution,
            on_step=lambda done: shown.log(done.step, _shown(done)),
            on_validation=lambda step, found: shown.log(step, {"validation": found.document(), **watching.found}),
            watch=watching,
            reporter=reporter,
            processes=processes,
            device=device,
        )
    finally:
        shown.close()
    state = trained_state(model)
    held_out = stream.held_out(settings.validation)
    sample = held_out[0].ids.tolist() if held_out else next(stream).ids.tolist()
    return _Trained(ended, state, sample[:_CHECKED_TOKENS])


def _model(request: TrainingRequest, device: torch.device, weights: Weights) -> Any:
    """The model as it begins, in this process."""
    if request.base is not None:
        return to_train_on(request.base, device, weights)
    if weights == "nowhere":
        return bare(request.config)
    model = fresh_model(request.config, request.settings.seed, request.settings.start)
    return model.to(device) if weights == "on device" else model


def _choose_kernel(
    model: Any, machine: Machine, device: torch.device, *, half: bool, compiled: bool, reporter: Reporter
) -> None:
    """Let the mixers run the kernel that the machine asks for, and say which that is in one line.

    The weights are fp32, but what a kernel gets under autocast is not, so it is not their dtype that decides.

    Raises:
        ModelError: it cannot run there, or computes wrong gradients.
    """
    dtype = torch.bfloat16 if half else torch.float32
    for mixer in model.mixers():
        mixer.kernel = machine.kernel
    mixer = model.mixers()[0]
    call: dict[str, Any] = {
        "key_width": mixer.shape.key_width,
        "gated": mixer.gated,
        "erasing": mixer.erasing,
        "needs_gradient": True,
    }
    if machine.kernel != "auto":
        wrong = why_not(machine.kernel, device, dtype, **call)
        if wrong is not None:
            raise ModelError(f"--kernel {machine.kernel} cannot train here: {wrong}", "use --kernel auto")
        choice = Choice(machine.kernel, "asked for by name")
    elif compiled or mixer.released:
        choice = Choice("chunked", "compiled" if compiled else "nothing else computes the released recurrence")
    else:
        choice = select_impl(device, dtype, time=1024, value_width=mixer.shape.value_width, **call)
    precision = "bf16 products of fp32 weights" if half else "fp32"
    reporter.notice(f"kernel: {choice.name} ({choice.reason}), {precision} on {device}")


def _shown(done: StepDone) -> dict[str, Any]:
    return {**done.measured.document(), "learning_rate": done.learning_rate, "gradient_norm": done.gradient_norm}


def _write(
    plan: TrainingPlan, record: dict[str, Any], trained: _Trained, machine: Machine, reporter: Reporter
) -> Restored:
    """Write the model under its name, once a fresh process has found that it computes what was trained."""
    # The model is garbage by now.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    unchecked = plan.output.with_name(f".{plan.output.name}.unchecked")
    shutil.rmtree(unchecked, ignore_errors=True)
    try:
        with atomic_directory(unchecked) as made:
            _save(plan.request, trained.state, made)
            (made / CARD).write_text(
                training_card(plan.request.name, plan.request.config, plan.request.settings, record)
            )
            write_document(made / LINEAGE_FILE, _written_lineage(plan.request, made))
        with reporter.task("reading the written model in a fresh process"):
            found = check_trained(trained.ended.checkpoint, unchecked, trained.sample, machine)
        if plan.output.exists():
            _check_output(plan.folder, plan.output)
            shutil.rmtree(plan.output)
        unchecked.rename(plan.output)
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)
    return found


def _save(request: TrainingRequest, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write config, weights and tokenizer."""
    model = bare(request.config)
    dtype = getattr(torch, request.settings.stored)
    wide: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    stored = {name: value if wide & set(name.split(".")) else value.to(dtype) for name, value in state.items()}
    with _without_bars():
        model.to(dtype).save_pretrained(folder, state_dict=stored)
    for name in tokenizer_files(request.tokenizer.path):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(request.tokenizer.path / name, folder / name)
    for file in folder.glob("*.safetensors"):
        # Which is written private to this user.
        file.chmod(0o644)


@contextlib.contextmanager
def _without_bars() -> Generator[None]:
    """Silence the bars of transformers; lapcli draws its own."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _written_lineage(request: TrainingRequest, folder: Path) -> Lineage:
    """The lineage of the model directory."""
    lineage = request.lineage()
    digest = resolve_model(str(folder)).digest
    return Lineage(
        kind="model",
        model=lineage.model,
        family=lineage.family,
        settings={"stage": "training", **lineage.settings},
        parents=lineage.parents,
        record={"trained": request.whole.trained, OWN_DIGEST: digest},
    )
