"""Gated DeltaNet 2 (fla's `gdn2`): decay and erase gates for each key channel, shared by the value heads of a key head.

fla 0.6 has the layer and no model of it; fla's repository has both, under this `model_type`.
"""

from collections.abc import Mapping
from typing import Any

from lapcli.families.fields import positive_integer
from lapcli.families.fla_mixers import (
    Channels,
    FlaMixer,
    FlaMixers,
    convolution_taps,
    head_value_width,
    value_heads_of,
)
from lapcli.families.gated_deltanet import expand_v_for


class GatedDeltaNet2(FlaMixers):
    """The width is `head_dim`; `expand_v` must follow it."""

    name = "gdn2"
    model_types = ("gdn2",)
    tested = "masked oracle on fla's own layer in a model of ours (interpreter and GPU); fla 0.6 has no model of it"

    def mixer(self, config: Mapping[str, Any]) -> FlaMixer:
        """Keys, queries and gates are per key head, and repeated for the value heads that read it."""
        heads, width = positive_integer(config, "num_heads"), positive_integer(config, "head_dim")
        value_heads, value_width = value_heads_of(config, heads), head_value_width(config)
        channels = Channels(width)
        return FlaMixer(
            heads,
            value_heads,
            width,
            value_width,
            queries=channels,
            keys=channels,
            value_channels=value_heads * value_width,
            taps=convolution_taps(config, default=True),
            # w_proj, the write gate, is on the value axis.
            gates=(
                ("f_proj.1.weight", "gate projection", channels),
                ("b_proj.weight", "gate projection", channels),
                ("dt_bias", "gate bias", channels),
            ),
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `head_dim`, and `expand_v` so that the value width stays."""
        return {**config, "head_dim": kept_width, "expand_v": expand_v_for(head_value_width(config), kept_width)}
