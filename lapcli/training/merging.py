"""Merging an adapter into its model's checkpoint, tensor by tensor: no model is loaded, no other byte changes.

Names in memory are not always names on disk: transformers renames, joins and splits tensors when it loads. Which rows
of which tensor on disk become which rows of a parameter is found by asking it: a model without weights (on the meta
device) says what conversions it loads with, and those are run on the numbers of rows instead of on rows. What does not
come out as such numbers, each once, is refused.
"""

import shutil
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import Lineage, TensorEntry, atomic_directory, digest_file, taken, write_document
from lapcli.errors import ArtifactError, FamilyError
from lapcli.families.loading import skeleton
from lapcli.families.registry import family_for
from lapcli.families.source import INDEX_FILE, ModelSource, companions, copy_companions, refuse_quantised, resolve_model
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.lineage import LINEAGE_FILE, OWN_DIGEST, refuse_other_model, stage_before
from lapcli.training.adapters import FULL_FILE, LORA_FILE, read_adapter
from lapcli.training.card import AS_BEFORE

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What tells how the model came to be, which is no longer the whole story."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor on disk that become rows of a parameter.

    Attributes:
        tensor: name in the checkpoint.
        stored: numbers of its rows.
        loaded: numbers of the parameter's rows, in the same order.
    """

    tensor: str
    stored: Tensor
    loaded: Tensor


@dataclass(frozen=True)
class Merged:
    """What merging wrote.

    Attributes:
        path: the model directory.
        changed: names of tensors of which any byte changed.
        tensors: how many there are.
    """

    path: Path
    changed: tuple[str, ...]
    tensors: int


def merge(
    source: ModelSource,
    adapter: Path,
    output: Path,
    *,
    card: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Merged:
    """Write a checkpoint of the same names, files and dtypes in which what was trained has its new values.

    A LoRA product is computed in fp32, added to the stored value in fp32, and rounded once to the stored dtype. Where
    training changed nothing, the stored value stays, to the bit.

    Args:
        source: the model that was trained.
        adapter: a folder that `save_adapter` wrote for it.
        output: the directory to write; it appears whole or not at all.
        card: text of the model card.
        overwrite: whether a directory of lapcli's with that name gives way.
        trust_remote_code: whether code in the model's directory may run, to learn its names.
        reporter: where progress goes.

    Raises:
        ArtifactError: the adapter is damaged, or was made for another model; the directory exists; a full disk.
        FamilyError: where a trained parameter lies on disk is not known.
        ModelError: the model is quantised or does not fit its config.
    """
    reporter = reporter or SilentReporter()
    refuse_quantised(source.config, source.name)
    assert source.headers  # raises where there are no safetensors, damaged ones, or others than the config implies
    _check_place(source, adapter, output, overwrite)
    lineage, values = read_adapter(adapter)
    refuse_other_model(adapter, lineage, source, "name the model that was trained")
    changes = _changes(lineage, values)
    layout = rows_on_disk(source, changes, trust_remote_code=trust_remote_code)
    by_tensor: dict[str, list[tuple[str, Rows]]] = {}
    for name, places in layout.items():
        for rows in places:
            by_tensor.setdefault(rows.tensor, []).append((name, rows))

    changed: list[str] = []
    total = sum(header.path.stat().st_size for header in source.headers)
    with (
        atomic_directory(output, replace=overwrite) as folder,
        reporter.task("writing the merged model", total=total, unit="B") as task,
    ):
        for header in source.headers:
            target = folder / header.path.name
            shutil.copyfile(header.path, target)
            with target.open("r+b") as file:
                for entry in header.tensors.values():
                    if entry.name in by_tensor:
                        file.seek(entry.start)
                        before = file.read(entry.nbytes)
                        after = _merged(entry, before, [(changes[name], rows) for name, rows in by_tensor[entry.name]])
                        if after != before:
                            file.seek(entry.start)
                            file.write(after)
                            changed.append(entry.name)
            task.advance(header.path.stat().st_size)
        index = [] if source.index is None else [INDEX_FILE]
        copy_companions(source, folder, (*companions(source), "config.json", *index))
        (folder / "README.md").write_text(_card(source, len(changed)) if card is None else card)
        digest = resolve_model(str(folder)).digest
        write_document(folder / LINEAGE_FILE, merged_lineage(source, adapter, lineage, digest))
    return Merged(output, tuple(changed), len(source.tensors))


def merged_lineage(source: ModelSource, adapter: Path, of: Lineage, digest: str) -> Lineage:
    """The lineage of a merged model.

    Args:
        source: the model that was trained.
        adapter: the adapter's folder.
        of: its lineage.
        digest: of the merged model.
    """
    return Lineage(
        kind="model",
        model=source.describe(),
        family=family_for(source.config).name,
        settings={"stage": "recovery", **of.settings},
        parents={"adapter": _digest(adapter), **stage_before(source.path)},
        record={"trained": of.record.get("trained"), OWN_DIGEST: digest},
    )


def rows_on_disk(
    source: ModelSource, names: Iterable[str], *, trust_remote_code: bool = False
) -> dict[str, tuple[Rows, ...]]:
    """Where the rows of parameters lie in a checkpoint, as the library's own loading has it.

    Args:
        source: the checkpoint.
        names: of parameters in memory.
        trust_remote_code: whether code in the model's directory may run.

    Raises:
        FamilyError: a parameter does not exist, or is not made of whole rows of tensors on disk, each once.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    model = skeleton(source, trust_remote_code=trust_remote_code)
    parameters: dict[str, Tensor] = model.state_dict()
    transforms: list[Any] = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def loaded_as(name: str) -> tuple[str, str | None]:
        """The parameter of a tensor and the pattern of the converter that makes it, as transformers decides it."""
        prefix = model.base_model_prefix
        found, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if found not in parameters and name in parameters:
            found, pattern = rename_source_key(name, [], [], prefix, parameters)
        return found, pattern

    direct: dict[str, str] = {}
    converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(source.tensors, key=_natural):
        parameter, pattern = loaded_as(name)
        if pattern is None:
            direct[parameter] = name
        else:
            converted.setdefault(parameter, (converter_of[pattern], []))[1].append((pattern, name))
    wanted = set(names)
    found = {
        parameter: (name, torch.arange(source.tensors[name][1].shape[0]))
        for parameter, name in direct.items()
        if parameter in wanted and source.tensors[name][1].shape
    }
    layout = {parameter: (Rows(name, rows, rows),) for parameter, (name, rows) in found.items()}
    causes: dict[str, Exception] = {}
    for first, (converter, parts) in converted.items():
        targets = {first.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns}
        if targets & wanted:
            try:
                layout |= _converted(model, first, deepcopy(converter), parts, source, wanted)
            except Exception as error:  # of any kind: operations are the library's, and not meant for numbers of rows
                causes |= dict.fromkeys(targets, error)
    for name in sorted(wanted):
        _check_rows(source, name, parameters.get(name), layout.get(name, ()), causes.get(name))
    return layout


def _converted(
    model: Any, first: str, converter: Any, parts: list[tuple[str, str]], source: ModelSource, wanted: set[str]
) -> dict[str, tuple[Rows, ...]]:
    """Run one conversion on numbers: of all rows of all its tensors, one after the other."""
    names, starts, end = [name for _pattern, name in parts], [], 0
    for pattern, name in parts:
        shape = source.tensors[name][1].shape
        numbers = torch.arange(end, end + shape[0]).view(-1, *(1,) * (len(shape) - 1))
        converter.add_tensor(first, name, pattern, lambda numbers=numbers: numbers)
        starts.append(end)
        end += shape[0]
    made = converter.convert(first, model=model, config=model.config)
    layout: dict[str, tuple[Rows, ...]] = {}
    for parameter in wanted & made.keys():
        value = made[parameter]
        value = value[0] if isinstance(value, list) else value
        numbers = value.flatten()
        if len(numbers) != len(value):
            continue
        owner = torch.bucketize(numbers, torch.tensor(starts), right=True) - 1
        layout[parameter] = tuple(
            Rows(names[part], numbers[owner == part] - starts[part], (owner == part).nonzero().flatten())
            for part in owner.unique().tolist()
        )
    return layout


def _check_rows(
    source: ModelSource, name: str, parameter: Tensor | None, places: tuple[Rows, ...], cause: Exception | None
) -> None:
    """Every row of a parameter must be one row on disk, of the same length."""
    if parameter is None:
        raise FamilyError(
            f"{source.name} has no parameter {name}, which the adapter changes", "name the model that was trained"
        )
    loaded = torch.cat([rows.loaded for rows in places]) if places else torch.empty(0, dtype=torch.int64)
    whole = len(parameter) == len(loaded) and torch.equal(loaded.sort().values, torch.arange(len(parameter)))
    once = all(len(rows.stored.unique()) == len(rows.stored) for rows in places)
    alike = all(source.tensors[rows.tensor][1].shape[1:] == tuple(parameter.shape[1:]) for rows in places)
    if not (whole and once and alike):
        raise FamilyError(
            f"where {name} lies in the files of {source.name} is not known: transformers does not make it of whole "
            "rows of tensors on disk",
            "load the model, give it the adapter with peft and save it; docs/add-a-family.md says what lapcli needs",
        ) from cause


@dataclass(frozen=True)
class _Change:
    """What becomes of one parameter: a LoRA product that is added, or a value in its place."""

    added: tuple[Tensor, Tensor, float] | None = None
    value: Tensor | None = None
    loaded_in: torch.dtype = torch.float32

    def of(self, stored: Tensor, rows: Tensor) -> Tensor:
        """The new values of stored rows that are these rows of the parameter, in the stored dtype."""
        before = stored.float()
        if self.added is not None:
            down, up, scale = self.added
            delta = (up[rows] @ down) * scale
            same, after = delta == 0, before + delta.reshape(before.shape)
        else:
            assert self.value is not None
            after = self.value[rows].reshape(before.shape)
            # Training began from the stored value as it was loaded; what is still that has not changed.
            same = after == stored.to(self.loaded_in).float()
        return torch.where(same.reshape(before.shape), stored, after.to(stored.dtype))


def _changes(lineage: Lineage, values: Mapping[str, Tensor]) -> dict[str, _Change]:
    """By parameter in memory, what an adapter changes."""
    changes: dict[str, _Change] = {}
    dtypes, settings = lineage.record.get("dtypes", {}), lineage.settings
    for name, tensor in values.items():
        if name.endswith(".lora_A.weight"):
            up = values[name.replace(".lora_A.", ".lora_B.")]
            scale = settings["alpha"] / settings["rank"]
            parameter = name.removesuffix(".lora_A.weight") + ".weight"
            changes[parameter] = _Change(added=(tensor.float(), up.float(), scale))
        elif not name.endswith(".lora_B.weight"):
            loaded_in: torch.dtype = getattr(torch, dtypes[name])
            changes[name] = _Change(value=tensor.float(), loaded_in=loaded_in)
    return changes


def _merged(entry: TensorEntry, before: bytes, changes: list[tuple[_Change, Rows]]) -> bytes:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise FamilyError(f"{entry.name} is stored as {entry.dtype}; merging knows {', '.join(_DTYPES)}")
    tensor = torch.frombuffer(bytearray(before), dtype=dtype).view(entry.shape)
    for change, rows in changes:
        tensor[rows.stored] = change.of(tensor[rows.stored], rows.loaded)
    if not tensor.isfinite().all():
        raise ArtifactError(f"{entry.name} holds NaN or infinity once the adapter is merged into {entry.dtype}")
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _check_place(source: ModelSource, adapter: Path, output: Path, overwrite: bool) -> None:
    place = output.resolve()
    for needed in (source.path.resolve(), adapter.resolve()):
        if place == needed or place in needed.parents:
            raise ArtifactError(f"{output} holds {needed}, which is needed here", "pass --output DIR")
    if overwrite and output.exists() and not (output / LINEAGE_FILE).is_file():
        raise taken(output)


def _digest(adapter: Path) -> str:
    from lapcli.artifacts import digest_document

    files = [adapter / name for name in (FULL_FILE, LORA_FILE) if (adapter / name).is_file()]
    return digest_document({file.name: digest_file(file) for file in files})


def _card(source: ModelSource, changed: int) -> str:
    return (
        f"# {source.name}, recovered\n\nMade by lapcli from `{source.name}`: an adapter merged into {changed} tensors "
        f"of {len(source.tensors)}. {source.loading or AS_BEFORE} `{LINEAGE_FILE}` holds the settings and digests of "
        "what it was made from. The base's licence holds.\n"
    )


def _natural(name: str) -> list[tuple[int, int | str]]:
    """The order in which transformers loads tensors: numbers by their value."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
