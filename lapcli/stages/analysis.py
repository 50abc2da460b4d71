"""Analysis: models and text in; rank utilisation, spectra, conditioning, errors and overlap out, with pictures.

Not a link of the chain: it reads what the others left and changes nothing of it. `lapcli.analysis` does the measuring.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.analysis.filters import filter_magnitudes, kept_and_dropped
from lapcli.analysis.pictures import draw
from lapcli.analysis.results import AXES, Analysis, findings_tensors
from lapcli.analysis.selections import (
    conditioning,
    joint_grams,
    kept_channels,
    kept_directions,
    overlap,
    refuse_other_channels,
)
from lapcli.analysis.settings import AnalysisSettings
from lapcli.analysis.stability import TRACKED_ROWS, TRACKED_TOKENS, rows_at_once, summary, track_layers
from lapcli.analysis.states import Walker, bytes_per_sample
from lapcli.analysis.tables import write_tables
from lapcli.analysis.walking import walk
from lapcli.artifacts import (
    ANALYSIS_FILE,
    Artifact,
    Lineage,
    artifact_digest,
    write_artifact,
)
from lapcli.data import fingerprint, token_blocks
from lapcli.errors import LapcliError, ModelError
from lapcli.families.base import StatefulLayer
from lapcli.families.fla_library import needs_fla
from lapcli.families.loading import load_model, load_tokenizer, own_class
from lapcli.families.packed import text_part
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.calibration import check_calibration
from lapcli.stages.lineage import existing_result, refuse_other_model

_STATE_BYTES = {"cpu": 512 << 20, "cuda": 8 << 30}
_TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 32768}
_LONGEST = {"cuda": 64}
"""Up to so many tokens fla goes step by step; for more it has kernels whose configurations it would have to search."""


@dataclass(frozen=True)
class AnalysisInputs:
    """What is analysed.

    Attributes:
        models: label and source of each; the others are compared with the first.
        selection: of the first model's channels.
        calibration: of the first model, for the conditioning of the selection.
        compare: a second selection.
    """

    models: Sequence[tuple[str, ModelSource]]
    selection: Artifact | None = None
    calibration: Artifact | None = None
    compare: Artifact | None = None

    @property
    def base(self) -> ModelSource:
        """The first model."""
        return self.models[0][1]

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """Those that there are, by what they are here."""
        found = {"selection": self.selection, "calibration": self.calibration, "compare": self.compare}
        return {name: artifact for name, artifact in found.items() if artifact is not None}


@dataclass(frozen=True)
class AnalysisPlan:
    """What an analysis will do.

    Attributes:
        layers: the stateful layers of each model.
        lineage: of its numbers.
        kept: the channels of selection and compared selection, by layer; of a selection that rotates, directions.
    """

    layers: dict[str, tuple[StatefulLayer, ...]]
    lineage: Lineage
    kept: dict[str, dict[int, Tensor]] = field(default_factory=dict)


def plan_analysis(
    inputs: AnalysisInputs, settings: AnalysisSettings, *, machine: Machine, reporter: Reporter
) -> AnalysisPlan:
    """Refuse, before any work, what cannot be analysed.

    Raises:
        ArtifactError: a selection or calibration is damaged or of another model.
        DataError: the text cannot be read, or samples are longer than a model takes.
        FamilyError: a family is unknown.
        ModelError: a model has no state, or one that cannot be read, or two do not belong together.
        UsageError: device, dtype or kernel cannot be.
    """
    text = CalibrationSettings(
        data=settings.data, samples=settings.samples, seq_len=settings.seq_len, seed=settings.seed
    )
    layers: dict[str, tuple[StatefulLayer, ...]] = {}
    for label, source in inputs.models:
        layers[label] = check_calibration(source, text, reporter if label == inputs.models[0][0] else SilentReporter())
        if needs_fla(source.config) and own_class(source.config.get("model_type")) is None:
            raise ModelError(
                f"{source.name} ({family_for(source.config).name}) runs through fla's own classes, "
                "whose states lapcli does not read",
                "calibrate, select and slice take it; analyze takes families of lapcli and of transformers",
            )
        machine.check(source.config, layers[label])
        _refuse_unlike(inputs.base, layers[inputs.models[0][0]], source, layers[label])
    inputs.base.check_tokenizer()
    sizes = {layer.index: (layer.heads, layer.key_width) for layer in layers[inputs.models[0][0]]}
    kept: dict[str, dict[int, Tensor]] = {}
    for name, artifact in inputs.artifacts.items():
        refuse_other_model(
            artifact.path, artifact.lineage, inputs.base,
            "name one of this model, or the run that it belongs to with --run",
        )  # fmt: skip
        if name != "calibration":
            # Where two are compared, both must keep channels.
            directions = {} if "compare" in inputs.artifacts else kept_directions(artifact)
            kept[name] = directions or kept_channels(artifact)
            refuse_other_channels(artifact.path, kept[name], sizes)
    lineage = Lineage(
        kind="analysis",
        model=inputs.base.describe(),
        family=family_for(inputs.base.config).name,
        settings={**settings.document(), "models": [label for label, _source in inputs.models]},
        parents={
            "tokenizer": inputs.base.tokenizer_digest,
            **fingerprint(settings.data),
            **{f"{label} model": source.digest for label, source in inputs.models[1:]},
            **{name: artifact_digest(artifact) for name, artifact in inputs.artifacts.items()},
        },
        axes=AXES,
    )
    return AnalysisPlan(layers, lineage, kept)


def _refuse_unlike(
    base: ModelSource, base_layers: Sequence[StatefulLayer], other: ModelSource, layers: Sequence[StatefulLayer]
) -> None:
    """Refuse to compare models whose layers and heads do not correspond."""

    def shape(source: ModelSource, found: Sequence[StatefulLayer]) -> dict[str, Any]:
        text = text_part(source.config)
        return {
            "vocabulary": text.get("vocab_size"),
            "hidden size": text.get("hidden_size"),
            "stateful layers": [layer.index for layer in found],
            "value heads": [layer.value_heads for layer in found],
            "value width": [layer.value_width for layer in found],
        }

    wanted, found = shape(base, base_layers), shape(other, layers)
    for name, value in wanted.items():
        if found[name] != value:
            raise ModelError(
                f"{other.name} cannot be compared with {base.name}: {name} {found[name]}, not {value}",
                "compare a model with the one that it was made from",
            )


def analyse(
    inputs: AnalysisInputs,
    settings: AnalysisSettings,
    folder: Path,
    *,
    machine: Machine | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> tuple[Analysis, bool, list[Path]]:
    """Measure what the states hold, or find that it is done; write numbers, tables and pictures.

    Args:
        inputs: the models, and what was selected of them.
        settings: text and positions.
        folder: where to.
        machine: where it runs.
        overwrite: whether an analysis of other inputs, in another dtype, or a damaged one gives way.
        reporter: where progress goes.

    Returns:
        The analysis, whether anything was measured now, and the files beside the numbers.

    Raises:
        ArtifactError: there is an analysis of other inputs, and `overwrite` is false; or as `plan_analysis`.
        LapcliError: as `plan_analysis`.
        ModelError: a model cannot be loaded, or a state is not finite (the layer is named).
    """
    machine, reporter = machine or Machine(), reporter or SilentReporter()
    plan = plan_analysis(inputs, settings, machine=machine, reporter=reporter)
    output = folder / ANALYSIS_FILE
    analysis = existing_result(
        output, plan.lineage, lambda found: Analysis(found.tensors(), found.lineage.record),
        dtype=machine.dtype_by_name(inputs.base.config), overwrite=overwrite,
    )  # fmt: skip
    worked = analysis is None
    if analysis is None:
        analysis = _measure(inputs, settings, plan, machine, reporter)
        write_artifact(output, replace(plan.lineage, record=dict(analysis.record)), analysis.tensors)
    written = write_tables(analysis, folder)
    try:
        with reporter.task("drawing"):
            written += draw(analysis, folder)
    except LapcliError as error:
        reporter.warn(f"no pictures: {error.message} ({error.hint})")
    for sentence in analysis.violated():
        reporter.warn(f"{sentence}; it holds of every state, so this is a defect of lapcli: please report it")
    return analysis, worked, written


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measure(
    inputs: AnalysisInputs, settings: AnalysisSettings, plan: AnalysisPlan, machine: Machine, reporter: Reporter
) -> Analysis:
    blocks = token_blocks(
        settings.data,
        load_tokenizer(inputs.base, trust_remote_code=machine.trust_remote_code),
        samples=settings.samples,
        seq_len=settings.seq_len,
        seed=settings.seed,
        reporter=reporter,
    )
    device, dtype = machine.torch_device(), machine.torch_dtype(inputs.base.config)
    walkers: dict[str, Walker] = {}
    for label, source in inputs.models:
        model: Any = load_model(
            source, device=device, dtype=dtype, kernel=machine.kernel, trust_remote_code=machine.trust_remote_code
        )
        if not walkers:
            machine.announce(model, reporter)
        walkers[label] = Walker(model, family_for(source.config), plan.layers[label])
    positions = settings.positions
    total = len(inputs.models) * settings.samples * positions[-1]
    # Triton launches on the current device.
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device, reporter.task("looking at states", total=total, unit="tokens") as task:
        batch = _batch(plan.layers, settings, device.type)
        found = walk(walkers, blocks.ids, positions, batch=batch, longest=_LONGEST.get(device.type), progress=task)
    tensors: dict[str, Tensor] = {"positions": torch.tensor(positions)}
    for label, layers in found.items():
        for index, layer in layers.items():
            tensors |= findings_tensors(label, index, layer)
    tensors |= _of_selections(inputs, plan)
    with on_device:
        tracked, stability = _tracked(walkers, plan, blocks.ids[:, : positions[-1]], device.type, reporter)
    record = {
        "tokens": settings.samples * positions[-1],
        "corpus": blocks.digest,
        "text": blocks.description,
        "device": device.type,
        "dtype": _name(dtype),
        "models": {label: [_sizes(layer) for layer in layers] for label, layers in plan.layers.items()},
        "floored": {label: sum(layer.floored for layer in layers.values()) for label, layers in found.items()},
        "output_error": {
            label: [{name: layer.error(name) for name in ("own", "base")} for layer in layers.values()]
            for label, layers in list(found.items())[1:]
        },
        "stability": stability,
    }
    return Analysis(tensors | tracked, record)


def _tracked(
    walkers: Mapping[str, Walker], plan: AnalysisPlan, ids: Tensor, device: str, reporter: Reporter
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where a model has query feedback: how it and those beside it of lapcli's own track their values.

    Returns:
        What is stored a token, and the figures by model.
    """
    if not any(layer.erasing for layers in plan.layers.values() for layer in layers):
        return {}, {}
    models = {label: walker.model for label, walker in walkers.items() if hasattr(walker.model, "mixers")}
    rows = min(TRACKED_ROWS, len(ids), *(rows_at_once(model, device) for model in models.values()))
    ids = ids[:rows, :TRACKED_TOKENS]
    tensors: dict[str, Tensor] = {}
    figures: dict[str, Any] = {}
    with reporter.task("following errors", total=len(models), unit="models") as task:
        for label, model in models.items():
            layers = {index: found.tensors() for index, found in track_layers(model, ids).items()}
            for index, found in layers.items():
                kept = {"product": "contraction", "cosine": "readout_cosine", "after": "error", "drift": "drift"}
                for name, stored in kept.items():
                    tensors[f"{label}.layers.{index}.{stored}"] = found[name].float()
            each = [{"layer": index, **summary({index: found})} for index, found in layers.items()]
            figures[label] = {"rows": rows, "length": ids.shape[1], "all": summary(layers), "layers": each}
            task.advance()
    return tensors, figures


def _sizes(layer: StatefulLayer) -> dict[str, int]:
    names = ("index", "heads", "value_heads", "key_width", "value_width", "states")
    return {name: getattr(layer, name) for name in names}


def _batch(layers: Mapping[str, Sequence[StatefulLayer]], settings: AnalysisSettings, device: str) -> int:
    """Documents at a time: as many as states and activations have room for."""
    # Twice of each: what the base's inputs make of the others takes as much again, without the keys.
    each = 2 * sum(bytes_per_sample(found) for found in layers.values())
    by_states = _STATE_BYTES.get(device, _STATE_BYTES["cpu"]) // each
    longest = min(settings.skip + settings.stride, _LONGEST.get(device, settings.seq_len))
    by_tokens = _TOKENS_AT_ONCE.get(device, _TOKENS_AT_ONCE["cpu"]) // longest
    return max(1, min(by_states, by_tokens, settings.samples))


def _of_selections(inputs: AnalysisInputs, plan: AnalysisPlan) -> dict[str, Tensor]:
    """What can be said of the kept channels without running a model."""
    found: dict[str, Tensor] = {}
    kept, compared = plan.kept.get("selection"), plan.kept.get("compare")
    base = plan.layers[inputs.models[0][0]]
    if kept is None:
        return found
    if inputs.calibration is not None:
        for index, gram in joint_grams(inputs.calibration).items():
            sets = [None, kept[index], *([] if compared is None else [compared[index]])]
            found[f"conditioning.layers.{index}"] = torch.stack([conditioning(gram, channels) for channels in sets])
    if compared is not None:
        for index, channels in kept.items():
            found[f"overlap.layers.{index}"] = overlap(channels, compared[index])
    family = family_for(inputs.base.config)
    for layer in base:
        if kept[layer.index].ndim == 3:
            continue  # no channel is kept or dropped, so there are no two kinds of filters
        magnitudes = filter_magnitudes(inputs.base, family, layer)
        for side, taps in kept_and_dropped(magnitudes, kept[layer.index]).items():
            found[f"filters.layers.{layer.index}.{side}"] = taps
    return found
