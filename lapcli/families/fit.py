"""Whether a checkpoint holds the tensors that its config implies: by names and shapes alone, before any work."""

import re
from collections.abc import Mapping
from typing import Any

from lapcli.artifacts import TensorEntry
from lapcli.errors import ModelError
from lapcli.families.base import Family, Sizes
from lapcli.families.packed import text_part

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HINT = "the weights and config.json do not belong together: put config.json right, or download the model again"


def refuse_misfit(name: str, family: Family, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse a checkpoint that lacks a tensor, has one too many, or has one of another shape.

    Args:
        name: of the model, for the message.
        family: of the model.
        config: the parsed `config.json`.
        tensors: the entries of all weight files by name.

    Raises:
        ModelError: naming the first such tensor, what the config implies and what was found; or a field of the
            config has no usable value.
    """
    declared = family.tensors(config)
    for tensor, sizes in declared.items():
        entry = tensors.get(tensor)
        if entry is None:
            raise ModelError(f"{name} has no tensor {tensor}, but {_why_wanted(tensor, config, tensors)}", _HINT)
        if entry.shape != tuple(size for _meaning, size in sizes):
            raise ModelError(
                f"{tensor} of {name} has the shape {list(entry.shape)}, but config.json implies {_spelled(sizes)}",
                _HINT,
            )
    _refuse_other_widths(name, family, config, tensors)
    free = family.undeclared(config)
    layers = text_part(config).get("num_hidden_layers")
    head = family.mtp(config, tensors.keys())
    further = frozenset() if head is None else head.tensors
    for tensor in sorted(tensors.keys() - declared.keys(), key=_in_order):
        number = _layer(tensor)
        if number is not None and isinstance(layers, int) and number >= layers and tensor not in further:
            raise ModelError(
                f"{name} has a tensor {tensor}, but config.json says num_hidden_layers = {layers}; the weights hold "
                + _layers_of(tensors),
                _HINT,
            )
        if not tensor.startswith(free):
            raise ModelError(f"{name} has a tensor {tensor}, which its config.json does not imply", _HINT)


def _refuse_other_widths(
    name: str, family: Family, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> None:
    """Refuse a layer whose short convolution has other channels than its heads and widths make.

    Where a checkpoint has one tensor for it all, its length tells heads and widths that are too small too.
    """
    shapes = {tensor: entry.shape for tensor, entry in tensors.items()}
    for layer in family.layers(config):
        members = [member for member in family.members(layer, shapes) if member.role.endswith("convolution")]
        holders = {member.tensor for member in members}
        if layer.convolution is None or len(holders) != 1 or any(member.partial for member in members):
            continue
        (tensor,) = holders
        if tensor in shapes and shapes[tensor][0] != layer.convolution.channels:
            raise ModelError(
                f"{tensor} of {name} has {shapes[tensor][0]} channels, but config.json implies "
                f"{layer.convolution.channels} ({layer.heads} key heads or groups of {layer.key_width}, "
                f"{layer.value_heads} value heads of {layer.value_width})",
                _HINT,
            )


def _why_wanted(tensor: str, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> str:
    """What about the config makes one expect a tensor."""
    number = _layer(tensor)
    if number is not None and number not in {_layer(found) for found in tensors}:
        return f"config.json says num_hidden_layers = {config['num_hidden_layers']}; the weights hold " + _layers_of(
            tensors
        )
    if tensor.startswith("lm_head."):
        return "config.json says tie_word_embeddings = false, so the head is not the embedding"
    return "its config.json implies one"


def _spelled(sizes: Sizes) -> str:
    return "[" + ", ".join(f"{size} ({meaning})" for meaning, size in sizes) + "]"


def _layer(tensor: str) -> int | None:
    found = _LAYER.search(tensor)
    return None if found is None else int(found[1])


def _in_order(tensor: str) -> tuple[int, str]:
    number = _layer(tensor)
    return (-1 if number is None else number, tensor)


def _layers_of(tensors: Mapping[str, TensorEntry]) -> str:
    numbers = {number for tensor in tensors if (number := _layer(tensor)) is not None}
    return f"layers {min(numbers)} to {max(numbers)}" if numbers else "no layers"
