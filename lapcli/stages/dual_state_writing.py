"""Write a model some of whose layers are converted, beside its teacher: shard by shard, all else byte by byte."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import SafetensorsHeader, atomic_directory, encode_header
from lapcli.errors import ArtifactError, ModelError
from lapcli.families.dual_state import converted_config, model_code
from lapcli.families.source import INDEX_FILE, ModelSource, copy_companions
from lapcli.reporting import Reporter, SilentReporter

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_COPY_BLOCK = 16 * 2**20


def write_converted(
    source: ModelSource,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    output: Path,
    *,
    card: str,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Write a converted model that stock transformers loads with `trust_remote_code`, and lapcli without.

    Tensors that the teacher has get the dtype that they have there, new ones that of their layer's others; numbers of
    channels stay whole.

    Args:
        source: the teacher.
        settings: `DualStateSettings.as_config` of the converted layers.
        tensors: of the converted layers by their names in the model: those of the teacher that changed, and new ones.
        output: the directory to write; it appears whole or not at all.
        card: its README.
        overwrite: whether a directory of that name gives way.
        reporter: where progress goes.

    Returns:
        The config that was written.

    Raises:
        ArtifactError: the directory exists; a full disk; a shard that is shorter than its header says.
        FamilyError: no model of the teacher's type can be converted.
        ModelError: a tensor has another shape than the teacher's.
    """
    config = converted_config(source.config, settings)
    entries = {name: entry for name, (_header, entry) in source.tensors.items()}
    prepared = {name: as_stored(source, name, tensor) for name, tensor in tensors.items()}
    new = [name for name in prepared if name not in entries]
    total = sum(entry.nbytes for entry in entries.values())
    with (
        atomic_directory(output, replace=overwrite) as folder,
        (reporter or SilentReporter()).task(f"writing {output.name}", total=total, unit="B") as task,
    ):
        for number, header in enumerate(source.headers):
            last = number == len(source.headers) - 1
            _write_shard(header, prepared, new if last else [], folder / header.path.name, task.advance)
        _write_index(source, prepared, new, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        copy_companions(source, folder)
        for name, packaged in (model_code(config).files() if settings["layers"] else {}).items():
            shutil.copyfile(packaged, folder / name)
        (folder / "README.md").write_text(card)
    return config


def as_stored(source: ModelSource, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a converted layer on the CPU, contiguous, in the dtype that `write_converted` stores it in.

    Args:
        source: the teacher.
        name: in the model.
        tensor: as it was trained.

    Raises:
        ModelError: it has another shape than the teacher's.
    """
    _header, entry = source.tensors.get(name, (None, None))
    if entry is None:
        # As the layer's own projections are, of whatever dtype the rest of the checkpoint is.
        layer = name.split(".self_attn.", maxsplit=1)[0] + ".self_attn."
        entry = next(found for other, (_, found) in source.tensors.items() if other.startswith(layer))
    elif entry.shape != tuple(tensor.shape):
        raise ModelError(f"{name} has the shape {list(tensor.shape)}, and {list(entry.shape)} in the teacher")
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelError(f"{entry.name} of the teacher is {entry.dtype}; F64, F32, F16 or BF16 is wanted")
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


def _write_shard(
    header: SafetensorsHeader, prepared: Mapping[str, Tensor], new: list[str], target: Path, advance: Any
) -> None:
    entries = [(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in header.tensors.values()]
    entries += [
        (name, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in ((name, prepared[name]) for name in new)
    ]
    with header.path.open("rb") as stored, target.open("wb") as out:
        out.write(encode_header(entries, header.metadata))
        for entry in header.tensors.values():
            if entry.name in prepared:
                out.write(_bytes(prepared[entry.name]))
            else:
                stored.seek(entry.start)
                left = entry.nbytes
                while left:
                    block = stored.read(min(left, _COPY_BLOCK))
                    if not block:
                        raise ArtifactError(f"{header.path} ended inside {entry.name}", "download the model again")
                    out.write(block)
                    left -= len(block)
            advance(entry.nbytes)
        for name in new:
            out.write(_bytes(prepared[name]))


def _write_index(source: ModelSource, prepared: Mapping[str, Tensor], new: list[str], folder: Path) -> None:
    if source.index is None:
        return
    metadata = dict(source.index.get("metadata") or {})
    total = sum(entry.nbytes for _header, entry in source.tensors.values())
    metadata["total_size"] = total + sum(prepared[name].nbytes for name in new)
    last = source.headers[-1].path.name
    index = {**source.index, "metadata": metadata}
    index["weight_map"] = {**index["weight_map"], **dict.fromkeys(new, last)}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
