"""What each stage's result is made from: the lineages, and the rule for one that is there already.

Nothing here imports torch, so that a plan, an inspection or a refusal comes at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lapcli.artifacts import Artifact, Lineage, read_artifact, read_document, refuse_foreign
from lapcli.errors import ArtifactError
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource, is_demo_model, resolve_model
from lapcli.recipe import CalibrationSettings, SelectionSettings

Result = TypeVar("Result")

LINEAGE_FILE = "lapcli.json"
"""The lineage of a model directory that lapcli wrote."""

OWN_DIGEST = "digest"
"""Where the record of such a lineage has the digest of the directory's own config, index and weights."""

STALE_HINT = "pass --overwrite to replace it, or --run DIR to keep both"

_CALIBRATION_AXES = {
    "layers.*.gram_key": ["H", "K", "K"],
    "layers.*.gram_query": ["H", "K", "K"],
    "layers.*.triangle_key": ["H", "K", "K"],
    "layers.*.triangle_query": ["H", "K", "K"],
    "layers.*.input_sq": ["D"],
    "layers.*.magnitude_key": ["H", "K"],
    "layers.*.magnitude_query": ["H", "K"],
    "layers.*.wanda_key": ["H", "K"],
    "layers.*.wanda_query": ["H", "K"],
    "layers.*.saliency_key": ["H", "K"],
    "layers.*.saliency_query": ["H", "K"],
}
_SELECTION_AXES = {
    "layers.*.kept": ["H", "K'"],
    "layers.*.scores": ["H", "K"],
    "layers.*.basis": ["H", "K'", "K"],
    "layers.*.variance": ["H", "K"],
}


def calibration_lineage(source: ModelSource, settings: CalibrationSettings) -> Lineage:
    """The lineage of a calibration of this model with these settings, of tokenizer and text as their files are now.

    Raises:
        DataError: the data source cannot be read.
        FamilyError: the family is unknown.
    """
    from lapcli.data import fingerprint  # the package imports torch

    return Lineage(
        kind="calibration",
        model=source.describe(),
        family=family_for(source.config).name,
        settings=settings.document(),
        parents={"tokenizer": source.tokenizer_digest, **fingerprint(settings.data)},
        axes=_CALIBRATION_AXES,
    )


def selection_lineage(calibration: Artifact, settings: SelectionSettings, kept_width: int, statistics: str) -> Lineage:
    """The lineage of a selection.

    Args:
        calibration: what it is made from.
        settings: of the selection.
        kept_width: `K'`, in which ratio, keep and alignment end.
        statistics: digest of those statistics that the method reads; a calibration that was extended by others
            since gives the same selection.
    """
    document = settings.document()
    # Two ways to ask for one width are one request.
    for asked in ("ratio", "keep", "align"):
        del document[asked]
    return Lineage(
        kind="selection",
        model=calibration.lineage.model,
        family=calibration.lineage.family,
        settings={**document, "kept_width": kept_width},
        parents={"calibration": statistics},
        axes=_SELECTION_AXES,
    )


def slicing_lineage(source: ModelSource, selection: Artifact, content: str) -> Lineage:
    """The lineage of a slice of this model by this selection (whose digest is `content`)."""
    return Lineage(
        kind="model",
        model=source.describe(),
        family=family_for(source.config).name,
        settings={
            "stage": "slicing",
            "method": selection.lineage.settings.get("method"),
            "kept_width": selection.lineage.settings.get("kept_width"),
        },
        parents={"selection": content},
    )


def sliced_lineage(folder: Path) -> Lineage | None:
    """The lineage of a model directory, or `None` where lapcli did not write one.

    Raises:
        ArtifactError: the lineage is there but damaged or of a newer schema.
    """
    path = folder / LINEAGE_FILE
    return read_document(path, "model") if path.is_file() else None


def stage_before(folder: Path) -> dict[str, str]:
    """The stage that made a model directory, with its identity, for the parents of what is made of it; else empty.

    Raises:
        ArtifactError: as `sliced_lineage`.
    """
    before = sliced_lineage(folder)
    return {} if before is None else {str(before.settings.get("stage", before.kind)): before.identity()}


def cut_from(folder: Path) -> Lineage | None:
    """The lineage of the slice that a model directory holds, or was made from by conversion or recovery, as far as
    lineages tell; `None` for others.

    Raises:
        ArtifactError: as `sliced_lineage`.
    """
    found = sliced_lineage(folder)
    while found is not None and (stage := found.settings.get("stage")) != "slicing":
        # What was trained, or what became of a Transformer's attention, has states of their whole width.
        if stage in ("training", "linearising"):
            return None
        origin = Path(str(found.model.get("name")))
        if not origin.is_dir():
            return found if "slicing" in found.parents else None
        found = sliced_lineage(origin)
    return found


def made_of_a_demo(source: ModelSource) -> bool:
    """Whether a model ships with lapcli, or was made of one that does, as far as lineages tell: small text suits it."""
    if source.is_demo:
        return True
    folder, seen = source.path, set[Path]()
    while folder.resolve() not in seen:
        seen.add(folder.resolve())
        try:
            lineage = sliced_lineage(folder)
        except ArtifactError:
            return False
        if lineage is None:
            return False
        name = str(lineage.model.get("name"))
        if is_demo_model(name, lineage.model.get("digest")):
            return True
        folder = Path(name)
    return False


def altered(source: ModelSource) -> bool:
    """Whether lapcli wrote a model directory and its config or weights are others now."""
    try:
        lineage = sliced_lineage(source.path)
    except ArtifactError:
        return False
    if lineage is None:
        return False
    # One that is to be run otherwise than its file says has a digest of its own.
    stored = resolve_model(str(source.path)) if source.config.get("compat") is not None else source
    return lineage.record.get(OWN_DIGEST, stored.digest) != stored.digest


def refuse_stale(wanted: Lineage, existing: Lineage, path: Path, mend: str = STALE_HINT) -> None:
    """Refuse a result that other inputs made.

    Raises:
        ArtifactError: naming what differs and the command that mends it.
    """
    differences = wanted.differences(existing)
    if differences:
        raise ArtifactError(f"{path} was made with other inputs: " + "; ".join(differences), mend)


def existing_result(
    path: Path, wanted: Lineage, read: Callable[[Artifact], Result], *, dtype: str | None, overwrite: bool
) -> Result | None:
    """What is there of an artifact, where it is the one wanted.

    Args:
        path: of the artifact.
        wanted: its lineage.
        read: makes of it what is returned; may find it damaged.
        dtype: that it must have been computed in; `None` for any.
        overwrite: whether another one, or a damaged one, gives way; then there is nothing.

    Raises:
        ArtifactError: another one is there, or a damaged one, and `overwrite` is false; or something that lapcli did
            not write.
    """
    if not path.exists():
        return None
    try:
        existing = read_artifact(path, wanted.kind)
        refuse_stale(wanted, existing.lineage, path)
        found = existing.lineage.record["dtype"]
        if dtype not in (None, found):
            raise ArtifactError(
                f"{path} was computed in {found}, but --dtype {dtype} is asked for",
                f"{STALE_HINT}; without --dtype it is used as it is",
            )
        return read(existing)
    except ArtifactError:
        if not overwrite:
            raise
        refuse_foreign(path)
        return None


def refuse_other_model(path: Path, lineage: Lineage, source: ModelSource, mend: str) -> None:
    """Refuse what was made for another model than this one.

    Raises:
        ArtifactError: naming both, and what mends it.
    """
    theirs = lineage.model
    if theirs.get("digest") != source.digest:
        raise ArtifactError(
            f"{path} was made for {theirs.get('name')} ({str(theirs.get('digest'))[:12]}), "
            f"but the model given is {source.name} ({source.digest[:12]})",
            mend,
        )
