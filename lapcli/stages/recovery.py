"""Recovery: LoRA and distillation that heal a pruned model; adapter, merged checkpoint, curve and card.

Source: arXiv 2602.04852, Sec. 4.1 and App. A (the recipe); the control, which the paper lacks, is the same training of
the unpruned model.
"""

import contextlib
import gc
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lapcli.artifacts import (
    CURVE_FILE,
    RECOVERY_FILE,
    Lineage,
    RunDirectory,
    atomic_file,
    read_document,
    write_document,
)
from lapcli.data import check_source, fingerprint, parse_mixture
from lapcli.errors import ArtifactError, DataError, LapcliError, ModelError
from lapcli.families.loading import Weights, load_model, load_tokenizer, skeleton
from lapcli.families.registry import family_for
from lapcli.families.right_gradients import use_right_gradients
from lapcli.families.source import (
    ModelSource,
    copy_companions,
    lost_companions,
    refuse_quantised,
    resolve_model,
)
from lapcli.machine import Machine
from lapcli.parallel import ALONE, Processes
from lapcli.recipe import RecoverySettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.calibration import check_length
from lapcli.stages.evaluation_file import forget_stale
from lapcli.stages.giving_way import aside, bring_back, check_ours, forget_aside, left_before, set_aside
from lapcli.stages.lineage import LINEAGE_FILE, sliced_lineage
from lapcli.training.adapters import (
    ALPHA,
    RANK,
    AdapterPlan,
    apply_adapters,
    plan_adapters,
    read_adapter,
    save_adapter,
    trained_state,
)
from lapcli.training.card import recovery_card
from lapcli.training.checkpoints import KIND as CHECKPOINT
from lapcli.training.checkpoints import STATE_FILE, Checkpoint, Checkpoints, latest_step
from lapcli.training.curve import Curve
from lapcli.training.distillation import align_vocabularies
from lapcli.training.engine import (
    CHECKPOINTS,
    Execution,
    StepDone,
    TrainingEnd,
    train,
    training_lineage,
)
from lapcli.training.merging import merge, merged_lineage, rows_on_disk
from lapcli.training.picture import draw_curve
from lapcli.training.reload import Reloaded, check_reload
from lapcli.training.stability import Watching
from lapcli.training.stream import TrainingStream
from lapcli.training.trackers import TRACKERS, open_tracker

KIND = "recovery"
ADAPTER = "adapter"
PICTURE = "curve.png"
CARD = "README.md"

_MEND = "pass --restart to begin anew, or --run DIR to keep both"
_CHECKED_TOKENS = 256
_OURS = frozenset({CHECKPOINTS, CURVE_FILE, ADAPTER, RECOVERY_FILE, PICTURE, LINEAGE_FILE, *TRACKERS})


@dataclass(frozen=True)
class RecoveryPlan:
    """What recovery will do.

    Attributes:
        student: the model that is trained.
        teacher: the model it learns from; `None` where the KL counts nothing.
        settings: of the recovery.
        folder: where checkpoints, curve and adapter lie.
        output: the merged model's directory.
        adapters: what is trained, of a model without weights.
        parameters: numbers in the student.
        operations: of the whole training, in floating point: two for each number and token in a forward pass, as many
            for the gradients of activations, and again for those of what is trained.
        vocabulary: leading ids that both models have, or `None` without a teacher.
        resumes_after: the step after which training goes on, or `None`.
        finished: what came of it, where it is there already.
        lost: files beside its weights that are to be put back.
        restart: whether an earlier recovery is thrown away.
    """

    student: ModelSource
    teacher: ModelSource | None
    settings: RecoverySettings
    folder: Path
    output: Path
    adapters: AdapterPlan
    parameters: int
    operations: float
    vocabulary: int | None
    resumes_after: int | None
    finished: Lineage | None
    lost: tuple[str, ...]
    restart: bool

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        training = self.settings.training()
        return {
            "student": self.student.name,
            "teacher": None if self.teacher is None else self.teacher.name,
            "layers": len(self.adapters.layers),
            "trained_parameters": self.adapters.trained,
            "lora": {str(layer.index): list(layer.lora) for layer in self.adapters.layers},
            "parameters": self.parameters,
            "steps": training.steps,
            "tokens": self.settings.tokens,
            "operations": self.operations,
            "resumes_after": self.resumes_after,
            "finished": self.finished is not None,
            "puts_back": list(self.lost),
            "writes": [str(self.folder), str(self.output)],
        }


@dataclass(frozen=True)
class RecoveryResult:
    """What recovery left.

    Attributes:
        output: the merged model's directory.
        adapter: the adapter's.
        record: steps, tokens, seconds, validation before and after, the check of the merged model.
        worked: whether anything was done now.
    """

    output: Path
    adapter: Path
    record: dict[str, Any]
    worked: bool

    def document(self) -> dict[str, Any]:
        """The result, JSON-able."""
        return {"recovered": str(self.output), "adapter": str(self.adapter), "worked": self.worked, **self.record}


def teacher_of(student: ModelSource) -> ModelSource:
    """The model that a slice was made from, as it was then; of a converted model that was not pruned, the one before.

    Raises:
        ArtifactError: lapcli did neither, or the model has changed since.
        ModelError: it is no longer where it was.
    """
    made, lineage, unconverted = student, sliced_lineage(student.path), None
    # What `lapcli train` made was pruned from nothing.
    while lineage is not None and lineage.settings.get("stage") != "training":
        name, revision, digest = (lineage.model.get(key) for key in ("name", "revision", "digest"))
        try:
            origin = resolve_model(str(name), revision)
        except ModelError as error:
            raise ModelError(
                f"{made.name} was made from {name}, which is not there any more: {error.message}",
                "put it back, or name the teacher with --teacher",
            ) from error
        if origin.digest != digest:
            raise ArtifactError(
                f"{name} has changed since {made.name} was made from it ({str(digest)[:12]} then, "
                f"{origin.digest[:12]} now)",
                "put it back, or name the teacher with --teacher",
            )
        if lineage.settings.get("stage") == "slicing":
            return origin
        if lineage.settings.get("stage") == "conversion":
            unconverted = origin
        # Recovered or converted before: what it was made from is the slice.
        made, lineage = origin, sliced_lineage(origin.path)
    if unconverted is not None:
        return unconverted
    raise ArtifactError(
        f"{made.name} holds no {LINEAGE_FILE} that says what it was pruned from", "name that model with --teacher"
    )


def plan_recovery(
    student: ModelSource,
    teacher: ModelSource | None,
    settings: RecoverySettings,
    run: RunDirectory,
    *,
    restart: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
    processes: Processes = ALONE,
) -> RecoveryPlan:
    """Check a request and say what it means, without reading any weights.

    Args:
        student: the model to train.
        teacher: the model it learns from; `None` where `settings.kl_weight` is 0.
        settings: of the recovery.
        run: the run directory.
        restart: whether an earlier recovery in it gives way.
        overwrite: whether one of other inputs does.
        trust_remote_code: whether code in a model's directory may run.
        reporter: hears where vocabularies differ by padding; the leader's alone is used.
        processes: those that ask; the leader alone opens the text.

    Raises:
        LapcliError: whatever `recover` would refuse and can be known now.
    """
    reporter = reporter if processes.leader else None
    model, adapters, vocabulary = check_recovery(
        student, teacher, settings, trust_remote_code=trust_remote_code, reporter=reporter
    )
    settings = settings.model_copy(update={"rank": adapters.rank, "alpha": adapters.alpha})
    folder, output = (run.control_recovery, run.control) if settings.control else (run.recovery, run.recovered)
    there = begun = None
    if not restart:
        try:
            there = _finished(student, teacher, settings, folder, output, reporter or SilentReporter())
            if there is None:
                begun = _begun(student, teacher, settings, adapters, folder, trust_remote_code)
        except (ArtifactError, DataError):
            if not overwrite:
                raise
            restart = True
    if there is None:
        for place in (folder, output):
            check_ours(place, _OURS)
        if processes.leader:
            check_text(student, settings, trust_remote_code=trust_remote_code)
        if reporter is not None:
            _say_the_budget(settings, reporter)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    active = parameters - _looked_up(model)
    return RecoveryPlan(
        student=student,
        teacher=teacher,
        settings=settings,
        folder=folder,
        output=output,
        adapters=adapters,
        parameters=parameters,
        operations=settings.tokens * (2.0 * active * (2 if teacher is None else 3) + 2.0 * adapters.trained),
        vocabulary=vocabulary,
        resumes_after=None if begun is None else begun.step,
        finished=there,
        lost=() if there is None else _lost(student, output),
        restart=restart,
    )


def check_recovery(
    student: ModelSource,
    teacher: ModelSource | None,
    settings: RecoverySettings,
    *,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> tuple[Any, AdapterPlan, int | None]:
    """Refuse what can be known to fail of models, text and adapters; a model's base may stand in for it.

    Returns:
        The student without weights, what is trained in it, and the leading ids that student and teacher share (`None`
        without a teacher).

    Raises:
        LapcliError: see `plan_recovery`.
    """
    for source in (student, teacher):
        if source is not None:
            refuse_quantised(source.config, source.name)
            assert source.headers  # raises where there are no safetensors, or damaged ones
            source.check_tokenizer()
            check_length(source, settings.seq_len)
    for part in parse_mixture(settings.data):
        check_source(part.name)
    model = skeleton(student, trust_remote_code=trust_remote_code)
    adapters = _fitting_adapters(model, student.config, settings, reporter)
    # What could not be merged is not to be trained first.
    rows_on_disk(student, adapters.changed, trust_remote_code=trust_remote_code)
    vocabulary = None
    if teacher is not None:
        sizes = [
            made.get_output_embeddings().weight.shape[0]
            for made in (model, skeleton(teacher, trust_remote_code=trust_remote_code))
        ]
        tokenizers = [load_tokenizer(source, trust_remote_code=trust_remote_code) for source in (student, teacher)]
        vocabulary = align_vocabularies(sizes[0], sizes[1], tokenizers[0], tokenizers[1], reporter)
    return model, adapters, vocabulary


def _fitting_adapters(
    model: Any, config: Mapping[str, Any], settings: RecoverySettings, reporter: Reporter | None
) -> AdapterPlan:
    """What is trained; where no rank was asked for, none above what the narrowest projection can use."""
    chosen = settings.adapters()
    if settings.rank is not None:
        return plan_adapters(model, config, **{**chosen, "alpha": settings.alpha or ALPHA})
    matched = plan_adapters(model, config, **{**chosen, "rank": 1, "alpha": 1}).lora
    widths = {name: min(model.get_parameter(f"{name}.weight").shape) for name in matched}
    rank = min(RANK, *widths.values()) if widths else RANK
    if rank < RANK and reporter is not None:
        reporter.notice(
            f"LoRA of rank {rank} instead of {RANK}: {min(widths, key=widths.__getitem__)} can take no more"
        )
    return plan_adapters(model, config, **{**chosen, "rank": rank, "alpha": settings.alpha or ALPHA * rank // RANK})


def check_text(student: ModelSource, settings: RecoverySettings, *, trust_remote_code: bool = False) -> None:
    """Refuse text that is empty, too short or unreadable at its beginning; what lies on the hub is not opened.

    Args:
        student: whose tokenizer counts; a model's base may stand in for it.
        settings: of the recovery.
        trust_remote_code: whether code in the model's directory may run.

    Raises:
        DataError: what is wrong with it.
        ModelError: the tokenizer does not load.
    """
    _stream(student, settings, trust_remote_code).check(settings.validation)


def _say_the_budget(settings: RecoverySettings, reporter: Reporter) -> None:
    training = settings.training()
    sequences = training.steps * training.batch
    if settings.samples not in (None, sequences):
        reporter.notice(
            f"{settings.samples} samples become {sequences}, since steps are whole: {training.steps} of "
            f"{training.batch} sequences"
        )


def _stream(
    student: ModelSource,
    settings: RecoverySettings,
    trust_remote_code: bool,
    reporter: Reporter | None = None,
    processes: Processes = ALONE,
) -> TrainingStream:
    """The text of a recovery, from its beginning."""
    tokenizer = load_tokenizer(student, trust_remote_code=trust_remote_code)
    return TrainingStream(
        settings.data, tokenizer, settings.seq_len, seed=settings.seed,
        rank=processes.rank, world=processes.size, reporter=reporter if processes.leader else None,
    )  # fmt: skip


def _begun(
    student: ModelSource,
    teacher: ModelSource | None,
    settings: RecoverySettings,
    adapters: AdapterPlan,
    folder: Path,
    trust_remote_code: bool,
) -> Checkpoint | None:
    """Where an unfinished recovery goes on, if there is one.

    Raises:
        ArtifactError: it has other settings, or no checkpoint of it is whole.
        DataError: its text was another.
    """
    lineage = training_lineage(student, teacher, adapters, settings.training())
    found = Checkpoints(folder / CHECKPOINTS, lineage).position()
    if found is not None:
        _stream(student, settings, trust_remote_code).refuse_other(found.state["stream"])
    return found


def recovers(folder: Path, place: Path) -> bool:
    """Whether what lies in a recovery's folder was of the model in this directory, whatever that holds by now."""
    newest = latest_step(folder / CHECKPOINTS)
    found = [(folder / RECOVERY_FILE, KIND)]
    if newest is not None:
        found.append((folder / CHECKPOINTS / f"step-{newest}" / STATE_FILE, CHECKPOINT))
    for path, kind in found:
        with contextlib.suppress(ArtifactError, OSError):
            return Path(str(read_document(path, kind).model.get("name"))).resolve() == place.resolve()
    return False


def _looked_up(model: Any) -> int:
    """Numbers of an embedding that is no output layer as well: they are read, not multiplied."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return 0 if embedding is head else embedding.numel()


def _finished(
    student: ModelSource,
    teacher: ModelSource | None,
    settings: RecoverySettings,
    folder: Path,
    output: Path,
    reporter: Reporter,
) -> Lineage | None:
    """What an earlier recovery of these inputs left, unless its weights or its adapter have to be made again.

    Raises:
        ArtifactError: it was of other inputs; or what is written of it cannot be read, and no checkpoint can say more.
    """
    found = left_before(
        folder / RECOVERY_FILE, KIND, lambda: recovery_lineage(student, teacher, settings), _MEND, reporter
    )
    if found is None:
        return None
    wrong = _what_is_wrong(folder, output, found)
    if wrong is None:
        return found
    reporter.warn(f"{wrong}; it is made again from the last checkpoint, where there is one")
    return None


def _what_is_wrong(folder: Path, output: Path, found: Lineage) -> str | None:
    """What keeps adapter and merged model from being those that were written, files beside the weights left out."""
    if not (folder / ADAPTER / LINEAGE_FILE).is_file():
        return f"{folder / ADAPTER} is not whole"
    try:
        whole = resolve_model(str(output)).digest == found.record.get("digest")
    except LapcliError:
        whole = False
    return None if whole else f"{output} is damaged"


def _lost(student: ModelSource, output: Path) -> tuple[str, ...]:
    """Files beside the weights that a merged model lacks, or has otherwise."""
    try:
        known = sliced_lineage(output) is not None
    except ArtifactError:
        known = False
    card = () if (output / CARD).is_file() else (CARD,)
    return (*lost_companions(student, output), *card, *(() if known else (LINEAGE_FILE,)))


def _put_back(plan: RecoveryPlan, record: dict[str, Any]) -> None:
    """Write the files again that a merged model has lost."""
    own = {CARD, LINEAGE_FILE}
    copy_companions(plan.student, plan.output, [name for name in plan.lost if name not in own])
    if CARD in plan.lost:
        with atomic_file(plan.output / CARD) as temporary:
            temporary.write_text(recovery_card(plan.student, plan.teacher, plan.settings, record))
    if LINEAGE_FILE in plan.lost:
        adapter = plan.folder / ADAPTER
        lineage = merged_lineage(plan.student, adapter, read_adapter(adapter)[0], record["digest"])
        write_document(plan.output / LINEAGE_FILE, lineage)


def recovery_lineage(student: ModelSource, teacher: ModelSource | None, settings: RecoverySettings) -> Lineage:
    """What a recovery is known by: models, settings, and the text as it is now."""
    document = settings.document()
    # Two ways to ask for one budget are one request.
    document |= {"samples": None, "steps": settings.training().steps}
    return Lineage(
        kind=KIND,
        model=student.describe(),
        family=family_for(student.config).name,
        settings=document,
        parents={
            "tokenizer": student.tokenizer_digest,
            **fingerprint(settings.data),
            **({} if teacher is None else {"teacher": teacher.digest}),
        },
    )


def recover_into(
    plan: RecoveryPlan,
    run: RunDirectory,
    *,
    machine: Machine | None = None,
    teacher_device: str | None = None,
    execution: Execution | None = None,
    trackers: Sequence[str] = (),
    beside: Sequence[Path] = (),
    reporter: Reporter | None = None,
    processes: Processes = ALONE,
) -> RecoveryResult:
    """Train, or go on where training was stopped; then write adapter, merged model, card and picture.

    Args:
        plan: of `plan_recovery`.
        run: the run directory; the leading process holds its lock.
        machine: where it runs.
        teacher_device: where the teacher lies instead.
        execution: how training runs.
        trackers: "tensorboard", "wandb": who else hears of the curve.
        beside: what may have been set aside for this recovery, and comes back or goes with the earlier one.
        reporter: where progress goes.
        processes: those that train together.

    Raises:
        LapcliError: see `lapcli.training.engine.train`; or the merged model does not compute what the trained one
            computes.
    """
    machine, reporter = machine or Machine(), reporter or SilentReporter()
    adapter = plan.folder / ADAPTER
    if plan.finished is not None:
        if plan.lost and processes.leader:
            _put_back(plan, plan.finished.record)
            reporter.warn(f"{plan.output} had lost {', '.join(plan.lost)}, which was put back")
        reporter.notice(f"{plan.output} is there already")
        if processes.leader:
            # In case that the process which finished it was killed before it could.
            for place in (*beside, plan.folder, plan.output):
                forget_aside(place)
        return RecoveryResult(plan.output, adapter, plan.finished.record, worked=bool(plan.lost))
    places = (plan.folder, plan.output) if plan.restart and processes.leader else ()
    for place in places:
        check_ours(place, _OURS)
    for place in places:
        set_aside(place)
    if places:
        places += tuple(beside)
    processes.wait()
    begun = time.monotonic()
    try:
        trained = _train(plan, machine, teacher_device, execution, trackers, reporter, processes)
    except BaseException:
        if not latest_step(plan.folder / CHECKPOINTS):
            # Nothing has taken its place: no text, no room, an interruption before the end of the first step.
            for place in places:
                bring_back(place)
        raise
    training = trained.ended
    if training.stopped and training.step == 0 and any(aside(place).exists() for place in places):
        for place in places:
            bring_back(place)
        raise ModelError(
            f"{training.stopped}; nothing was learned, and the earlier recovery is in its place again",
            "pass a lower --lr, and --restart",
        )
    record: dict[str, Any] = {
        "step": training.step,
        "tokens": training.tokens,
        "before": None if training.first is None else asdict(training.first),
        "after": None if training.last is None else asdict(training.last),
        "stopped": training.stopped,
        "processes": processes.size,
        **trained.watched,
    }
    if not processes.leader:
        return RecoveryResult(plan.output, adapter, record, worked=True)
    lineage = recovery_lineage(plan.student, plan.teacher, plan.settings)
    lines = Curve(plan.folder / CURVE_FILE).lines()
    record["seconds"] = round(sum(line.get("seconds", 0.0) for line in lines), 1)
    save_adapter(
        adapter, plan.student, trained.adapters, trained.state,
        settings={key: value for key, value in lineage.settings.items() if key not in ("rank", "alpha")},
        parents=dict(lineage.parents), overwrite=True,
    )  # fmt: skip
    try:
        draw_curve(lines, plan.folder / PICTURE)
    except ImportError:
        reporter.notice(f"{plan.folder / PICTURE} was not drawn: that needs matplotlib")
    record["reloaded"] = asdict(_merge(plan, adapter, record, trained.sample, machine, reporter))
    record["digest"] = resolve_model(str(plan.output)).digest
    write_document(
        plan.folder / RECOVERY_FILE, replace(lineage, record={**record, "wall_seconds": time.monotonic() - begun})
    )
    label = "control" if plan.settings.control else "recovered"
    forget_stale(run.evaluation, label, record["digest"], reporter)
    for place in (*beside, plan.folder, plan.output):
        forget_aside(place)
    return RecoveryResult(plan.output, adapter, record, worked=True)


def micro_batch(seq_len: int) -> int:
    """Sequences to compute at once where nobody says: as many as are about 8192 tokens."""
    return max(1, 8192 // seq_len)


def note_recovery(plan: RecoveryPlan, run: RunDirectory) -> None:
    """Add a finished recovery to `run.json`; a run that began with it has the teacher for its base."""
    record = run.read_record()
    base = record["model"] if record else (plan.teacher or plan.student).describe()
    run.note(base, "recover", {"recovery": plan.settings.document()})


@dataclass(frozen=True, eq=False)
class _Trained:
    """What training leaves in memory.

    Attributes:
        ended: how it did.
        adapters: what was trained, in the dtypes that the model was loaded in.
        state: the trained values, whole.
        sample: some held-out tokens.
        watched: how the model contracts at the end, where it has query feedback.
    """

    ended: TrainingEnd
    adapters: AdapterPlan
    state: dict[str, torch.Tensor]
    sample: list[int]
    watched: dict[str, Any]


def _train(
    plan: RecoveryPlan,
    machine: Machine,
    teacher_device: str | None,
    execution: Execution | None,
    trackers: Sequence[str],
    reporter: Reporter,
    processes: Processes,
) -> _Trained:
    """Train on all processes."""
    settings = plan.settings
    stream = _stream(plan.student, settings, machine.trust_remote_code, reporter, processes)
    weights: Weights = "on device"
    if processes.size > 1 and execution is not None and execution.sharding == "fsdp":
        # They come to the devices block by block, a share to each.
        weights = "in memory" if processes.leader else "nowhere"
    device = machine.torch_device()
    student = _loaded(plan.student, machine, weights)
    machine.announce(student, reporter, needs_gradient=True, device=device)
    use_right_gradients(student, device, reporter)
    adapters = plan_adapters(student, plan.student.config, **settings.adapters())
    # peft draws the first values of LoRA.
    torch.manual_seed(settings.seed)
    student = apply_adapters(student, adapters)
    teacher = None
    if plan.teacher is not None:
        place = machine if teacher_device is None else replace(machine, device=teacher_device)
        teacher = _loaded(plan.teacher, place, weights)
    training = settings.training()
    # Whether a Q-Delta contracts; of others there is nothing that could change it.
    erasing = any(getattr(module, "erasing", False) for module in student.modules())
    watching = Watching(student) if erasing else None
    shown = open_tracker(trackers if processes.leader else (), plan.folder, settings.document(), plan.output.name)
    try:
        ended = train(
            student,
            teacher,
            stream,
            adapters,
            training,
            plan.folder,
            lineage=training_lineage(plan.student, plan.teacher, adapters, training),
            execution=execution,
            vocabulary=plan.vocabulary,
            on_step=lambda done: shown.log(done.step, _shown(done)),
            on_validation=lambda step, found: shown.log(
                step, {"validation": found.document(), **({} if watching is None else watching.found)}
            ),
            watch=watching,
            doing="recovering",
            reporter=reporter,
            processes=processes,
            device=device,
        )
    finally:
        shown.close()
    state = trained_state(student)
    held_out = stream.held_out(training.validation)
    # Where nothing is held out, any tokens do: the two models are compared with each other.
    sample = held_out[0].ids.tolist() if held_out else next(stream).ids.tolist()
    return _Trained(ended, adapters, state, sample[:_CHECKED_TOKENS], {} if watching is None else watching.found)


def _loaded(source: ModelSource, machine: Machine, weights: Weights) -> Any:
    return load_model(
        source,
        device=machine.torch_device(),
        dtype=machine.torch_dtype(source.config),
        kernel=machine.kernel,
        trust_remote_code=machine.trust_remote_code,
        weights=weights,
    )


def _shown(done: StepDone) -> dict[str, Any]:
    return {**done.measured.document(), "learning_rate": done.learning_rate, "gradient_norm": done.gradient_norm}


def _merge(
    plan: RecoveryPlan,
    adapter: Path,
    record: dict[str, Any],
    sample: list[int],
    machine: Machine,
    reporter: Reporter,
) -> Reloaded:
    """Write the merged model under its name, once a fresh process has found that it computes what was trained."""
    # The student and the teacher are garbage by now.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    unchecked = plan.output.with_name(f".{plan.output.name}.unchecked")
    shutil.rmtree(unchecked, ignore_errors=True)
    try:
        merge(
            plan.student, adapter, unchecked,
            card=recovery_card(plan.student, plan.teacher, plan.settings, record),
            trust_remote_code=machine.trust_remote_code, reporter=reporter,
        )  # fmt: skip
        with reporter.task("reading the merged model in a fresh process"):
            found = check_reload(plan.student, plan.settings, adapter, unchecked, sample, machine)
        if plan.output.exists():
            check_ours(plan.output, _OURS)
            shutil.rmtree(plan.output)
        unchecked.rename(plan.output)
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)
    return found
