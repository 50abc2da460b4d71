"""Bamba: Mamba-2 layers with softmax attention between them."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Family, StatefulLayer
from lapcli.families.fields import bad_field, positive_integer
from lapcli.families.packed import MambaGroups, expanded_width


class Bamba(Family):
    """Every layer keeps a state but those that `attn_layer_indices` lists; the width is `mamba_d_state`."""

    name = "bamba"
    model_types = ("bamba",)
    tested = "masked oracle on transformers' own model (1 and 2 groups), reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the layers that are not softmax attention."""
        groups = MambaGroups.read(config, expanded_width(config, "mamba_expand"))
        softmax = config.get("attn_layer_indices") or []
        if not isinstance(softmax, list) or any(type(index) is not int for index in softmax):
            raise bad_field("attn_layer_indices", softmax, "a list of layer numbers")
        stateful = (index for index in range(positive_integer(config, "num_hidden_layers")) if index not in softmax)
        mixers = ((index, f"model.layers.{index}.mamba") for index in stateful)
        return tuple(groups.layer(index, disk=mixer, memory=mixer) for index, mixer in mixers)

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `mamba_d_state`; the head width follows from other fields."""
        return {**config, "mamba_d_state": kept_width}
