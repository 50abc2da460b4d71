"""Mamba-2 in transformers' naming, Codestral-Mamba among them: B and C are its keys and queries, shared by a group."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Family, StatefulLayer
from lapcli.families.fields import bad_field, positive_integer, positive_number, switch
from lapcli.families.packed import MambaGroups


class Mamba2(Family):
    """Every layer keeps a state; the width is `state_size`."""

    name = "mamba2"
    model_types = ("mamba2",)
    tested = (
        "masked oracle on transformers' own model (1 and 8 groups), reload in a fresh process; "
        "its PyTorch path on an H200"
    )

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare all layers; they are alike."""
        heads, head_width = positive_integer(config, "num_heads"), positive_integer(config, "head_dim")
        inner = int(positive_number(config, "expand") * positive_integer(config, "hidden_size"))
        if heads * head_width != inner:
            raise bad_field("num_heads", heads, f"expand x hidden_size / head_dim = {inner} / {head_width}")
        groups = MambaGroups(
            heads=heads,
            head_width=head_width,
            groups=positive_integer(config, "n_groups"),
            state_width=positive_integer(config, "state_size"),
            taps=positive_integer(config, "conv_kernel"),
            bias=switch(config, "use_conv_bias", True),
            activation=config.get("hidden_act", "silu"),
            projection_bias=switch(config, "use_bias", False),
        )
        mixers = (f"backbone.layers.{index}.mixer" for index in range(positive_integer(config, "num_hidden_layers")))
        return tuple(groups.layer(index, disk=mixer, memory=mixer) for index, mixer in enumerate(mixers))

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `state_size`."""
        return {**config, "state_size": kept_width}
