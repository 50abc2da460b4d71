"""Slicing: a model and a selection in, a model directory out, one tensor at a time.

Written once for all families: it walks the coupled groups that an adapter declares over the safetensors headers.
No torch model is built and no tensor is interpreted: the kept channels are copied as bytes, so any dtype passes
through exactly, and every other tensor's bytes are those of the base. Only where a selection keeps directions (`pca`)
are the rows of a key head computed anew (`lapcli.stages.rotating`).
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapcli.artifacts import (
    Artifact,
    Lineage,
    SafetensorsHeader,
    artifact_digest,
    atomic_directory,
    encode_header,
    read_artifact,
    taken,
    write_document,
)
from lapcli.errors import ArtifactError, FamilyError, LapcliError, ModelError
from lapcli.families.base import ModelCode, StatefulLayer
from lapcli.families.packed import text_part, with_text_part
from lapcli.families.registry import family_for
from lapcli.families.source import (
    LOADED_BY_CODE,
    ModelSource,
    copy_companions,
    lost_companions,
    refuse_quantised,
    resolve_model,
)
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.cutting import Cutting, Mtp, cutting
from lapcli.stages.lineage import (
    LINEAGE_FILE,
    OWN_DIGEST,
    refuse_other_model,
    refuse_stale,
    sliced_lineage,
    slicing_lineage,
)
from lapcli.stages.rotating import Bases, Turn, rotated, turns_of

_COPY_BLOCK = 16 << 20
_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""What configs call the number of layers of an MTP head: Qwen's own, DeepSeek's and transformers' names."""

_ORTHONORMAL = 1e-9
"""How far products of directions may be from 0 and 1: K eps of rounding is far below, a wrong matrix far above."""


@dataclass(frozen=True)
class SlicePlan:
    """What slicing would write.

    Attributes:
        kept_width: `K'`.
        layers: the stateful layers of the base.
        cut_tensors: how many tensors become smaller.
        bytes_before: size of the base's weights.
        bytes_after: size of the sliced weights.
        state_bytes_before: state of one sequence over all layers, fp32.
        state_bytes_after: likewise, sliced.
        mtp: what becomes of the head that predicts further tokens: softmax heads pass through, heads with a state are
            dropped; `None` where the checkpoint has none.
    """

    kept_width: int
    layers: tuple[StatefulLayer, ...]
    cut_tensors: int
    bytes_before: int
    bytes_after: int
    state_bytes_before: int
    state_bytes_after: int
    mtp: Mtp | None = None


@dataclass(frozen=True)
class _Work:
    """What slicing does to one checkpoint.

    Attributes:
        plan: as told to the user.
        cutting: what becomes of each tensor.
        config: the sliced model's.
        code: what must lie beside it so that transformers can load it, or `None`.
        turns: the rows of tensors that are computed anew, where directions are kept.
    """

    plan: SlicePlan
    cutting: Cutting
    config: dict[str, Any]
    code: ModelCode | None = None
    turns: Mapping[str, tuple[Turn, ...]] = field(default_factory=dict[str, tuple[Turn, ...]])

    def shards(self, source: ModelSource) -> list[SafetensorsHeader]:
        """The files of which anything is left."""
        return [header for header in source.headers if header.tensors.keys() - self.cutting.dropped]


@dataclass(frozen=True)
class _Narrowing:
    """What a selection makes of the key axis.

    Attributes:
        kept_width: `K'`.
        gone: by layer and head, the channels that go; where directions are kept, as many of them.
        bases: those directions, or `None`.
    """

    kept_width: int
    gone: Mapping[int, Sequence[set[int]]]
    bases: Bases | None = None


def _narrowing(selection: Artifact, layers: Sequence[StatefulLayer]) -> _Narrowing:
    """What the selection keeps, checked against the layers."""
    tensors = selection.tensors()
    if any(name.endswith(".basis") for name in tensors):
        bases = {layer.index: _basis(selection, tensors, layer) for layer in layers}
        width = _one_width(selection, {basis.shape[1] for basis in bases.values()})
        gone = {layer.index: [set(range(width, layer.key_width))] * layer.heads for layer in layers}
        return _Narrowing(width, gone, bases)
    kept = _kept_sets(selection, tensors, layers)
    width = _one_width(selection, {indices.shape[1] for indices in kept.values()})
    whole = {layer.index: range(layer.key_width) for layer in layers}
    return _Narrowing(
        width, {index: [set(whole[index]).difference(row.tolist()) for row in rows] for index, rows in kept.items()}
    )


def _one_width(selection: Artifact, widths: set[int]) -> int:
    if len(widths) != 1:
        raise ArtifactError(
            f"{selection.path} keeps different widths ({sorted(widths)}); one config field holds them all"
        )
    return widths.pop()


def _basis(selection: Artifact, tensors: Mapping[str, Any], layer: StatefulLayer) -> NDArray[np.float64]:
    """T of each head, checked: `[H, K', K]` in fp64 with orthonormal rows."""
    name = f"layers.{layer.index}.basis"
    if name not in tensors:
        raise ArtifactError(f"{selection.path} holds no {name}", "select again")
    basis = tensors[name].numpy()
    if basis.ndim != 3 or basis.dtype != np.float64 or basis.shape[0] != layer.heads or not basis.size:
        raise ArtifactError(
            f"{selection.path}: {name} is {basis.dtype} {list(basis.shape)}; float64 for {layer.heads} key heads of "
            f"{layer.key_width} is wanted"
        )
    products = basis @ basis.transpose(0, 2, 1) if basis.shape[2] == layer.key_width else np.full((1, 1), np.nan)
    if not (np.abs(products - np.eye(products.shape[-1])) < _ORTHONORMAL).all():
        raise ArtifactError(
            f"{selection.path}: the directions of layer {layer.index} are not orthonormal in {layer.key_width} channels"
        )
    return basis


def _kept_sets(
    selection: Artifact, tensors: Mapping[str, Any], layers: Sequence[StatefulLayer]
) -> dict[int, NDArray[np.int64]]:
    """The kept indices by layer, checked: `[H, K']`, within the head, strictly ascending."""
    kept: dict[int, NDArray[np.int64]] = {}
    for layer in layers:
        name = f"layers.{layer.index}.kept"
        if name not in tensors:
            raise ArtifactError(f"{selection.path} holds no {name}", "select again")
        indices = tensors[name].numpy()
        if indices.ndim != 2 or indices.shape[0] != layer.heads:
            raise ArtifactError(
                f"{selection.path} keeps {list(indices.shape)} in layer {layer.index}, of {layer.heads} key heads"
            )
        if indices.min() < 0 or indices.max() >= layer.key_width or (np.diff(indices, axis=1) <= 0).any():
            raise ArtifactError(
                f"{selection.path}: the kept indices of layer {layer.index} are not ascending "
                f"within 0..{layer.key_width - 1}"
            )
        kept[layer.index] = indices
    return kept


def _without_head(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose MTP head is left out."""
    text = text_part(config)
    parts = [config] if text is config else [config, text]
    none = [{name: 0 for name in _MTP_LAYERS if name in part} for part in parts]
    changed = with_text_part(config, **none[-1])
    return changed if text is config else {**changed, **none[0]}


def _work(source: ModelSource, layers: tuple[StatefulLayer, ...], narrowing: _Narrowing) -> _Work:
    family, kept_width = family_for(source.config), narrowing.kept_width
    config = family.sliced_config(source.config, kept_width)
    found = cutting(source, layers, narrowing.gone)
    plan = SlicePlan(
        kept_width=kept_width,
        layers=layers,
        cut_tensors=found.cut_tensors,
        bytes_before=found.bytes_before,
        bytes_after=found.bytes_after,
        state_bytes_before=sum(layer.state_bytes() for layer in layers),
        state_bytes_after=sum(layer.state_bytes(kept_width) for layer in layers),
        mtp=found.mtp,
    )
    turns = {} if narrowing.bases is None else turns_of(source, layers, narrowing.bases)
    return _Work(plan, found, _without_head(config) if found.dropped else config, family.model_code(config), turns)


def _write_shard(header: SafetensorsHeader, work: _Work, target: Path, advance: Any) -> None:
    entries = work.cutting.written(header.tensors.values())
    with header.path.open("rb") as source, target.open("wb") as out:
        out.write(encode_header(entries, header.metadata))
        for entry in header.tensors.values():
            if entry.name in work.cutting.dropped:
                advance(entry.nbytes)
                continue
            cut = work.cutting.cuts.get(entry.name)
            if entry.name in work.turns:
                out.writelines(rotated(source, entry, work.turns[entry.name]))
            elif cut is None:
                source.seek(entry.start)
                left = entry.nbytes
                while left:
                    block = source.read(min(left, _COPY_BLOCK))
                    if not block:
                        raise ArtifactError(f"{header.path} ended inside {entry.name}", "download the model again")
                    out.write(block)
                    left -= len(block)
            else:
                outer = int(np.prod(entry.shape[: cut.axis], dtype=np.int64))
                axis = entry.shape[cut.axis]
                keep = np.ones(axis, dtype=bool)
                keep[list(cut.gone)] = False
                view = np.memmap(source, np.uint8, "r", entry.start, (outer, axis, entry.nbytes // (outer * axis)))
                for row in view:
                    out.write(np.ascontiguousarray(row[keep]).tobytes())
            advance(entry.nbytes)


def _write_index(source: ModelSource, work: _Work, folder: Path) -> None:
    if source.index is None:
        return
    written = work.cutting.written(entry for _header, entry in source.tensors.values())
    metadata = dict(source.index.get("metadata") or {})
    metadata["total_size"] = sum(nbytes for *_rest, nbytes in written)
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(int(np.prod(shape, dtype=np.int64)) for _n, _d, shape, _b in written)
    index = {**source.index, "metadata": metadata}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in work.cutting.dropped}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _card(source: ModelSource, work: _Work, settings: Mapping[str, Any]) -> str:
    plan, code, turned = work.plan, work.code is not None, bool(work.turns)
    layer = plan.layers[0]
    return (
        f"# {source.name}, state cut from {layer.key_width} to {plan.kept_width} key channels a head\n\n"
        f"Made by lapcli from `{source.name}`"
        + (f" (revision `{source.revision}`)" if source.revision else "")
        + f". The key/query channels of {len(plan.layers)} recurrent layers were "
        + ("rotated and then selected" if turned else "selected")
        + f" with `{settings.get('method')}` and cut out of the weights; nothing was retrained.\n\n"
        f"| | base | here |\n| --- | --- | --- |\n"
        f"| key width | {layer.key_width} | {plan.kept_width} |\n"
        f"| state of one sequence, fp32 bytes | {plan.state_bytes_before} | {plan.state_bytes_after} |\n"
        f"| weights, bytes | {plan.bytes_before} | {plan.bytes_after} |\n\n"
        + (f"{LOADED_BY_CODE}\n\n" if code else "")
        + f"`{LINEAGE_FILE}` holds the settings and digests of what it was made from. The base's licence holds.\n"
    )


def plan_slicing(source: ModelSource, selection: Artifact) -> SlicePlan:
    """Say what slicing would do, without doing it.

    Raises:
        ArtifactError: the selection was made for another model, or does not fit it.
        FamilyError: the family is unknown, declares channels that its checkpoints do not have, or cannot be rotated.
        ModelError: the model is quantised, has no safetensors, or does not fit its config.
    """
    return _work(source, *_checked(source, selection)).plan


def _checked(source: ModelSource, selection: Artifact) -> tuple[tuple[StatefulLayer, ...], _Narrowing]:
    refuse_quantised(source.config, source.name)
    assert source.headers  # raises where there are no safetensors, damaged ones, or others than the config implies
    refuse_other_model(
        selection.path, selection.lineage, source,
        "name the model that it was made for, or make a selection for this one with `lapcli prune`",
    )  # fmt: skip
    layers = family_for(source.config).layers(source.config)
    if not layers:
        raise FamilyError(f"{source.name} has no layer with a state")
    return layers, _narrowing(selection, layers)


def slice_model(
    source: ModelSource,
    selection: Artifact,
    output: Path,
    *,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> SlicePlan:
    """Cut the channels that a selection drops out of every coupled tensor and write the smaller model.

    Where the selection keeps directions instead, the tensors are rotated to them (`lapcli.stages.rotating`).

    Args:
        source: the base model.
        selection: a selection made for it.
        output: the directory to write; it appears whole or not at all.
        overwrite: whether a directory of that name gives way.
        reporter: where progress goes.

    Returns:
        What was written.

    Raises:
        ArtifactError: the selection was made for another model or does not fit; the directory exists; a full disk.
        FamilyError: the family is unknown, declares channels that its checkpoints do not have, or cannot be rotated.
        ModelError: the model is quantised, has no safetensors, or does not fit its config.
    """
    reporter = reporter or SilentReporter()
    work = _work(source, *_checked(source, selection))
    plan = work.plan
    if plan.mtp == "dropped":
        reporter.warn(
            f"the MTP head of {source.name} keeps a state of its own and is left out of the slice; "
            "decoding with drafts from it is not possible there"
        )
    with (
        atomic_directory(output, replace=overwrite) as folder,
        reporter.task(f"slicing {source.name}", total=plan.bytes_before, unit="B") as task,
    ):
        for header in work.shards(source):
            _write_shard(header, work, folder / header.path.name, task.advance)
        _write_index(source, work, folder)
        (folder / "config.json").write_text(json.dumps(work.config, indent=2, ensure_ascii=False) + "\n")
        copy_companions(source, folder)
        # After those: a slice that is sliced again gets today's code.
        for name, packaged in ({} if work.code is None else work.code.files()).items():
            shutil.copyfile(packaged, folder / name)
        (folder / "README.md").write_text(_card(source, work, selection.lineage.settings))
        lineage = slicing_lineage(source, selection, artifact_digest(selection))
        record = {OWN_DIGEST: resolve_model(str(folder)).digest}
        write_document(folder / LINEAGE_FILE, replace(lineage, record=record))
    return plan


def slice_into(
    source: ModelSource, selection: Artifact, output: Path, *, overwrite: bool, reporter: Reporter
) -> tuple[SlicePlan, bool]:
    """Slice unless the very slice is there already.

    Returns:
        The plan, and whether any work was done.

    Raises:
        ArtifactError: something else lies at `output` and `overwrite` is false; and as `slice_model`.
    """
    place = output.resolve()
    if place == source.path:
        raise ModelError(f"{output} is the model itself; its slice needs another directory", "pass --output DIR")
    for input_path in (source.path, selection.path.resolve()):
        if place in input_path.parents:
            raise ArtifactError(f"{output} holds {input_path}, which is needed here", "pass --output DIR")
    if output.exists():
        existing = _lineage_there(source, selection, output)
        try:
            if existing is not None:
                refuse_stale(slicing_lineage(source, selection, artifact_digest(selection)), existing, output)
            wrong = _what_is_wrong(source, selection, output, existing) or (
                f"has no whole {LINEAGE_FILE}" if existing is None else None
            )
            if wrong is None:
                return plan_slicing(source, selection), False
            reporter.warn(f"{output} {wrong}; it is made again")
            overwrite = True
        except ArtifactError:
            if not overwrite:
                raise
    return slice_model(source, selection, output, overwrite=overwrite, reporter=reporter), True


def _lineage_there(source: ModelSource, selection: Artifact, output: Path) -> Lineage | None:
    """The lineage of what lies there; `None` where all but the lineage is as slicing would write it, the card too.

    Raises:
        ArtifactError: something else lies there; not even --overwrite may remove what is not ours.
    """
    foreign = taken(output)
    if not output.is_dir():
        raise foreign
    try:
        found = sliced_lineage(output)
    except ArtifactError as error:
        found, foreign = None, error
    if found is None:
        card = _card(source, _work(source, *_checked(source, selection)), selection.lineage.settings)
        if _what_is_wrong(source, selection, output, None) or (output / "README.md").read_text() != card:
            raise foreign
    return found


def _what_is_wrong(source: ModelSource, selection: Artifact, output: Path, lineage: Lineage | None) -> str | None:
    """What keeps a slice from being what slicing would write now, or `None`: its tensors, config, code, companions."""
    work = _work(source, *_checked(source, selection))
    wanted = set(work.cutting.written(entry for _header, entry in source.tensors.values()))
    try:
        made = resolve_model(str(output))
        found = {(entry.name, entry.dtype, entry.shape, entry.nbytes) for _header, entry in made.tensors.values()}
        as_written = lineage is None or made.digest == lineage.record.get(OWN_DIGEST)
        if found != wanted or made.config != work.config or not as_written:
            return "is damaged"
    except LapcliError:
        return "is damaged"
    if work.code is not None and work.code.missing(output):
        return f"has other code than this lapcli writes ({work.code.missing(output)[0]})"
    of_code = {} if work.code is None else work.code.files()
    card = () if (output / "README.md").is_file() else ("README.md",)
    for name in (*lost_companions(source, output, but=of_code), *card):
        return f"has another {name} than {source.name}" if (output / name).is_file() else f"lacks {name}"
    return None


def load_selection(path: Path) -> Artifact:
    """Open a selection.

    Raises:
        ArtifactError: it is missing, truncated, foreign or of a newer schema.
    """
    return read_artifact(path, "selection")
