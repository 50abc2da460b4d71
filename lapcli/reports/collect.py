"""What a run directory or a sweep holds, read for a report; what cannot be read is said and left out."""

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lapcli.artifacts import (
    ANALYSIS_FILE,
    CURVE_FILE,
    RECOVERY_FILE,
    Artifact,
    RunDirectory,
    read_artifact,
    read_document,
)
from lapcli.errors import ArtifactError, LapcliError
from lapcli.evaluation.results import Evaluation
from lapcli.families.registry import family_for
from lapcli.families.source import resolve_model
from lapcli.recipe import SelectionSettings
from lapcli.reports import measured
from lapcli.reports.speed import Bench, read_benches
from lapcli.stages.evaluation_file import read_evaluation
from lapcli.sweeps.record import SweepDirectory, SweepRecord, read_sweep
from lapcli.training.curve import Curve

Result = TypeVar("Result")


@dataclass
class Entry:
    """One chain: a run, or a cell of a sweep.

    Attributes:
        name: of it.
        run: where it lies.
        axes: method, ratio or keep, score_from, data, samples, seq_len, seed, recovery, as far as they are known.
        settings: of the stages that ran.
        widths: key width before and after; `None` where unknown.
        state: bytes of a sequence's state, before and after; `None` where unknown.
        evaluation: its scores.
        recoveries: what became of trainings, "recovered" and "control".
        curves: their lines.
        analysis: what `lapcli analyze` found, and its folder's pictures.
        warnings: that were noted.
        failure: why it is not whole.
        commands: that do the same.
    """

    name: str
    run: RunDirectory
    axes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    widths: tuple[int, int] | None = None
    state: tuple[int, int] | None = None
    evaluation: Evaluation | None = None
    recoveries: dict[str, dict[str, Any]] = field(default_factory=dict)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    analysis: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    failure: str | None = None
    commands: list[str] = field(default_factory=list)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The scores, as `evaluation.json` has them."""
        return self.evaluation.to_json()["rows"] if self.evaluation else []


@dataclass
class Found:
    """All that a report speaks of.

    Attributes:
        path: the directory.
        sweep: the record, for a sweep.
        model: name, revision and digest of the base.
        entries: the chains.
        base: the base's scores.
        problems: what could not be read.
        benches: what `lapcli bench` measured.
        folders: with local copies of task data, that a sweep was told of.
        bare: whether there is an evaluation and no run.
    """

    path: Path
    sweep: SweepRecord | None
    model: dict[str, Any]
    entries: list[Entry]
    base: Evaluation | None
    problems: list[str] = field(default_factory=list)
    benches: list[Bench] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    bare: bool = False

    @cached_property
    def base_config(self) -> dict[str, Any] | None:
        """The unpruned model's config, where it is still what it was."""
        try:
            source = resolve_model(self.model["name"], self.model.get("revision"))
        except (LapcliError, KeyError):
            return None
        return dict(source.config) if source.digest == self.model.get("digest") else None

    @cached_property
    def unpruned(self) -> Entry:
        """The base as an entry, for what reads scores of one; where it was not measured alone, as a chain has it."""
        measured = self.base if self.base and any(model.label == "base" for model in self.base.models) else None
        chains = (entry.evaluation for entry in self.entries if entry.evaluation)
        run = SweepDirectory(self.path).base if self.sweep else RunDirectory(self.path)
        return Entry("base", run, evaluation=measured or next(chains, None))


def collect(path: Path, benches: Iterable[Path] = ()) -> Found:
    """Read a run directory or a sweep, or a folder that holds an evaluation and no run.

    Args:
        path: the directory.
        benches: files of `lapcli bench --output`, beside those that lie in it.

    Raises:
        ArtifactError: it is none of them, or its record is damaged; or a file is none of `lapcli bench`.
    """
    found = _collect(path)
    folders = [path, *(entry.run.path for entry in found.entries if found.sweep)]
    found.benches, problems = read_benches(folders, benches)
    found.problems += problems
    return found


def _collect(path: Path) -> Found:
    directory = SweepDirectory(path)
    sweep = read_sweep(directory)
    if sweep is not None:
        found = Found(path, sweep, sweep.model, [], None)
        found.folders = _task_folders(sweep)
        found.base = _try(found, lambda: read_evaluation(directory.base.evaluation))
        for name, noted in sweep.cells.items():
            entry = _entry(found, name, directory.cell(name))
            entry.axes, entry.settings = noted.get("axes", {}), noted["settings"]
            sizes = noted.get("state_bytes")
            entry.state = (sizes["before"], sizes["after"]) if sizes else None
            entry.widths = (noted["key_width"], noted["kept_width"]) if "kept_width" in noted else None
            entry.warnings = list(noted.get("warnings", ()))
            if noted["state"] != "done":
                failure = noted.get("failure")
                entry.failure = failure["message"] if failure else f"not done yet ({noted['state']})"
            entry.commands = _commands(entry, sweep.model["name"], found.folders)
            found.entries.append(entry)
        return found
    run = RunDirectory(path)
    record = run.read_record()
    if record is None:
        return _evaluation_alone(run)
    found = Found(path, None, record["model"], [], None)
    entry = _entry(found, path.name or str(path), run)
    _describe_run(found, entry, record)
    entry.commands = _commands(entry, record["model"]["name"])
    found.entries.append(entry)
    found.base = entry.evaluation
    return found


def _evaluation_alone(run: RunDirectory) -> Found:
    """What `lapcli eval --model` leaves where there is no run."""
    evaluation = read_evaluation(run.evaluation)
    if evaluation is None or not evaluation.models:
        raise ArtifactError(
            f"there is neither a run nor a sweep in {run.path}, and no evaluation.json either",
            "make one with `lapcli prune`, `lapcli sweep`, or `lapcli eval --model`",
        )
    first = evaluation.models[0]
    model = {"name": first.name, "revision": first.revision, "digest": first.digest}
    entry = Entry(run.path.name or str(run.path), run, evaluation=evaluation)
    entry.commands = _commands(entry, first.name, alone=True)
    return Found(run.path, None, model, [entry], evaluation, bare=True)


def _task_folders(sweep: SweepRecord) -> list[Path]:
    """Where the commands of a sweep's sessions had task data looked for."""
    words = [each.get("command") or [] for each in sweep.sessions]
    pairs = [pair for command in words for pair in pairwise(command)]
    joined = [word.removeprefix("--task-data=") for command in words for word in command if "--task-data=" in word]
    named = [value for option, value in pairs if option == "--task-data"]
    return [Path(name) for name in dict.fromkeys([*named, *joined])]


def _try(found: Found, read: Callable[[], Result]) -> Result | None:
    """What can be read; otherwise a problem is noted."""
    try:
        return read()
    except LapcliError as error:
        found.problems.append(error.message)
        return None


def _entry(found: Found, name: str, run: RunDirectory) -> Entry:
    entry = Entry(name, run)
    entry.evaluation = _try(found, lambda: read_evaluation(run.evaluation))
    for label, folder in (("recovered", run.recovery), ("control", run.control_recovery)):
        if (folder / RECOVERY_FILE).is_file():
            lineage = _try(found, lambda folder=folder: read_document(folder / RECOVERY_FILE, "recovery"))
            if lineage is not None:
                entry.recoveries[label] = {"settings": lineage.settings, **lineage.record}
        lines = Curve(folder / CURVE_FILE).lines()
        if lines:
            entry.curves[label] = lines
    analysis = run.analysis / ANALYSIS_FILE
    if analysis.is_file():
        entry.analysis = _try(found, lambda: _analysis(analysis))
    return entry


def _analysis(path: Path) -> dict[str, Any]:
    from lapcli.analysis.results import Analysis

    artifact = read_artifact(path, "analysis")
    try:
        analysis = Analysis(artifact.tensors(), artifact.lineage.record)
        summary = analysis.summary()
        means = {label: analysis.utilisation(label).mean(1).tolist() for label in analysis.labels}
        summary |= {"positions": analysis.positions, "utilisation": means}
    except (KeyError, RuntimeError, StopIteration) as error:
        raise ArtifactError(f"{path} cannot be read: {error!r}") from error
    return {**summary, "settings": artifact.lineage.settings}


def _describe_run(found: Found, entry: Entry, record: dict[str, Any]) -> None:
    """What a sweep's record would say of a cell, from the artifacts of a run."""
    run = entry.run
    calibration = _artifact(found, run.calibration, "calibration")
    selection = _artifact(found, run.selection, "selection")
    if calibration is not None:
        entry.settings["calibration"] = dict(calibration.lineage.settings)
    if selection is not None:
        chosen = dict(selection.lineage.settings)
        kept = chosen.pop("kept_width", None)
        asked = [command["selection"] for command in record["commands"] if "selection" in command]
        typed = next((each for each in reversed(asked) if isinstance(each, dict)), None)
        if typed is not None and all(typed.get(name) == value for name, value in chosen.items()):
            chosen = typed
        else:
            chosen |= {"keep": kept}
        entry.settings["selection"] = chosen
    if "recovered" in entry.recoveries:
        entry.settings["recovery"] = entry.recoveries["recovered"]["settings"]
    noted = {**entry.settings.get("calibration", {}), **entry.settings.get("selection", {})}
    wanted = ("method", "ratio", "keep", "score_from", "data", "samples", "seq_len", "seed")
    entry.axes = {name: noted[name] for name in wanted if noted.get(name) is not None}
    base = _try(found, lambda: resolve_model(found.model["name"], found.model.get("revision")))
    if base is not None and base.digest != found.model["digest"]:
        found.problems.append(f"{base.name} has changed since the run was made; its sizes are left out")
        base = None
    if base is not None and run.sliced.is_dir():
        sliced = _try(found, lambda: resolve_model(str(run.sliced)))
        sizes = [
            (layers[0].key_width, sum(layer.state_bytes() for layer in layers))
            for source in (base, sliced)
            if source is not None and (layers := family_for(source.config).layers(source.config))
        ]
        if len(sizes) == 2:
            entry.widths = (sizes[0][0], sizes[1][0])
            entry.state = (sizes[0][1], sizes[1][1])


def _artifact(found: Found, path: Path, kind: str) -> Artifact | None:
    return _try(found, lambda: read_artifact(path, kind)) if path.is_file() else None


def _commands(entry: Entry, model: str, folders: Iterable[Path] = (), *, alone: bool = False) -> list[str]:
    """Commands that make the chain anew, with the settings that are stored with it."""
    run = ["--run", str(entry.run.path)]
    lines: list[list[str]] = []
    calibration, selection = entry.settings.get("calibration"), entry.settings.get("selection")
    if calibration:
        text = _options(calibration, {"data": "data", "samples": "samples", "seq_len": "seq-len", "rows": "rows"})
        text += [f"--{name}" for name in ("normalized", "exact") if calibration.get(name)]
        grad = ["--grad"] if selection and selection.get("method") == "grad" else []
        lines.append(["calibrate", model, *text, *grad, "--seed", str(calibration["seed"]), *run])
    if selection:
        defaults = SelectionSettings().document()
        changed = {
            name: value
            for name, value in selection.items()
            if name in ("method", "ratio", "keep") or value != defaults.get(name)
        }
        names = {
            name: name.replace("_", "-") for name in ("method", "ratio", "keep", "score_from", "align", "f", "seed")
        }
        lines += [["select", *_options(changed, names), *run], ["slice", *run]]
    for label, found in entry.recoveries.items():
        settings = found["settings"]
        names = {
            "data": "data", "samples": "samples", "steps": "steps", "batch": "batch-size", "seq_len": "seq-len",
            "lr": "lr", "lr_min": "lr-min", "warmup": "warmup", "weight_decay": "weight-decay",
            "kl_weight": "kl-weight", "temperature": "temperature", "rank": "lora-rank", "alpha": "lora-alpha",
            "validation": "validation", "seed": "seed", "lambda_init": "lambda-init",
        }  # fmt: skip
        targets = [part for target in settings.get("targets") or () for part in ("--lora-target", str(target))]
        flags = ["--full"] if settings.get("full") else []
        flags += ["--control"] if label == "control" else []
        flags += ["--add-query-feedback"] if settings.get("add_query_feedback") else []
        lines.append(["recover", *_options(settings, names), *targets, *flags, *run])
    if entry.evaluation is not None:
        lines += [[*line, *run] for line in measured.commands(entry.evaluation, folders, alone=alone)]
    return ["lapcli " + shlex.join(line) for line in lines]


def _options(values: dict[str, Any], names: dict[str, str]) -> list[str]:
    found = [(option, values[name]) for name, option in names.items() if values.get(name) is not None]
    return [part for option, value in found for part in (f"--{option}", _plain(value))]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
