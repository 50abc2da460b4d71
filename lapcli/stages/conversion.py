"""Conversion: a Gated DeltaNet in, a Q-Delta out that computes the same until it is trained on; no model is loaded.

The feedback's projection is added to each layer, of zeros, so that it adds no draw of random numbers, and a gain of
zero for each value head: `lambda = tanh(gain) sigmoid(W x - bias)` then is exactly 0, the erase direction exactly `k`,
and yet the gain has a gradient (that of the projection follows once the gain has moved). With a `lambda_init` there is
no gain, and the bias makes the feedback begin at that value instead.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lapcli.artifacts import (
    Lineage,
    SafetensorsHeader,
    TensorEntry,
    atomic_directory,
    encode_header,
    taken,
    write_document,
)
from lapcli.errors import ArtifactError, LapcliError, ModelError, UsageError
from lapcli.families.base import StatefulLayer
from lapcli.families.registry import family_for
from lapcli.families.source import INDEX_FILE, ModelSource, copy_companions, lost_companions, refuse_quantised
from lapcli.families.source import resolve_model as resolve
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.lineage import LINEAGE_FILE, OWN_DIGEST, refuse_stale, sliced_lineage, stage_before

LAMB_BIAS = 0.9
"""The paper's; what a feedback that has a gain begins with."""

_MEND = "pass --overwrite, or --output DIR to keep both"
_ITEMSIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_FROM = "gated_deltanet"


@dataclass(frozen=True)
class QDeltaSettings:
    """How query feedback begins.

    Attributes:
        lambda_init: the feedback of every token at first; `None` for a gain that begins at 0.
    """

    lambda_init: float | None = None

    def __post_init__(self) -> None:
        if self.lambda_init is not None and not 0 < self.lambda_init < 1:
            raise UsageError(
                f"--lambda-init {self.lambda_init}: a value between 0 and 1 is wanted, neither of them",
                "leave it out for a feedback that begins at exactly 0",
            )

    @property
    def bias(self) -> float:
        """`lamb_bias` of the config: with a projection of zeros, `sigmoid(-bias)` is the feedback."""
        return LAMB_BIAS if self.lambda_init is None else math.log((1 - self.lambda_init) / self.lambda_init)


@dataclass(frozen=True)
class Added:
    """A tensor of zeros that conversion adds.

    Attributes:
        name: on disk.
        dtype: the format's name.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class ConversionPlan:
    """What conversion would write.

    Attributes:
        source: the Gated DeltaNet.
        settings: how feedback begins.
        layers: its stateful layers.
        config: of the Q-Delta.
        added: by file, what is added to it.
    """

    source: ModelSource
    settings: QDeltaSettings
    layers: tuple[StatefulLayer, ...]
    config: dict[str, Any]
    added: dict[str, tuple[Added, ...]]

    @property
    def parameters(self) -> int:
        """Numbers that are added."""
        return sum(math.prod(each.shape) for parts in self.added.values() for each in parts)

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        weights = sum(entry.nbytes for _header, entry in self.source.tensors.values())
        more = sum(each.nbytes for parts in self.added.values() for each in parts)
        return {
            "model": self.source.name,
            "to": "qdelta",
            "layers": len(self.layers),
            "lambda_init": self.settings.lambda_init,
            "lamb_bias": self.settings.bias,
            "computes": _computes(self.settings),
            "added_tensors": sum(map(len, self.added.values())),
            "added_parameters": self.parameters,
            "bytes_before": weights,
            "bytes_after": weights + more,
            # Feedback is no part of it.
            "state_bytes": sum(layer.state_bytes() for layer in self.layers),
        }


def plan_conversion(source: ModelSource, settings: QDeltaSettings) -> ConversionPlan:
    """Say what conversion would do, or refuse it, from config and headers alone.

    Args:
        source: a Gated DeltaNet, whole or pruned.
        settings: how feedback begins.

    Raises:
        ModelError: it is another model, quantised, damaged, or has parts that Q-Delta has not.
    """
    model_type = source.config.get("model_type")
    if model_type == "qdelta":
        raise ModelError(f"{source.name} is a Q-Delta already", "train it on, or recover it, as it is")
    if model_type != _FROM:
        raise ModelError(
            f"{source.name} is a {model_type}; what becomes a Q-Delta is a {_FROM}, whole or pruned",
            "name such a model",
        )
    for field in ("attn", "attnres_block_size"):
        if source.config.get(field) is not None:
            raise ModelError(
                f"{source.name} has {field} = {source.config[field]!r}, which runs in fla alone, and fla has no Q-Delta"
            )
    refuse_quantised(source.config, source.name)
    assert source.headers  # raises where there are no safetensors, damaged ones, or others than the config implies
    layers = family_for(source.config).layers(source.config)
    config = {name: value for name, value in source.config.items() if name != "auto_map"}
    config |= {"model_type": "qdelta", "architectures": ["QDeltaForCausalLM"], "lamb_bias": settings.bias}
    if settings.lambda_init is None:
        config["lamb_gain"] = True
    added: dict[str, list[Added]] = {header.path.name: [] for header in source.headers}
    for layer in layers:
        header, beside = source.tensors[f"{layer.mixer}.b_proj.weight"]
        dtype = _dtype(header, beside)
        found = [Added(f"{layer.mixer}.lamb_proj.weight", dtype, beside.shape)]
        if settings.lambda_init is None:
            found.append(Added(f"{layer.mixer}.lamb_gain", dtype, beside.shape[:1]))
        added[header.path.name] += found
    return ConversionPlan(source, settings, layers, config, {name: tuple(parts) for name, parts in added.items()})


def _dtype(header: SafetensorsHeader, beside: TensorEntry) -> str:
    """The dtype of what is added at a file's end: the layer's own, or the last tensor's, which is aligned there."""
    end = sum(entry.nbytes for entry in header.tensors.values())
    last = list(header.tensors.values())[-1].dtype
    for dtype in (beside.dtype, last):
        if dtype in _ITEMSIZE and end % _ITEMSIZE[dtype] == 0:
            return dtype
    raise ModelError(
        f"{header.path} ends with a tensor of {last}, beside which no weights can be added",
        "save the model again: load it with transformers and call save_pretrained(DIR)",
    )


def _computes(settings: QDeltaSettings) -> str:
    if settings.lambda_init is None:
        return "the same function: the feedback is exactly 0 until it is trained"
    return f"another function: the feedback begins at {settings.lambda_init:g}"


def conversion_lineage(source: ModelSource, settings: QDeltaSettings) -> Lineage:
    """The lineage of a conversion of this model."""
    return Lineage(
        kind="model",
        model=source.describe(),
        family="qdelta",
        settings={"stage": "conversion", "to": "qdelta", **asdict(settings)},
        parents=stage_before(source.path),
    )


def convert_into(
    plan: ConversionPlan,
    output: Path,
    *,
    overwrite: bool = False,
    mend: str = _MEND,
    reporter: Reporter | None = None,
) -> bool:
    """Write the Q-Delta, unless this very one is there already.

    Args:
        plan: of `plan_conversion`.
        output: the directory to write; it appears whole or not at all.
        overwrite: whether a conversion of other inputs gives way.
        mend: what a user can do about one that may not.
        reporter: where progress goes.

    Returns:
        Whether any work was done.

    Raises:
        ArtifactError: something else lies there; or the disk is full.
        ModelError: the directory is the model's own.
    """
    there, wrong = check_output(plan, output, overwrite=overwrite, mend=mend)
    if there:
        return False
    reporter = reporter or SilentReporter()
    if wrong is not None:
        reporter.warn(f"{output} {wrong}; it is made again")
    _write(plan, output, overwrite or wrong is not None, reporter)
    return True


def check_output(
    plan: ConversionPlan, output: Path, *, overwrite: bool = False, mend: str = _MEND
) -> tuple[bool, str | None]:
    """Refuse what `convert_into` would, with nothing written.

    Args:
        plan: of `plan_conversion`.
        output: the directory to write.
        overwrite: whether a conversion of other inputs gives way.
        mend: what a user can do about one that may not.

    Returns:
        Whether this very conversion is there, whole; and where it is there, but is not whole, what is wrong with it.

    Raises:
        ArtifactError: something else lies there, or no directory can.
        ModelError: the directory is the model's own.
    """
    source, place = plan.source, output.resolve()
    if place == source.path or place in source.path.parents:
        raise ModelError(f"{output} is, or holds, the model itself; it needs another directory", "pass --output DIR")
    if not output.exists():
        above = next(folder for folder in place.parents if folder.exists())
        if not above.is_dir():
            raise ArtifactError(f"{output} cannot be made: {above} is no directory", "name another with --output")
        return False, None
    existing = _lineage_there(output)
    try:
        refuse_stale(conversion_lineage(source, plan.settings), existing, output, mend)
    except ArtifactError:
        if not overwrite:
            raise
        return False, None
    wrong = _what_is_wrong(plan, output, existing)
    return wrong is None, wrong


def is_there(plan: ConversionPlan, output: Path) -> bool:
    """Whether a directory holds just what `convert_into` would write."""
    try:
        return check_output(plan, output)[0]
    except LapcliError:
        return False


def _lineage_there(output: Path) -> Lineage:
    """The lineage of what lies there.

    Raises:
        ArtifactError: no conversion to a Q-Delta wrote it; not even --overwrite may remove anything else.
    """
    lineage = sliced_lineage(output) if output.is_dir() else None
    if lineage is None or lineage.settings.get("stage") != "conversion":
        raise taken(output)
    return lineage


def _what_is_wrong(plan: ConversionPlan, output: Path, lineage: Lineage) -> str | None:
    """What keeps a directory from being what conversion would write now, or `None`."""
    try:
        made = resolve(str(output))
        whole = made.digest == lineage.record.get(OWN_DIGEST) and bool(made.headers)
    except LapcliError:
        whole = False
    if not whole:
        return "is damaged"
    card = () if (output / "README.md").is_file() else ("README.md",)
    lost = (*lost_companions(plan.source, output), *card)
    return f"lacks {lost[0]}, or has another one than {plan.source.name}" if lost else None


def _write(plan: ConversionPlan, output: Path, overwrite: bool, reporter: Reporter) -> None:
    source = plan.source
    size = sum(header.path.stat().st_size for header in source.headers)
    with (
        atomic_directory(output, replace=overwrite) as folder,
        reporter.task(f"converting {source.name}", total=size, unit="B") as task,
    ):
        for header in source.headers:
            _write_shard(header, plan.added[header.path.name], folder / header.path.name, task.advance)
        if source.index is not None:
            (folder / INDEX_FILE).write_text(json.dumps(_index(plan), indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n")
        copy_companions(source, folder)
        (folder / "README.md").write_text(_card(plan))
        lineage = conversion_lineage(source, plan.settings)
        record = {OWN_DIGEST: resolve(str(folder)).digest}
        write_document(folder / LINEAGE_FILE, replace(lineage, record=record))


def _write_shard(
    header: SafetensorsHeader, added: tuple[Added, ...], target: Path, advance: Callable[[float], None]
) -> None:
    """A file's own tensors byte for byte, in their order, and after them zeros."""
    entries = [(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in header.tensors.values()]
    entries += [(each.name, each.dtype, each.shape, each.nbytes) for each in added]
    first = min(entry.start for entry in header.tensors.values())
    with header.path.open("rb") as given, target.open("wb") as out:
        out.write(encode_header(entries, header.metadata))
        given.seek(first)
        shutil.copyfileobj(given, out, 16 << 20)
        for each in added:
            out.write(bytes(each.nbytes))
    advance(header.path.stat().st_size)


def _index(plan: ConversionPlan) -> dict[str, Any]:
    index = plan.source.index
    assert index is not None
    metadata = dict(index.get("metadata") or {})
    more = [each for parts in plan.added.values() for each in parts]
    if "total_size" in metadata:
        metadata["total_size"] += sum(each.nbytes for each in more)
    if "total_parameters" in metadata:
        metadata["total_parameters"] += plan.parameters
    where = {each.name: file for file, parts in plan.added.items() for each in parts}
    return {**index, "metadata": metadata, "weight_map": {**index["weight_map"], **where}}


def _card(plan: ConversionPlan) -> str:
    source, document = plan.source, plan.document()
    begins = (
        "Each value head multiplies its query feedback by `tanh(lamb_gain)`, and all gains are 0, so that this model "
        "computes what it was made from computes. Trained on, the gains move, then the rest of the feedback."
        if plan.settings.lambda_init is None
        else f"The query feedback of every token begins at {plan.settings.lambda_init:g}."
    )
    return (
        f"# {source.name} as a Q-Delta\n\n"
        f"Made by lapcli from `{source.name}`"
        + (f" (revision `{source.revision}`)" if source.revision else "")
        + f" (arXiv 2606.08804; `docs/q-delta.md` of lapcli). {begins} Nothing was trained.\n\n"
        f"| | before | here |\n| --- | --- | --- |\n"
        f"| weights, bytes | {document['bytes_before']} | {document['bytes_after']} |\n"
        f"| state of one sequence, fp32 bytes | {document['state_bytes']} | {document['state_bytes']} |\n\n"
        f"lapcli's own class loads it. `{LINEAGE_FILE}` holds what it was made from. The base's licence holds.\n"
    )
