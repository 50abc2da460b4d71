"""What a worker does: a calibration, the base's evaluation, a slice that several cells share, a cell.

Each is a plain function of a job, which is JSON: a process of its own gets it through a pipe (`lapcli.sweeps.worker`).
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lapcli.artifacts import RECOVERY_FILE, RunDirectory, atomic_directory, atomic_file, read_document
from lapcli.errors import ArtifactError, LapcliError
from lapcli.evaluation.results import Evaluation
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.source import ModelSource, resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, RecoverySettings, SelectionSettings
from lapcli.reporting import Reporter
from lapcli.stages.calibration import calibrate, has_saliency
from lapcli.stages.evaluation import evaluate_into, models_of
from lapcli.stages.evaluation_file import read_evaluation, write_evaluation
from lapcli.stages.lineage import STALE_HINT
from lapcli.stages.pruning import prune
from lapcli.stages.query_feedback import plan_feedback
from lapcli.stages.recovery import micro_batch, note_recovery, plan_recovery, recover_into
from lapcli.sweeps.record import SweepDirectory
from lapcli.training.engine import Execution


@dataclass(frozen=True)
class Job:
    """One piece of work, JSON-able.

    Attributes:
        kind: "calibrate", "base", "slice" (a cell's without its recovery, for others to share) or "cell".
        name: of the calibration or the cell.
        sweep: the sweep's directory.
        model: name, revision and digest of the base.
        machine: fields of `Machine`.
        settings: of the calibration, or a cell's.
        saliency: whether a calibration is for Grad too.
        calibration: the name of a cell's.
        shares: the cell that made the slice of this one.
        tasks: to evaluate; none: nothing is evaluated.
        limit: items of each task.
        task_data: folder with local copies of task data.
        overwrite: whether results of other settings give way.
    """

    kind: str
    name: str
    sweep: str
    model: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any] | None = None
    saliency: bool = False
    calibration: str | None = None
    shares: str | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    task_data: str | None = None
    overwrite: bool = False

    def document(self) -> dict[str, Any]:
        """As it goes through the pipe."""
        return asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Job":
        """From what came through the pipe."""
        return cls(**{**document, "tasks": tuple(document["tasks"])})


def do(job: Job, reporter: Reporter) -> dict[str, Any]:
    """Do a job and say what came of it, JSON-able; what is there already is not done again.

    Raises:
        LapcliError: see the stages.
    """
    kinds: dict[str, Callable[..., dict[str, Any]]] = {
        "calibrate": _calibrate, "base": _base, "slice": _cell, "cell": _cell,
    }  # fmt: skip
    source = resolve_model(job.model["name"], job.model["revision"])
    if source.digest != job.model["digest"]:
        raise ArtifactError(
            f"{source.name} has changed since the sweep began", "put it back, or sweep into another --run DIR"
        )
    begun = time.monotonic()
    found = kinds[job.kind](job, source, Machine(**job.machine), SweepDirectory(Path(job.sweep)), reporter)
    return {**found, "wall_seconds": round(time.monotonic() - begun, 1)}


def _calibrate(
    job: Job, source: ModelSource, machine: Machine, sweep: SweepDirectory, reporter: Reporter
) -> dict[str, Any]:
    run = sweep.calibration(job.name)
    settings = CalibrationSettings.model_validate(job.settings)
    with run.lock():
        artifact, worked = calibrate(
            source, settings, run.calibration,
            machine=machine, saliency=job.saliency, overwrite=job.overwrite, reporter=reporter,
        )  # fmt: skip
        run.note(source.describe(), "calibrate", {"settings": settings.document(), "output": str(run.calibration)})
    return {"worked": worked, "tokens": artifact.lineage.record["tokens"], "saliency": has_saliency(artifact)}


def _base(job: Job, source: ModelSource, machine: Machine, sweep: SweepDirectory, reporter: Reporter) -> dict[str, Any]:
    run = sweep.base
    with run.lock():
        worked = _evaluate(job, run, [("base", source)], machine, reporter)
        run.note(source.describe(), "eval", {"tasks": list(job.tasks), "limit": job.limit})
    return {"worked": worked, **_scores(run)}


def _cell(job: Job, source: ModelSource, machine: Machine, sweep: SweepDirectory, reporter: Reporter) -> dict[str, Any]:
    assert job.settings is not None
    assert job.calibration is not None
    run = sweep.cell(job.name)
    calibration = CalibrationSettings.model_validate(job.settings["calibration"])
    selection = SelectionSettings.model_validate(job.settings["selection"])
    recovery = job.settings["recovery"] if job.kind == "cell" else None
    seconds: dict[str, float] = {}
    clock = time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        seconds[name] = round(time.monotonic() - clock, 1)
        clock = time.monotonic()

    with run.lock():
        _link(sweep.calibration(job.calibration).calibration, run.calibration, anew=True)
        if job.shares is not None:
            owner = sweep.cell(job.shares)
            _link(owner.selection, run.selection)
            _link_folder(owner.sliced, run.sliced)
            if owner.evaluation.is_file():
                _share_scores(owner.evaluation, run.evaluation, ("base", "sliced"))
        pruned = prune(source, calibration, selection, run, machine=machine, overwrite=job.overwrite, reporter=reporter)
        lap("prune")
        found: dict[str, Any] = {"worked": pruned.worked}
        document = pruned.document(run)
        found |= {name: document[name] for name in ("key_width", "kept_width", "removed", "layers")}
        found |= {name: document[name] for name in ("state_bytes", "weight_bytes")}
        if recovery is not None:
            found["recovery"] = _recover(run, source, recovery, machine, job.overwrite, reporter)
            lap("recover")
        if job.tasks:
            _share_scores(sweep.base.evaluation, run.evaluation, ("base",))
            worked = _evaluate(job, run, models_of(run, source), machine, reporter)
            found["worked"] = {**pruned.worked, "evaluation": worked}
            found |= _scores(run)
            lap("eval")
    return {**found, "seconds": seconds}


def _recover(
    run: RunDirectory,
    source: ModelSource,
    values: dict[str, Any],
    machine: Machine,
    overwrite: bool,
    reporter: Reporter,
) -> dict[str, Any]:
    settings = RecoverySettings.model_validate(values)
    teacher = source if settings.kl_weight else None
    student = resolve_model(str(run.sliced))
    if feedback := plan_feedback(student, settings, run):
        student = feedback.write(overwrite=overwrite, mend=STALE_HINT, reporter=reporter)
    options: dict[str, Any] = {"trust_remote_code": machine.trust_remote_code, "reporter": reporter}
    plan = plan_recovery(student, teacher, settings, run, overwrite=overwrite, **options)
    if overwrite and plan.finished is None and plan.resumes_after is not None:
        # What was begun may be of other settings.
        plan = plan_recovery(student, teacher, settings, run, restart=True, **options)
    execution = Execution(micro_batch=micro_batch(settings.seq_len))
    result = recover_into(plan, run, machine=machine, execution=execution, reporter=reporter)
    note_recovery(plan, run)
    if result.record["stopped"]:
        reporter.warn(f"training stopped early: {result.record['stopped']}")
    names = ("step", "tokens", "before", "after", "stopped", "seconds")
    return {name: result.record.get(name) for name in names}


def _evaluate(
    job: Job,
    run: RunDirectory,
    models: list[tuple[str, ModelSource]],
    machine: Machine,
    reporter: Reporter,
) -> bool:
    """Measure what is not there yet; whether anything was."""
    _scores, worked = evaluate_into(
        run.evaluation,
        models,
        job.tasks,
        EvaluationSettings(limit=job.limit),
        options=EvaluationOptions(task_data=Path(job.task_data) if job.task_data else None),
        machine=machine,
        overwrite=False,
        reporter=reporter,
    )
    return worked


def _scores(run: RunDirectory) -> dict[str, Any]:
    """Rows as `evaluation.json` has them, and what a reader must know of them; of tasks measured earlier, too."""
    evaluation = read_evaluation(run.evaluation)
    assert evaluation is not None
    notes = {
        f"{score.task}: {note}": None for model in evaluation.models for score in model.scores for note in score.notes
    }
    return {"rows": evaluation.to_json()["rows"], "notes": list(notes), "versions": dict(evaluation.versions)}


def _share_scores(origin: Path, target: Path, labels: tuple[str, ...]) -> None:
    """Put scores that were measured elsewhere into an evaluation; what it holds of other versions is left alone."""
    theirs = read_evaluation(origin)
    if theirs is None:
        return
    shared = Evaluation(tuple(model for model in theirs.models if model.label in labels), theirs.versions)
    there = read_evaluation(target)
    if there is None:
        write_evaluation(shared, target)
        return
    merged, whole = shared.merged_with(there)
    if whole and merged != there:
        write_evaluation(merged, target)


def _link(origin: Path, target: Path, *, anew: bool = False) -> None:
    """Give a file a second name; a copy where the file system has no links. All writers here replace whole files."""
    if target.exists() and (not anew or target.samefile(origin)):
        return
    with atomic_file(target) as temporary:
        temporary.unlink()  # A link takes no name that is there.
        _link_or_copy(str(origin), str(temporary))


def _link_folder(origin: Path, target: Path) -> None:
    if target.exists():
        return
    with atomic_directory(target) as temporary:
        shutil.copytree(origin, temporary, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(origin: str, target: str) -> None:
    try:
        os.link(origin, target)
    except OSError:
        shutil.copy2(origin, target)


def is_finished(run: RunDirectory, entry: dict[str, Any], tasks: tuple[str, ...], recovers: bool) -> bool:
    """Whether a cell that was noted as done still is: its models are those that were measured, on all tasks."""
    if entry.get("state") != "done" or not set(tasks) <= set(entry.get("tasks") or ()):
        return False
    try:
        made = {"sliced": run.sliced, **({"recovered": run.recovered} if recovers else {})}
        digests = {label: resolve_model(str(folder)).digest for label, folder in made.items()}
        if recovers and read_document(run.recovery / RECOVERY_FILE).record.get("digest") != digests["recovered"]:
            return False
        evaluation = read_evaluation(run.evaluation) if tasks else None
    except LapcliError:
        # Missing or damaged: the cell says so when it is its turn.
        return False
    measured = {model.label: model.digest for model in evaluation.models} if evaluation else {}
    return not tasks or all(measured.get(label) == digest for label, digest in digests.items())
