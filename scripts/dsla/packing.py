"""What a conversion changed, as one small file: with the teacher beside it, the model again."""

import json
from pathlib import Path
from typing import Any

from lapcli.artifacts import atomic_file, read_document, read_header
from lapcli.errors import ArtifactError

HELD = "lapcli-dual-state"
"""The key of the file's metadata that holds all but tensors."""


def pack(model: Path, output: Path) -> str:
    """Write the converted layers' attention of a model that a conversion wrote out; one line about it.

    Args:
        model: its directory (`WORK/dual-0/models/8-of-30`).
        output: a safetensors file, in the model's dtype.

    Raises:
        ArtifactError: the model is of no conversion, or says no teacher.
        ModelError: it is no model.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    from lapcli.families.source import resolve_model

    source = resolve_model(str(model))
    settings = source.config.get("dual_state")
    if not isinstance(settings, dict) or "layers" not in settings:
        raise ArtifactError(
            f"{model} is no model that a conversion to states wrote: config.json ({source.config.get('model_type')}) "
            "has no dual_state",
            "name one, such as WORK/loss-0/models/8-of-30; lapcli convert --export FRACTION --output WORK writes it",
        )
    teacher = read_document(model / "lapcli.json").model["digest"]
    prefixes = tuple(f"model.layers.{layer}.self_attn." for layer in settings["layers"])
    tensors: dict[str, Any] = {}
    for shard in source.shards:
        with safe_open(shard, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118 -- it is no dictionary
            tensors |= {name: opened.get_tensor(name) for name in names}
    with atomic_file(output) as temporary:
        save_file(tensors, temporary, {HELD: json.dumps({"teacher": teacher, "dual_state": settings})})
    return f"{output}: {len(settings['layers'])} layers, {output.stat().st_size / 1e6:.1f} MB\n"


def unpack(teacher: Path, file: Path, output: Path) -> str:
    """Write the model that was packed; one line about it.

    Args:
        teacher: the directory of the model that was converted.
        file: of `pack`.
        output: the model's directory.

    Raises:
        ArtifactError: the file is damaged, or nothing that `pack` wrote, or was packed beside another teacher; or the
            directory is there.
        ModelError: the teacher is no model.
    """
    from safetensors import safe_open

    from lapcli.families.source import resolve_model
    from lapcli.stages.dual_state_writing import write_converted

    if output.exists():
        raise ArtifactError(f"{output} exists already", "remove it, or name another directory")
    source = resolve_model(str(teacher))
    try:
        held = json.loads(read_header(file).metadata[HELD])
        packed_beside, settings, layers = held["teacher"], held["dual_state"], held["dual_state"]["layers"]
    except (KeyError, TypeError, ValueError):
        raise ArtifactError(f"{file} is a safetensors file, but none that `pack` wrote: no {HELD!r} in its header",
                            "make one with: dsla_study.py pack MODEL FILE") from None  # fmt: skip
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- it is no dictionary
    if packed_beside != source.digest:
        raise ArtifactError(f"{file} is for the teacher {packed_beside[:12]}, and {teacher} is {source.digest[:12]}",
                            "name the directory of the model that was converted")  # fmt: skip
    card = (
        f"# {source.config['model_type']} with {len(layers)} attention layers as dual states\n\nMade of {file.name}.\n"
    )
    write_converted(source, settings, tensors, output, card=card)
    return f"{output}: {len(layers)} layers converted\n"
