"""Pruning: calibration, selection and slicing in one run directory, each step skipped where its result is there."""

from dataclasses import asdict, dataclass
from typing import Any

from lapcli.artifacts import Artifact, RunDirectory, read_artifact
from lapcli.data import check_source, parse_mixture
from lapcli.errors import ArtifactError, FamilyError
from lapcli.families.base import StatefulLayer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource, refuse_quantised, resolve_model
from lapcli.machine import Machine
from lapcli.parallel import ALONE, Processes
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.selectors.budget import KeptWidth
from lapcli.stages.calibration import calibrate, check_calibration, has_saliency
from lapcli.stages.cutting import Mtp, mtp_of
from lapcli.stages.evaluation_file import forget_stale
from lapcli.stages.lineage import calibration_lineage, cut_from, refuse_stale
from lapcli.stages.rotating import refuse_unturnable
from lapcli.stages.selection import budget_for, select
from lapcli.stages.slicing import SlicePlan, slice_into


@dataclass(frozen=True)
class PrunePlan:
    """What pruning will do.

    Attributes:
        layers: the stateful layers.
        width: the kept width and what became of the ratio.
        needs_saliency: whether gradients are needed.
        calibration_ready: whether a calibration of these inputs is there.
        tokens: tokens that the calibration reads.
        state_bytes_before: state of one sequence over all layers, fp32.
        state_bytes_after: likewise, pruned.
        pruned_before: what the model was cut from earlier, or `None`.
        mtp: what becomes of the head that predicts further tokens; `None` where there is none.
    """

    layers: tuple[StatefulLayer, ...]
    width: KeptWidth
    needs_saliency: bool
    calibration_ready: bool
    tokens: int
    state_bytes_before: int
    state_bytes_after: int
    pruned_before: str | None
    mtp: Mtp | None


@dataclass(frozen=True)
class PruneResult:
    """What pruning left.

    Attributes:
        calibration: the calibration.
        selection: the selection.
        plan: sizes before and after.
        width: the kept width.
        worked: which steps did any work.
    """

    calibration: Artifact
    selection: Artifact
    plan: SlicePlan
    width: KeptWidth
    worked: dict[str, bool]

    def document(self, run: RunDirectory) -> dict[str, Any]:
        """The result, JSON-able."""
        return {
            "run": str(run.path),
            "model": self.calibration.lineage.model,
            "method": self.selection.lineage.settings["method"],
            "key_width": self.width.original,
            "kept_width": self.width.width,
            "removed": self.width.achieved,
            "layers": len(self.plan.layers),
            "state_bytes": {"before": self.plan.state_bytes_before, "after": self.plan.state_bytes_after},
            "weight_bytes": {"before": self.plan.bytes_before, "after": self.plan.bytes_after},
            "worked": self.worked,
            "calibration": str(run.calibration),
            "selection": str(run.selection),
            "sliced": str(run.sliced),
        }


def plan_pruning(
    source: ModelSource,
    calibration: CalibrationSettings,
    selection: SelectionSettings,
    run: RunDirectory,
    *,
    overwrite: bool = False,
) -> PrunePlan:
    """Check a request and say what it means, without reading any weights.

    Args:
        source: the model.
        calibration: the text and its amount.
        selection: the method and its budget.
        run: the run directory.
        overwrite: whether results of other inputs, or damaged ones, give way.

    Raises:
        LapcliError: whatever `prune` would refuse and can be known now.
    """
    refuse_quantised(source.config, source.name)
    layers = family_for(source.config).layers(source.config)
    assert source.headers  # raises where there are no safetensors, or damaged ones
    if not layers:
        raise FamilyError(f"{source.name} has no layer with a state, so there is nothing to prune")
    budget = budget_for(layers[0].key_width, selection)
    family_for(source.config).sliced_config(source.config, budget.width.width)  # raises where no config says it
    if budget.selector.rotates:
        refuse_unturnable(source, layers)
    needs_saliency = any(name.startswith("saliency") for name in budget.selector.needs(selection.score_from))
    there = calibration_there(source, calibration, run)
    if there is None:
        source.check_tokenizer()
        for part in parse_mixture(calibration.data):
            check_source(part.name)
        check_calibration(source, calibration, SilentReporter())
    plan = PrunePlan(
        layers=layers,
        width=budget.width,
        needs_saliency=needs_saliency,
        calibration_ready=there is not None and (not needs_saliency or has_saliency(there)),
        tokens=calibration.samples * calibration.seq_len,
        state_bytes_before=sum(layer.state_bytes() for layer in layers),
        state_bytes_after=sum(layer.state_bytes(budget.width.width) for layer in layers),
        pruned_before=_pruned_before(source),
        mtp=mtp_of(source)[0],
    )
    if not overwrite:
        _refuse_stale_results(source, calibration, selection, plan, run)
    return plan


def calibration_there(
    source: ModelSource, calibration: CalibrationSettings, run: RunDirectory, *, strict: bool = False
) -> Artifact | None:
    """The run's calibration where it is one of these inputs.

    Args:
        source: the model.
        calibration: the text and its amount.
        run: the run directory.
        strict: whether one of other inputs, or a damaged one, is refused; otherwise it counts as none.

    Raises:
        ArtifactError: as `strict` says.
    """
    if not run.calibration.is_file():
        return None
    try:
        existing = read_artifact(run.calibration, "calibration")
        refuse_stale(calibration_lineage(source, calibration), existing.lineage, run.calibration)
    except ArtifactError:
        if strict:
            raise
        return None
    return existing


def _pruned_before(source: ModelSource) -> str | None:
    lineage = cut_from(source.path)
    return None if lineage is None else str(lineage.model.get("name"))


def _refuse_stale_results(
    source: ModelSource,
    calibration: CalibrationSettings,
    selection: SelectionSettings,
    plan: PrunePlan,
    run: RunDirectory,
) -> None:
    """Refuse results of other inputs before the costly step, not after it."""
    calibration_there(source, calibration, run, strict=True)
    if run.selection.is_file():
        found = read_artifact(run.selection, "selection").lineage
        wanted = {**selection.document(), "kept_width": plan.width.width}
        differing = [
            f"{key}: {wanted[key]} wanted, {value} found"
            for key, value in found.settings.items()
            if wanted.get(key) != value
        ]
        if found.model.get("digest") != source.digest:
            differing.append(f"model: {source.name} wanted, {found.model.get('name')} found")
        if differing:
            raise ArtifactError(
                f"{run.selection} was made with other settings: " + "; ".join(differing),
                "pass --overwrite to replace selection and slice (the calibration is kept), or --run DIR to keep both",
            )


def prune(
    source: ModelSource,
    calibration: CalibrationSettings,
    selection: SelectionSettings,
    run: RunDirectory,
    *,
    machine: Machine | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    checkpoint_seconds: float = 20.0,
    processes: Processes = ALONE,
) -> PruneResult:
    """Calibrate, select and slice, leaving the results in a run directory; what is there already is not done again.

    Args:
        source: the model.
        calibration: the text and its amount.
        selection: the method and its budget.
        run: the run directory; the caller holds its lock.
        machine: where it runs.
        overwrite: whether results of other inputs give way.
        reporter: where progress goes.
        checkpoint_seconds: how often a calibration under way is saved.
        processes: which this process leads; the others `assist` in the calibration.

    Returns:
        The artifacts, the sizes, and which steps did any work.

    Raises:
        LapcliError: see the three stages.
    """
    reporter = reporter or SilentReporter()
    plan = plan_pruning(source, calibration, selection, run, overwrite=overwrite)
    if plan.pruned_before:
        reporter.notice(
            f"{source.name} was pruned before, from {plan.pruned_before}; the ratio is of the "
            f"{plan.width.original} channels that are there now"
        )
    calibrated, did_calibrate = calibrate(
        source,
        calibration,
        run.calibration,
        machine=machine,
        saliency=plan.needs_saliency,
        overwrite=overwrite,
        reporter=reporter,
        checkpoint_seconds=checkpoint_seconds,
        processes=processes,
    )
    selected, did_select = select(calibrated, selection, run.selection, overwrite=overwrite, reporter=reporter)
    sliced, did_slice = slice_into(source, selected, run.sliced, overwrite=overwrite, reporter=reporter)
    if did_slice:
        forget_stale(run.evaluation, "sliced", resolve_model(str(run.sliced)).digest, reporter)
    result = PruneResult(
        calibration=calibrated,
        selection=selected,
        plan=sliced,
        width=plan.width,
        worked={"calibration": did_calibrate, "selection": did_select, "slicing": did_slice},
    )
    run.note(source.describe(), "prune", {"selection": selection.document(), "calibration": calibration.document()})
    return result


def plan_document(plan: PrunePlan) -> dict[str, Any]:
    """The plan, JSON-able."""
    document = asdict(plan)
    document["width"] = {"kept": plan.width.width, "of": plan.width.original, "removed": plan.width.achieved}
    document["layers"] = len(plan.layers)
    return document
