"""Sweeping: a recipe with axes in; a cell for each point of the grid out, every one an ordinary run directory.

One calibration serves all cells of its text, amount and seed; the unpruned model is measured once; cells that keep the
same channels share one slice and its scores. Workers do the cells in processes of their own, and what fails is noted
while the rest goes on.
"""

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from lapcli.artifacts import RunDirectory
from lapcli.data import check_source, parse_mixture
from lapcli.errors import ArtifactError, UsageError
from lapcli.evaluation.lengths import resolve_max_length
from lapcli.evaluation.run import prepare, versions
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource, refuse_quantised
from lapcli.machine import Machine
from lapcli.recipe import EvaluationRequest
from lapcli.reporting import SilentReporter
from lapcli.stages.calibration import check_calibration, has_saliency
from lapcli.stages.evaluation import plan_stage
from lapcli.stages.pruning import calibration_there
from lapcli.stages.query_feedback import plan_feedback
from lapcli.stages.recovery import check_recovery
from lapcli.stages.rotating import refuse_unturnable
from lapcli.stages.selection import budget_for
from lapcli.sweeps.cells import Cell
from lapcli.sweeps.pool import Pool, Slot
from lapcli.sweeps.record import SweepDirectory, SweepRecord, read_sweep
from lapcli.sweeps.work import Job, is_finished


class Listener(Protocol):
    """Whoever shows a sweep under way."""

    def changed(self, record: SweepRecord, name: str | None) -> None:
        """The state of a job changed; `None`: nothing did, but some time went by."""
        ...

    def progress(self, name: str, text: str) -> None:
        """How far a job is."""
        ...

    def said(self, name: str, kind: str, text: str) -> None:
        """A job has a "notice" or a "warning" for the user."""
        ...


class SilentListener:
    """Hears and forgets."""

    def changed(self, record: SweepRecord, name: str | None) -> None:
        """Do nothing."""

    def progress(self, name: str, text: str) -> None:
        """Do nothing."""

    def said(self, name: str, kind: str, text: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class CalibrationPlan:
    """A calibration that cells share.

    Attributes:
        settings: as they are stored.
        tokens: that it reads.
        saliency: whether a cell that is still to do needs it for Grad.
        ready: whether it is there, with what is needed.
    """

    settings: dict[str, Any]
    tokens: int
    saliency: bool
    ready: bool


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep will do.

    Attributes:
        source: the base model.
        cells: all of them.
        finished: names of those that are there already.
        calibrations: by name.
        evaluation: what is measured at the end of each cell, if anything.
        base_ready: whether the base's scores are there.
        task_data: folder with local copies of task data.
        record: of what is there.
        machine: where it runs.
        overwrite: whether results of other settings give way.
        fetched: tasks whose data is looked for on the hub or in its cache.
    """

    source: ModelSource
    cells: tuple[Cell, ...]
    finished: frozenset[str]
    calibrations: dict[str, CalibrationPlan]
    evaluation: EvaluationRequest | None
    base_ready: bool
    task_data: Path | None
    record: SweepRecord
    machine: Machine
    overwrite: bool
    fetched: tuple[str, ...] = ()

    @property
    def to_do(self) -> list[Cell]:
        """Cells that are not there."""
        return [cell for cell in self.cells if cell.name not in self.finished]

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        to_do = self.to_do
        missing = [plan for plan in self.calibrations.values() if not plan.ready]
        return {
            "model": self.source.name,
            "cells": len(self.cells),
            "cells_there": sorted(self.finished),
            "cells_to_do": [cell.name for cell in to_do],
            "slices": len({cell.slice_key for cell in self.cells}),
            "calibrations": {name: asdict(plan) for name, plan in self.calibrations.items()},
            "calibration_tokens": sum(plan.tokens for plan in missing),
            "recovery_tokens": sum(cell.recovery.tokens for cell in to_do if cell.recovery),
            "tasks": self.evaluation.tasks if self.evaluation else [],
            "base_evaluated": self.base_ready,
            "data_from_the_hub": list(self.fetched),
        }


def plan_sweep(
    source: ModelSource,
    cells: Sequence[Cell],
    evaluation: EvaluationRequest | None,
    directory: SweepDirectory,
    *,
    machine: Machine,
    task_data: Path | None = None,
    overwrite: bool = False,
) -> SweepPlan:
    """Check every cell and say what there is to do, without reading any weights.

    Args:
        source: the base model.
        cells: as `lapcli.sweeps.cells.expand` gives them.
        evaluation: what is measured.
        directory: the sweep's.
        machine: where it will run.
        task_data: folder with local copies of task data.
        overwrite: whether cells of other settings give way.

    Raises:
        LapcliError: whatever a stage would refuse and can be known now; or the directory holds another sweep.
    """
    refuse_quantised(source.config, source.name)
    layers = family_for(source.config).layers(source.config)
    source.check_tokenizer()
    texts = {cell.calibration_name: cell.calibration for cell in cells}
    for text in texts.values():
        for part in parse_mixture(text.data):
            check_source(part.name)
        check_calibration(source, text, SilentReporter())
    needs: dict[str, bool] = {}
    for cell in cells:
        selector = budget_for(layers[0].key_width, cell.selection).selector
        if selector.rotates:
            refuse_unturnable(source, layers)
        needs[cell.name] = any(need.startswith("saliency") for need in selector.needs(cell.selection.score_from))
    machine.check(source.config, layers, needs_gradient=any(needs.values()))
    if machine.split:
        raise UsageError("--device split is for calibrate and prune", "pass --device auto, cpu or cuda")
    recoveries = {str(cell.recovery.document()): cell.recovery for cell in cells if cell.recovery}
    for settings in recoveries.values():
        # The base stands in for slices that are not there yet.
        plan_feedback(source, settings, directory.base)
        guide = source if settings.kl_weight else None
        check_recovery(source, guide, settings, trust_remote_code=machine.trust_remote_code)
        machine.check(source.config, layers, needs_gradient=True)
    record = read_sweep(directory)
    if record is None:
        _refuse_other_use(directory)
        record = SweepRecord(source.describe())
    if record.model.get("digest") != source.digest:
        raise ArtifactError(
            f"{directory.record} is a sweep of {record.model.get('name')} ({str(record.model.get('digest'))[:12]}), "
            f"not of {source.name} ({source.digest[:12]})",
            "pass another --run DIR",
        )
    if not overwrite:
        _refuse_other_settings(record, cells, evaluation, directory)
    tasks = tuple(evaluation.tasks) if evaluation else ()
    base_ready = True
    if evaluation:
        wanted = plan_stage(
            directory.base.evaluation, [("base", source)], tasks, EvaluationSettings(limit=evaluation.limit),
            options=EvaluationOptions(task_data=task_data), machine=machine,
        )  # fmt: skip
        base_ready = not wanted.missing("base")
    finished: set[str] = set()
    for cell in cells:
        entry = record.cells.get(cell.name, {})
        same = _unlike(entry.get("settings", {}), cell.settings()) is None
        recovers = cell.recovery is not None
        if same and is_finished(directory.cell(cell.name), entry, tasks, recovers):
            finished.add(cell.name)
    to_do = [cell for cell in cells if cell.name not in finished]
    fetched: tuple[str, ...] = ()
    if evaluation and (to_do or not base_ready):
        # With overwrite, as cells may lack what the base has: the data of all tasks.
        fetched = plan_stage(
            directory.base.evaluation, [("base", source)], tasks, EvaluationSettings(limit=evaluation.limit),
            options=EvaluationOptions(task_data=task_data), machine=machine, overwrite=True, dry_run=True,
        ).fetched  # fmt: skip
    calibrations: dict[str, CalibrationPlan] = {}
    for name, text in texts.items():
        # What no cell is left to use need not be there.
        users = [needs[cell.name] for cell in to_do if cell.calibration_name == name]
        there = calibration_there(source, text, directory.calibration(name)) if users else None
        ready = not users or (there is not None and (not any(users) or has_saliency(there)))
        calibrations[name] = CalibrationPlan(text.document(), text.samples * text.seq_len, any(users), ready)
    return SweepPlan(
        source, tuple(cells), frozenset(finished), calibrations, evaluation, base_ready, task_data, record, machine,
        overwrite, fetched,
    )  # fmt: skip


def _fetch_data(plan: SweepPlan) -> None:
    """Have the data that no folder holds fetched, or refuse the sweep: before anything is calibrated on."""
    if not plan.fetched or plan.evaluation is None:
        return
    settings = EvaluationSettings(limit=plan.evaluation.limit)
    length = resolve_max_length(settings, [plan.source.config], SilentReporter())
    prepare(plan.fetched, settings, EvaluationOptions(task_data=plan.task_data), length, SilentReporter())


def _unlike(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """What differs between a cell that is there and one that is wanted; a recovery may be there or come later."""
    for stage, settings in wanted.items():
        there = found.get(stage)
        if settings is None or there is None:
            continue
        # Either may have a setting of which the other says nothing.
        for name in {**settings, **there}:
            if there.get(name) != settings.get(name):
                return f"{stage}.{name}: {settings.get(name)} wanted, {there.get(name)} found"
    return None


def _refuse_other_settings(
    record: SweepRecord, cells: Sequence[Cell], evaluation: EvaluationRequest | None, directory: SweepDirectory
) -> None:
    mend = "pass --overwrite to have them made anew, or --run DIR to keep both"
    for cell in cells:
        entry = record.cells.get(cell.name)
        # Of one that never came to an end, each stage refuses what it finds of other settings.
        unlike = _unlike(entry["settings"], cell.settings()) if entry and entry["state"] == "done" else None
        if unlike:
            raise ArtifactError(f"{directory.record}: cell {cell.name} has other settings: {unlike}", mend)
    limit = evaluation.limit if evaluation else None
    if evaluation and record.evaluation and record.evaluation["limit"] != limit:
        raise ArtifactError(
            f"{directory.record}: its cells were measured with limit {record.evaluation['limit']}, not {limit}", mend
        )


def run_sweep(
    plan: SweepPlan,
    directory: SweepDirectory,
    slots: Sequence[Slot],
    *,
    command: Sequence[str] = (),
    listener: Listener | None = None,
) -> SweepRecord:
    """Work on the cells that are not there, one a slot at a time.

    Args:
        plan: of `plan_sweep`.
        directory: the sweep's; the caller holds its lock.
        slots: where work goes on.
        command: as typed, for the record.
        listener: told of every change.

    Returns:
        The record as it was written; what failed is in it.

    Raises:
        LapcliError: the record cannot be written.
        DataError: the data of a task is not to be had.
    """
    listener = listener or SilentListener()
    _fetch_data(plan)
    record = plan.record
    session = {
        "command": list(command),
        "begun": _now(),
        "ended": None,
        "versions": versions(plan.machine.torch_device()),
        "machine": machine_document(),
        "slots": len(slots),
    }
    _enter(plan, record)
    jobs = _jobs(plan, directory)
    if jobs:
        record.sessions.append(session)
    record.write(directory)
    listener.changed(record, None)
    waiting = dict(jobs)
    # By key, the part that failed and how: of one that lacked what another should have made, that other's.
    failed: dict[str, tuple[str, dict[str, Any]]] = {}

    def settle(key: str, event: dict[str, Any]) -> None:
        job = jobs[key].job
        entry = _entry(record, job)
        if event["event"] == "done":
            entry.pop("failure", None)
            _note_done(entry, job, event["result"])
        else:
            failed.setdefault(key, (_shown(job), event))
            entry["state"] = "failed"
            entry["failure"] = {name: event.get(name) for name in ("message", "hint", "traceback", "cause")}
        record.write(directory)
        listener.changed(record, _shown(job))

    def blocked() -> list[tuple[str, str]]:
        return [
            (key, next(need for need in wanted.needs if need in failed))
            for key, wanted in waiting.items()
            if any(need in failed for need in wanted.needs)
        ]

    running: set[str] = set()
    done: set[str] = set()
    try:
        with Pool(slots, directory.logs) as pool:
            while waiting or running:
                while stuck := blocked():
                    for key, need in stuck:
                        del waiting[key]
                        what, event = failed[key] = failed[need]
                        said = f"{what} failed: {event['message']}"
                        cause = event["message"]
                        settle(key, {"event": "failed", "message": said, "hint": event.get("hint"), "cause": cause})
                for slot in pool.idle:
                    ready = next((key for key, wanted in waiting.items() if wanted.needs <= done), None)
                    if ready is None:
                        break
                    job = waiting.pop(ready).job
                    running.add(ready)
                    _entry(record, job)["state"] = "running"
                    record.write(directory)
                    pool.start(job, slot)
                    listener.changed(record, _shown(job))
                for job, event in pool.events(0.25):
                    _hear(record, job, event, listener)
                    if event["event"] in ("done", "failed"):
                        key = _key(job)
                        running.discard(key)
                        if event["event"] == "done":
                            done.add(key)
                        settle(key, event)
                listener.changed(record, None)
    finally:
        for entry in (record.base, *record.calibrations.values(), *record.cells.values()):
            if entry.get("state") == "running":
                entry["state"] = "waiting"
        session["ended"] = _now()
        record.write(directory)
    return record


@dataclass(frozen=True)
class _Wanted:
    """A job and the keys of those that must be done before."""

    job: Job
    needs: frozenset[str]


def _jobs(plan: SweepPlan, directory: SweepDirectory) -> dict[str, _Wanted]:
    """What there is to do, by key, in the order in which it is begun."""
    evaluation = plan.evaluation
    machine = asdict(plan.machine)
    common = {
        "sweep": str(directory.path),
        "model": plan.source.describe(),
        "machine": machine,
        "tasks": tuple(evaluation.tasks) if evaluation else (),
        "limit": evaluation.limit if evaluation else None,
        "task_data": str(plan.task_data) if plan.task_data else None,
        "overwrite": plan.overwrite,
    }
    jobs: dict[str, _Wanted] = {}

    def add(job: Job, needs: set[str]) -> None:
        jobs[_key(job)] = _Wanted(job, frozenset(need for need in needs if need in jobs))

    for name, calibration in plan.calibrations.items():
        if not calibration.ready:
            add(Job("calibrate", name, settings=calibration.settings, saliency=calibration.saliency, **common), set())
    if evaluation and not plan.base_ready:
        add(Job("base", "base", **common), set())
    owners: dict[tuple[Any, ...], Cell] = {}
    for cell in plan.cells:
        owners.setdefault(cell.slice_key, cell)
    counts: dict[tuple[Any, ...], int] = {}
    for cell in plan.to_do:
        counts[cell.slice_key] = counts.get(cell.slice_key, 0) + 1
    for cell in plan.to_do:
        owner = owners[cell.slice_key]
        job = Job("cell", cell.name, settings=cell.settings(), calibration=cell.calibration_name, **common)
        needs = {f"calibrate {cell.calibration_name}", "base base"}
        if counts[cell.slice_key] > 1 and owner.name not in plan.finished:
            # The slice and its scores first, then what differs between those that share it, side by side.
            shared = replace(job, kind="slice", name=owner.name, settings=owner.settings())
            if _key(shared) not in jobs:
                add(shared, needs)
            needs.add(_key(shared))
        if owner is not cell:
            job = replace(job, shares=owner.name)
        add(job, needs)
    return jobs


def _key(job: Job) -> str:
    return f"{job.kind} {job.name}"


def _shown(job: Job) -> str:
    """What a job is called towards the user."""
    if job.kind == "calibrate":
        return f"calibration {job.name}"
    return f"slice of {job.name}" if job.kind == "slice" else job.name


def _entry(record: SweepRecord, job: Job) -> dict[str, Any]:
    if job.kind == "base":
        return record.base
    return (record.calibrations if job.kind == "calibrate" else record.cells)[job.name]


def _enter(plan: SweepPlan, record: SweepRecord) -> None:
    """Note what is wanted, beside what is known of it already."""
    evaluation = plan.evaluation
    if evaluation is not None:
        earlier = (record.evaluation or {}).get("tasks", [])
        record.evaluation = {"tasks": list(dict.fromkeys([*earlier, *evaluation.tasks])), "limit": evaluation.limit}
        if not plan.base_ready:
            record.base |= {"state": "waiting"}
    for name, calibration in plan.calibrations.items():
        entry = record.calibrations.setdefault(name, {"state": "done"})
        entry |= {"settings": calibration.settings, "asked": calibration.tokens}
        if not calibration.ready:
            entry["state"] = "waiting"
    for cell in plan.cells:
        entry = record.cells.setdefault(cell.name, {"state": "waiting"})
        settings = cell.settings()
        if settings["recovery"] is None:
            # One that is there from earlier stays beside what is asked for now.
            settings["recovery"] = entry.get("settings", {}).get("recovery")
        entry |= {"axes": cell.axes, "calibration": cell.calibration_name, "settings": settings}
        if cell.name not in plan.finished:
            entry["state"] = "waiting"


def _hear(record: SweepRecord, job: Job, event: dict[str, Any], listener: Listener) -> None:
    kind = event["event"]
    if kind == "progress":
        listener.progress(_shown(job), event["text"])
    elif kind in ("notice", "warning"):
        if kind == "warning":
            warnings = _entry(record, job).setdefault("warnings", [])
            if event["text"] not in warnings:
                warnings.append(event["text"])
        listener.said(_shown(job), kind, event["text"])


def _note_done(entry: dict[str, Any], job: Job, result: dict[str, Any]) -> None:
    if job.kind == "slice":
        # The cell itself comes after it.
        entry["state"] = "waiting"
        return
    entry["state"] = "done"
    entry["finished"] = _now()
    entry |= result
    if job.kind == "cell":
        entry["tasks"] = list(dict.fromkeys([*entry.get("tasks", []), *job.tasks]))


def _refuse_other_use(directory: SweepDirectory) -> None:
    """Refuse a place that a sweep cannot be in, or should not be."""
    if directory.path.exists() and not directory.path.is_dir():
        raise ArtifactError(f"{directory.path} is no folder, so no sweep can be in it", "pass another --run DIR")
    if RunDirectory(directory.path).record.exists():
        raise ArtifactError(
            f"{directory.path} holds a run, and a sweep would lie between its files", "pass another --run DIR"
        )


def slots_for(gpus: int | None, jobs: int, device: str) -> list[Slot]:
    """Where work goes on: so many GPUs, so many jobs on each (or on the CPU).

    Raises:
        UsageError: there are not so many, or they are none of the device that was asked for.
    """
    for name, value in (("--gpus", gpus), ("--jobs", jobs)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: give at least 1")
    if gpus is None:
        cores = os.cpu_count() or 1
        threads = max(1, cores // jobs) if jobs > 1 else None
        return [Slot(number, threads=threads) for number in range(jobs)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in ("auto", "cuda"):
        raise UsageError(f"--device {device}: with --gpus each worker takes a GPU of its own", "drop one of the two")
    if gpus > count:
        raise UsageError(
            f"--gpus is {gpus}, but there are {count} CUDA devices here",
            f"pass --gpus {count}" if count else "leave --gpus out; --jobs N works on several cells at a time",
        )
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(count)]
    threads = max(1, (os.cpu_count() or 1) // (gpus * jobs))
    # Neighbouring slots on different GPUs, so that a few jobs spread out.
    return [Slot(number, gpu=names[number % gpus], threads=threads) for number in range(gpus * jobs)]


def machine_document() -> dict[str, Any]:
    """The machine, in words."""
    gpus: list[str] = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"processor": platform.machine(), "cores": os.cpu_count(), "gpus": gpus, "system": platform.system()}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
