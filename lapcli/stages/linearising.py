"""Conversion of a Transformer to dual-state attention, layer by layer: each prefix of the order is a working model.

One directory holds it all: the teacher (`base/`), what was measured of its layers (`sensitivity.safetensors`), the
layers that are converted, one artifact each in the order of their conversion (`prefixes/`), the curve of each training
(`training/`), a summary (`conversion.json`) and the models that were asked for (`models/`). A prefix needs the
artifacts up to its own, so that any fraction can be written out later, and a conversion goes on from where it is.

Source: arXiv 2506.09316, Sec. 4.3 and 4.4.
"""

import contextlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import Artifact, Lineage, RunDirectory, artifact_digest, is_conversion, taken, write_document
from lapcli.artifacts.taken import made_there
from lapcli.data import check_source, parse_mixture
from lapcli.errors import ArtifactError, ModelError, UsageError
from lapcli.evaluation.harness import check_names
from lapcli.evaluation.tasks import expand, parse_tasks
from lapcli.families.dual_state import TEACHERS, model_code
from lapcli.families.remote.lapcli_dual_state import DualStateSettings
from lapcli.families.source import (
    LOADED_BY_CODE,
    ModelSource,
    refuse_quantised,
    resolve_model,
)
from lapcli.linearising.chain import Chain
from lapcli.linearising.command import convert_command
from lapcli.linearising.kept import checked, keep_teacher, kept_teacher, state_of_teacher
from lapcli.linearising.layer_order import layer_order
from lapcli.linearising.plan import SUMMARY_FILE, LinearisingPlan, Place, Shape, holds_conversion
from lapcli.linearising.record import converted, measured, summarise
from lapcli.linearising.settings import LinearisingSettings, layers_of
from lapcli.machine import Machine
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.calibration import check_length
from lapcli.stages.dual_state_writing import write_converted
from lapcli.stages.lineage import LINEAGE_FILE, OWN_DIGEST, refuse_stale, sliced_lineage
from lapkernels._triton import quick_searches

_STAGE = "linearising"


@dataclass(frozen=True)
class LinearisingResult:
    """What a conversion left.

    Attributes:
        output: the model of the fraction that was asked for.
        order: the layers in the order of their conversion, as far as they are converted.
        prefixes: what was measured of each prefix.
        teacher: of the teacher on the same text.
        correlations: of the measures of sensitivity.
        worked: whether anything was done now.
    """

    output: Path
    order: list[int]
    prefixes: list[dict[str, Any]]
    teacher: dict[str, float]
    correlations: dict[str, float]
    worked: bool

    def document(self) -> dict[str, Any]:
        """The result, JSON-able."""
        return {
            "converted": str(self.output),
            "worked": self.worked,
            "order": self.order,
            "prefixes": self.prefixes,
            "teacher": self.teacher,
            "rank_correlations": self.correlations,
        }


def plan_linearising(
    source: ModelSource,
    settings: LinearisingSettings,
    fraction: str,
    root: Path,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    tasks: Sequence[str] = (),
) -> LinearisingPlan:
    """Check a request and say what it means, without reading weights or text.

    Args:
        source: the teacher.
        settings: of the conversion.
        fraction: of the layers, as it was typed.
        root: the directory of the conversion.
        output: of the model; by default in that directory.
        overwrite: whether a conversion of other inputs gives way.
        tasks: that each new prefix is to be measured on.

    Raises:
        LapcliError: whatever the conversion would refuse and can be known now.
    """
    if source.config.get("model_type") not in TEACHERS:
        if "dual_state" in source.config:
            raise ModelError(
                f"{source.name} is converted already", "name the model that it was made from, and a larger --fraction"
            )
        model_code(source.config)  # raises, with those that can be converted
    refuse_quantised(source.config, source.name)
    assert source.headers  # raises where there are no safetensors, or damaged ones
    source.check_tokenizer()
    for part in (settings.sensitivity, settings.distillation):
        check_length(source, part.seq_len)
        for each in parse_mixture(part.data):
            check_source(each.name)
    ordering = [settings.order.removeprefix("task:")] if settings.order.startswith("task:") else []
    if ordering or tasks:
        infos = expand(parse_tasks([*ordering, *tasks]))
        check_names([info.harness_name for info in infos if info.harness_name is not None])
    shape, place = Shape.of(source.config), Place(root)
    number = layers_of(fraction, shape.layers)
    plan = LinearisingPlan(
        source, settings, shape, number, place, 0, (), output or place.model(number, shape.layers), overwrite
    )
    if settings.layer.window is not None and plan.window() < 1:
        raise UsageError(
            f"{settings.layer.sinks} sinks take the memory of the states already",
            "pass fewer --sinks, or more --states",
        )
    if not root.exists():
        return plan
    _check_ours(place)
    if overwrite:
        if root.resolve() in source.path.resolve().parents:
            raise ArtifactError(
                f"{root} holds {source.name} itself, which --overwrite would remove", "name another with --output"
            )
        return plan
    state_of_teacher(plan)
    found = measured(plan)
    return replace(plan, done=len(converted(plan)), measured=() if found is None else found.names)


def linearise_into(
    plan: LinearisingPlan,
    *,
    machine: Machine | None = None,
    micro_batch: int | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    cuda_graphs: bool = True,
    reporter: Reporter | None = None,
) -> LinearisingResult:
    """Convert layers in order of sensitivity, or go on where that was stopped; then write the model that was asked for.

    Args:
        plan: of `plan_linearising`.
        machine: where it runs.
        micro_batch: sequences that are computed at once.
        tasks: on which each prefix that is trained now is measured, beside the held-out text.
        limit: items of each task.
        cuda_graphs: whether training steps are CUDA graphs on a GPU, where they can be; results differ by rounding at
            most.
        reporter: where progress goes.

    Raises:
        LapcliError: text that is too short, weights that are not finite, a full disk, other inputs than those of the
            conversion that is there.
    """
    machine, reporter = machine or Machine(), reporter or SilentReporter()
    _refuse_half_on_cpu(machine, plan.source.config)
    place = plan.place
    # The first layer waits for kernels that are searched among hundreds.
    searching = quick_searches() if machine.torch_device().type == "cuda" else contextlib.nullcontext()
    with RunDirectory(place.root).lock(), searching:
        if plan.overwrite:
            _forget(place)
        worked = keep_teacher(plan, reporter)
        order, found = layer_order(plan, machine, reporter)
        chain = Chain(plan, order, machine, micro_batch, tasks, limit, reporter, cuda_graphs)
        worked = bool(chain.run()) or worked
        prefixes = converted(plan)
        summary = summarise(plan, prefixes, found)
        exported = export_prefix(place.root, plan.number, plan.output, overwrite=plan.overwrite, reporter=reporter)
    return LinearisingResult(
        plan.output,
        [artifact.lineage.settings["layer"] for artifact in prefixes],
        summary["prefixes"],
        summary["teacher"],
        summary["rank_correlations"],
        worked or exported,
    )


def _refuse_half_on_cpu(machine: Machine, config: dict[str, Any]) -> None:
    if machine.torch_device().type == "cpu" and machine.torch_dtype(config) in (torch.bfloat16, torch.float16):
        raise UsageError(
            f"--dtype {machine.dtype} on a CPU: what is trained is in fp32, and so must the rest be there",
            "pass --dtype float32, or none",
        )


def export_prefix(
    root: Path,
    number: int,
    output: Path,
    *,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> bool:
    """Write the model whose first `number` layers, in the order of their conversion, are converted.

    Args:
        root: the directory of the conversion.
        number: of layers.
        output: the model's directory.
        overwrite: whether something else there gives way.
        reporter: where progress goes.

    Returns:
        Whether it was written now; it is not where the very model is there already.

    Raises:
        ArtifactError: so many layers were not converted; something else lies at `output`; a full disk.
    """
    base, chosen = prefix_of(root, number)
    lineage = Lineage(
        kind="model",
        model=base.describe(),
        family="dsla",
        settings={"stage": _STAGE, "layers": [each.lineage.settings["layer"] for each in chosen]},
        parents={"layer": artifact_digest(chosen[-1])},
    )
    check_export(root, output, overwrite=overwrite)
    if output.exists() and not overwrite:
        there = sliced_lineage(output)
        assert there is not None, "checked above"
        refuse_stale(lineage, there, output, "pass --overwrite, or name another place")
        if resolve_model(str(output)).digest == there.record.get(OWN_DIGEST):
            return False
        (reporter or SilentReporter()).warn(f"{output} is damaged; it is made again")
    tensors: dict[str, Tensor] = {}
    for artifact in chosen:
        tensors |= artifact.tensors()
    settings = DualStateSettings(**{**chosen[-1].lineage.settings["dual_state"], "layers": lineage.settings["layers"]})
    write_converted(
        base, settings.as_config(), tensors, output,
        card=_card(base, chosen, Shape.of(base.config).layers), overwrite=True, reporter=reporter,
    )  # fmt: skip
    write_document(output / LINEAGE_FILE, replace(lineage, record={OWN_DIGEST: resolve_model(str(output)).digest}))
    return True


def prefix_of(root: Path, number: int) -> tuple[ModelSource, list[Artifact]]:
    """The teacher of a conversion, and the first `number` of its converted layers.

    Raises:
        ArtifactError: so many were not converted; or the teacher is damaged.
    """
    place = Place(root)
    base = kept_teacher(place)
    found, count = checked(place, base), Shape.of(base.config).layers
    if number > len(found):
        raise ArtifactError(
            f"{root} holds {len(found)} converted layers of {count}, and {number} are asked for",
            convert_command(root, f"{number / count:.4g}"),
        )
    return base, found[:number]


def check_export(root: Path, output: Path, *, overwrite: bool = False) -> None:
    """Refuse a place for a model of a conversion that something else would have to leave.

    Args:
        root: the directory of the conversion.
        output: the model's.
        overwrite: whether another model that lapcli wrote there gives way.

    Raises:
        ArtifactError: naming what lies there.
    """
    place, base = output.resolve(), root.resolve() / "base"
    if base == place or base in place.parents or place in base.parents:
        raise ArtifactError(f"{output} is, holds or lies in {base}, which is needed here", "name another place")
    there = sliced_lineage(output) if output.exists() else None
    if output.exists() and (there is None or there.settings.get("stage") != _STAGE):
        raise taken(output)


def number_of(root: Path, fraction: str) -> int:
    """How many layers a fraction of a conversion's teacher is.

    Raises:
        ArtifactError: there is no conversion.
        UsageError: it is no fraction.
    """
    if not holds_conversion(root):
        raise ArtifactError(f"{root} holds no conversion to dsla", "make one with lapcli convert MODEL --to dsla")
    return layers_of(fraction, Shape.of(resolve_model(str(root / "base")).config).layers)


def default_export(root: Path, number: int) -> Path:
    """Where the model of a prefix goes if nobody says."""
    return Place(root).model(number, Shape.of(resolve_model(str(root / "base")).config).layers)


def _check_ours(place: Place) -> None:
    """Refuse a directory with anything in it that a conversion does not write."""
    ours = {"base", "prefixes", "training", "models", SUMMARY_FILE, place.sensitivity.name}
    if not place.root.is_dir():
        raise ArtifactError(f"{place.root} is no directory", "name another with --output")
    other = sorted(path.name for path in place.root.iterdir() if path.name not in ours and path.name[0] != ".")
    if other and made_there(place.root) is not None and not is_conversion(place.root):
        raise taken(place.root, "name another directory with --output")
    if other:
        raise ArtifactError(
            f"{place.root} holds {other[0]}, which no conversion writes", "name another directory with --output"
        )


def _forget(place: Place) -> None:
    """Remove an earlier conversion, and nothing else."""
    _check_ours(place)
    for path in (place.base, place.prefixes, place.root / "training", place.root / "models"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (place.summary, place.sensitivity):
        path.unlink(missing_ok=True)


def _card(base: ModelSource, chosen: Sequence[Artifact], count: int) -> str:
    last = chosen[-1].lineage.record
    settings = chosen[-1].lineage.settings
    rows = "".join(
        f"| {each['number']} | {each['layer']} | {each['alignment']['before']:.4f} | "
        f"{each['alignment']['after']:.4f} | {each['kl']:.4f} | {math.exp(each['cross_entropy']):.3f} |\n"
        for each in (artifact.lineage.record for artifact in chosen)
    )
    distillation = settings["distillation"]
    what = "sliding windows with sinks" if settings["dual_state"]["window"] is not None else "dual-state attention"
    return (
        f"# {base.config.get('model_type')} with {len(chosen)} of {count} attention layers as {what}\n\n"
        f"Made by lapcli (`lapcli convert --to dsla`). Each layer was trained on {last['tokens']} tokens of "
        f"`{distillation['data']}`"
        + (" with those before it in place" if distillation["chained"] else " by itself")
        + f". Held out: {distillation['validation']} sequences of {distillation['seq_len']} tokens, on which the "
        f"teacher has a perplexity of {math.exp(last['teacher_cross_entropy']):.3f}.\n\n"
        "| number | layer | alignment before | after | KL of the prefix | perplexity of the prefix |\n"
        f"| --- | --- | --- | --- | --- | --- |\n{rows}\n{LOADED_BY_CODE}\n\n"
        f"`{LINEAGE_FILE}` holds what it was made from. The teacher's licence holds.\n"
    )
