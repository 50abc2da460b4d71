"""Gated DeltaProduct (fla's `gated_deltaproduct`): every token writes several keys to each head."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.fields import optional_integer, positive_integer, switch
from lapcli.families.fla_mixers import Channels, FlaMixer, FlaMixers, convolution_taps, head_value_width
from lapcli.families.gated_deltanet import expand_v_for


class GatedDeltaProduct(FlaMixers):
    """The width is `head_dim`; `k_proj` holds all heads `num_householder` times over, with one kept set a head."""

    name = "gated_deltaproduct"
    model_types = ("gated_deltaproduct",)
    tested = "masked oracle on fla's own model (interpreter and GPU), reload by stock fla config classes"

    def mixer(self, config: Mapping[str, Any]) -> FlaMixer:
        """As many value heads as key heads; fla's config has no other number."""
        heads, width = positive_integer(config, "num_heads"), positive_integer(config, "head_dim")
        writes, value_width = optional_integer(config, "num_householder", 1), head_value_width(config)
        return FlaMixer(
            heads,
            heads,
            width,
            value_width,
            queries=Channels(width),
            keys=Channels.of_writes(width, heads, writes),
            value_channels=writes * heads * value_width,
            taps=convolution_taps(config, default=True),
            gated=switch(config, "use_forget_gate", False),
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `head_dim`, and `expand_v` so that the value width stays."""
        return {**config, "head_dim": kept_width, "expand_v": expand_v_for(head_value_width(config), kept_width)}
