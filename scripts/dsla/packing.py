"""What a conversion changed, as one small file: with the teacher beside it, the model again."""

import json
from pathlib import Path
from typing import Any

HELD = "lapcli-dual-state"
"""The key of the file's metadata that holds all but tensors."""


def pack(model: Path, output: Path) -> str:
    """Write the converted layers' attention of a model that a conversion wrote out; one line about it.

    Args:
        model: its directory (`WORK/dual-0/models/8-of-30`).
        output: a safetensors file, in the model's dtype.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    from lapcli.families.source import resolve_model

    source = resolve_model(str(model))
    settings = source.config["dual_state"]
    prefixes = tuple(f"model.layers.{layer}.self_attn." for layer in settings["layers"])
    tensors: dict[str, Any] = {}
    for shard in source.shards:
        with safe_open(shard, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118 -- it is no dictionary
            tensors |= {name: opened.get_tensor(name) for name in names}
    teacher = json.loads((model / "lapcli.json").read_text())["model"]["digest"]
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output, {HELD: json.dumps({"teacher": teacher, "dual_state": settings})})
    return f"{output}: {len(settings['layers'])} layers, {output.stat().st_size / 1e6:.1f} MB\n"


def unpack(teacher: Path, file: Path, output: Path) -> str:
    """Write the model that was packed; one line about it.

    Args:
        teacher: the directory of the model that was converted.
        file: of `pack`.
        output: the model's directory.

    Raises:
        SystemExit: it was packed beside another teacher.
    """
    from safetensors import safe_open

    from lapcli.families.source import resolve_model
    from lapcli.stages.dual_state_writing import write_converted

    source = resolve_model(str(teacher))
    with safe_open(file, framework="pt") as opened:
        held = json.loads(opened.metadata()[HELD])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- it is no dictionary
    if held["teacher"] != source.digest:
        raise SystemExit(f"{file} is for the teacher {held['teacher'][:12]}, and {teacher} is {source.digest[:12]}")
    layers = held["dual_state"]["layers"]
    card = (
        f"# {source.config['model_type']} with {len(layers)} attention layers as dual states\n\nMade of {file.name}.\n"
    )
    write_converted(source, held["dual_state"], tensors, output, card=card)
    return f"{output}: {len(layers)} layers converted\n"
