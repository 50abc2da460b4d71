"""Selection: a calibration in, the kept channels (of `pca`: directions) of every head out. Needs no model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import Artifact, digest_document, read_artifact, refuse_foreign, write_artifact
from lapcli.artifacts.store import content_digest
from lapcli.errors import ArtifactError, UsageError
from lapcli.recipe import SelectionSettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.selectors.base import HeadStatistics, Rotation, Selection
from lapcli.selectors.budget import KeptWidth, kept_width, kept_width_from_keep
from lapcli.selectors.registry import Selector, select_layer, selector
from lapcli.stages.lineage import refuse_stale, selection_lineage


@dataclass(frozen=True)
class Budget:
    """The kept width of a request, and the selector that will fill it."""

    selector: Selector
    width: KeptWidth


def budget_for(key_width: int, settings: SelectionSettings) -> Budget:
    """Check a request against a key width, before any work.

    Raises:
        UsageError: the method is unknown, the ratio or width cannot be met, or both or neither are given.
    """
    chosen = selector(settings.method)
    if (settings.ratio is None) == (settings.keep is None):
        raise UsageError("give either --ratio or --keep", "for example --ratio 0.5")
    if settings.keep is not None:
        return Budget(chosen, kept_width_from_keep(key_width, settings.keep, settings.align))
    assert settings.ratio is not None
    return Budget(chosen, kept_width(key_width, settings.ratio, settings.align))


def _key_width(calibration: Artifact) -> int:
    widths = {layer["key_width"] for layer in calibration.lineage.record["layers"]}
    if len(widths) != 1:
        raise ArtifactError(f"{calibration.path} covers layers of different key widths ({sorted(widths)})")
    return widths.pop()


def plan_selection(calibration: Artifact, settings: SelectionSettings) -> KeptWidth:
    """The kept width that a request comes to, checked before any work.

    Raises:
        ArtifactError: the calibration covers layers of different widths.
        UsageError: the request cannot be met.
    """
    return budget_for(_key_width(calibration), settings).width


def _statistics(calibration: Artifact, needs: Sequence[str]) -> tuple[dict[int, HeadStatistics], str]:
    """The statistics by layer, and the digest of the very tensors used; the whole file is read, which checks it."""
    stored_tensors = calibration.tensors()
    read: dict[str, Tensor] = {}
    found: dict[int, HeadStatistics] = {}
    for layer in calibration.lineage.record["layers"]:
        index = layer["index"]
        tensors: dict[str, Tensor] = {}
        for needed in needs:
            # A triangle of a streamed QR says what the Gram matrix says, and more exactly.
            triangle = needed.replace("gram", "triangle")
            name = triangle if f"layers.{index}.{triangle}" in calibration.names else needed
            stored = f"layers.{index}.{name}"
            if stored not in calibration.names:
                raise ArtifactError(
                    f"{calibration.path} holds no {name} of layer {index}",
                    "extend it: `lapcli calibrate --grad`, or `lapcli prune --method grad`"
                    if name.startswith("saliency")
                    else "calibrate again",
                )
            tensors[name] = read[stored] = stored_tensors[stored]
        found[index] = HeadStatistics(**tensors, tokens=calibration.lineage.record["tokens"])
    identity = calibration.lineage.identity()
    return found, digest_document({"identity": identity, "statistics": content_digest(read)})


def _layer_record(index: int, selection: Selection | Rotation) -> dict[str, Any]:
    """One layer's row for `lapcli inspect`: the worst head's figures."""
    if isinstance(selection, Rotation):
        heads, kept, _width = selection.basis.shape
        whole = selection.variance.sum(1)
        share = torch.where(whole > 0, selection.variance[:, :kept].sum(1) / whole, 1.0)
        return {"layer": index, "directions": kept, "heads": heads, "variance kept (least)": float(share.min())}
    row: dict[str, Any] = {"layer": index, "kept": selection.kept.shape[1], "heads": selection.kept.shape[0]}
    bounds = selection.bounds
    if bounds is not None:
        row |= {
            "rank (least)": int(bounds.rank.min()),
            "swaps (all heads)": int(bounds.swaps.sum()),
            "rho (most)": float(bounds.rho.max()),
            "kappa (most)": float(bounds.kappa.max()),
            "kappa bound": float(bounds.kappa_bound.max()),
            "bounds hold": bool(bounds.holds.all()),
        }
    return row


def _stored(selection: Selection | Rotation) -> dict[str, Tensor]:
    """What is written of a layer, by its last name."""
    if isinstance(selection, Rotation):
        return {"basis": selection.basis, "variance": selection.variance}
    bounds = {} if selection.bounds is None else selection.bounds._asdict()
    return {"kept": selection.kept, "scores": selection.scores, **bounds}


def select(
    calibration: Artifact,
    settings: SelectionSettings,
    output: Path,
    *,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> tuple[Artifact, bool]:
    """Choose the channels that each head keeps, or find that it is done.

    Args:
        calibration: the statistics.
        settings: the method and its budget.
        output: the artifact to write: `layers.<n>.kept` int64 `[H, K']` ascending, `layers.<n>.scores` fp64 `[H, K]`,
            and for `drrqr` the achieved bounds, `layers.<n>.<bound>` `[H]`; for `pca` instead of all these
            `layers.<n>.basis` fp64 `[H, K', K]` and `layers.<n>.variance` fp64 `[H, K]`.
        overwrite: whether a selection of other inputs gives way.
        reporter: where warnings go.

    Returns:
        The selection, and whether any work was done.

    Raises:
        ArtifactError: the calibration lacks what the method needs, or there is a selection of other inputs.
        UsageError: the request cannot be met.
    """
    reporter = reporter or SilentReporter()
    budget = budget_for(_key_width(calibration), settings)
    # The random selector reads nothing, but has to know how many channels there are.
    needs = budget.selector.needs(settings.score_from) or {"magnitude_key"}
    statistics, digest = _statistics(calibration, sorted(needs))
    lineage = selection_lineage(calibration, settings, budget.width.width, digest)
    if output.exists():
        try:
            existing = read_artifact(output, "selection")
            refuse_stale(lineage, existing.lineage, output)
            if overwrite:
                existing.tensors()  # raises where they are damaged
            return existing, False
        except ArtifactError:
            if not overwrite:
                raise
            refuse_foreign(output)
    if budget.selector.experimental:
        reporter.warn(f"{settings.method} is experimental: it is there to be compared with, not to be used")
    tensors: dict[str, Tensor] = {}
    rows: list[dict[str, Any]] = []
    with reporter.task(f"selecting ({settings.method})", total=len(statistics), unit="layers") as task:
        for index, layer in statistics.items():
            selection = select_layer(
                settings.method,
                layer,
                budget.width.width,
                score_from=settings.score_from,
                f=settings.f,
                seed=settings.seed,
                layer=index,
            )
            tensors |= {f"layers.{index}.{name}": value for name, value in _stored(selection).items()}
            rows.append(_layer_record(index, selection))
            for warning in selection.warnings:
                reporter.warn(warning)
            task.advance(1)
    record = {"budget": str(budget.width), "layers": rows}
    return write_artifact(output, replace(lineage, record=record), tensors), True
