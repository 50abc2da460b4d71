"""Granite 4: Mamba-2 layers with softmax attention between them, each followed by experts or a shared MLP."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Family, StatefulLayer
from lapcli.families.packed import MambaGroups, expanded_width, layers_of_type


class GraniteMoeHybrid(Family):
    """The width is `mamba_d_state`; published configs call the stateful layers `mamba`, newer ones otherwise."""

    name = "granitemoehybrid"
    model_types = ("granitemoehybrid",)
    tested = "masked oracle on transformers' own model (1 and 4 groups), reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the layers of type `mamba` or `linear_attention`."""
        groups = MambaGroups.read(config, expanded_width(config, "mamba_expand"))
        # The library takes either name for the list of types.
        field = "layers_block_type" if config.get("layers_block_type") else "layer_types"
        mixers = (
            (index, f"model.layers.{index}.mamba")
            # Without a list, all are.
            for index in layers_of_type(
                config, "mamba", "linear_attention", field=field, default=lambda n: ["mamba"] * n
            )
        )
        return tuple(groups.layer(index, disk=mixer, memory=mixer) for index, mixer in mixers)

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `mamba_d_state`; the head width follows from other fields."""
        return {**config, "mamba_d_state": kept_width}
