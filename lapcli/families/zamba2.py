"""Zamba2: Mamba-2 in every layer; in some, after a transformer block that the layers share."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Family, StatefulLayer
from lapcli.families.fields import bad_field, positive_integer, switch
from lapcli.families.packed import MambaGroups, expanded_width, layers_of_type


class Zamba2(Family):
    """The width is `mamba_d_state`; a layer with a transformer block has its mixer one level deeper."""

    name = "zamba2"
    model_types = ("zamba2",)
    tested = "masked oracle on transformers' own model (1 and 2 groups, shared blocks), reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare all layers."""
        heads, inner = positive_integer(config, "n_mamba_heads"), expanded_width(config, "mamba_expand")
        if inner % heads:
            raise bad_field("n_mamba_heads", heads, f"a divisor of mamba_expand x hidden_size = {inner}")
        groups = MambaGroups(
            heads=heads,
            head_width=inner // heads,
            groups=positive_integer(config, "mamba_ngroups"),
            state_width=positive_integer(config, "mamba_d_state"),
            taps=positive_integer(config, "mamba_d_conv"),
            bias=True,  # whatever `use_conv_bias` says: no version of the library reads it here
            activation="silu",  # nor `hidden_act`
            projection_bias=switch(config, "add_bias_linear", False),
        )
        hybrid = set(layers_of_type(config, "hybrid", field="layers_block_type", default=_types))

        def layer(index: int) -> StatefulLayer:
            mixer = f"model.layers.{index}.{'mamba_decoder.mamba' if index in hybrid else 'mamba'}"
            return groups.layer(index, disk=mixer, memory=mixer)

        return tuple(layer(index) for index in range(positive_integer(config, "num_hidden_layers")))

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `mamba_d_state`; the head width follows from other fields."""
        return {**config, "mamba_d_state": kept_width}


def _types(_count: int) -> list[str]:
    """The types that the library takes where a config lists none: those of one model, of 54 layers."""
    gaps = [6, *[5] * 6, 4, 3]
    return [kind for gap in gaps for kind in (*["linear_attention"] * gap, "hybrid")] + ["linear_attention"] * 2
