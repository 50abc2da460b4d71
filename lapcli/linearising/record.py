"""What a conversion to dual-state attention leaves on disk: measures of layers, converted layers, a summary."""

import json
import math
from collections.abc import Sequence
from typing import Any

from lapcli.artifacts import Artifact, Lineage, artifact_digest, atomic_file, read_artifact
from lapcli.data import fingerprint
from lapcli.linearising.plan import LinearisingPlan, Place
from lapcli.stages.lineage import refuse_stale

KIND = "dual-state layer"
SENSITIVITY = "sensitivity"
MEND = "pass --overwrite to convert anew, or --output DIR to keep both"


def sensitivity_lineage(plan: LinearisingPlan) -> Lineage:
    """What measures of layers are known by: the text, how it is looked at, and what layers become."""
    settings = plan.settings.sensitivity
    return Lineage(
        kind=SENSITIVITY,
        model=plan.source.describe(),
        family="dsla",
        settings={**settings.document(), "layer": plan.settings.layer.document()},
        parents={"tokenizer": plan.source.tokenizer_digest, **fingerprint(settings.data)},
        axes={"entropy": ["layers", "HQ"], "outlier": ["layers"], "loss": ["layers"], "task:*": ["layers"]},
    )


def measured(plan: LinearisingPlan) -> Artifact | None:
    """What was measured of the layers, if it was by these settings.

    Raises:
        ArtifactError: it was of other inputs, or is damaged.
    """
    if not plan.place.sensitivity.is_file():
        return None
    found = read_artifact(plan.place.sensitivity, SENSITIVITY)
    refuse_stale(sensitivity_lineage(plan), found.lineage, found.path, MEND)
    return found


def layer_lineage(plan: LinearisingPlan, number: int, layer: int, before: Sequence[Artifact]) -> Lineage:
    """What a converted layer is known by: how it was trained, and the layers before it."""
    distillation = plan.settings.distillation
    return Lineage(
        kind=KIND,
        model=plan.source.describe(),
        family="dsla",
        settings={
            "number": number,
            "layer": layer,
            "dual_state": {**plan.layer_settings().as_config(), "layers": []},
            "distillation": distillation.document(),
        },
        parents={
            "tokenizer": plan.source.tokenizer_digest,
            **fingerprint(distillation.data),
            **({"previous": artifact_digest(before[-1])} if before else {}),
        },
        axes={},
    )


def stored(place: Place) -> list[Artifact]:
    """The converted layers in their order, as far as they follow one another.

    Raises:
        ArtifactError: one of them is damaged or no layer of ours.
    """
    found: list[Artifact] = []
    for path in sorted(place.prefixes.glob("*.safetensors")) if place.prefixes.is_dir() else []:
        artifact = read_artifact(path, KIND)
        if artifact.lineage.settings.get("number") != len(found) + 1:
            break
        found.append(artifact)
    return found


def converted(plan: LinearisingPlan) -> list[Artifact]:
    """The layers that are there, if they were converted by these settings.

    Raises:
        ArtifactError: they were of other inputs.
    """
    found = stored(plan.place)
    for number, artifact in enumerate(found):
        layer = artifact.lineage.settings["layer"]
        refuse_stale(layer_lineage(plan, number + 1, layer, found[:number]), artifact.lineage, artifact.path, MEND)
    return found


def summarise(plan: LinearisingPlan, prefixes: Sequence[Artifact], sensitivity: Artifact | None) -> dict[str, Any]:
    """Write what was measured of all prefixes, for whoever makes tables of it."""
    records = [{**artifact.lineage.record} for artifact in prefixes]
    for record in records:
        record.pop("stream", None)
        record["perplexity"] = math.exp(record["cross_entropy"])
        kept = plan.shape.layers - record["number"]
        record["kv_bytes_a_token"] = plan.shape.token_bytes(kept)
        record["state_bytes"] = record["number"] * plan.state_bytes()
    entropy = records[-1]["teacher_cross_entropy"] if records else math.nan
    document = {
        "model": plan.source.describe(),
        "layers": plan.shape.layers,
        "settings": plan.settings.document(),
        "order": [record["layer"] for record in records],
        "teacher": {
            "cross_entropy": entropy,
            "perplexity": math.exp(entropy),
            "kv_bytes_a_token": plan.shape.token_bytes(plan.shape.layers),
        },
        "rank_correlations": {} if sensitivity is None else sensitivity.lineage.record.get("rank_correlations", {}),
        "prefixes": records,
    }
    with atomic_file(plan.place.summary) as temporary:
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return document
