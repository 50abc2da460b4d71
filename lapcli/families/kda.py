"""Kimi Delta Attention (fla's `kda`): the delta rule with a gate for each key channel of each value head."""

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


class Kda(FlaMixers):
    """The width is `head_dim`; `expand_v` must follow it, and with V the low ranks of `f_proj` and `g_proj`."""

    name = "kda"
    model_types = ("kda",)
    tested = "masked oracle on fla's own model (interpreter and GPU), reload by stock fla config classes"

    def mixer(self, config: Mapping[str, Any]) -> FlaMixer:
        """Value heads have gates of their own, so the gates hold a key head as often as value heads read it."""
        heads, width = positive_integer(config, "num_heads"), positive_integer(config, "head_dim")
        value_heads, value_width = value_heads_of(config, heads), head_value_width(config)
        gates = Channels.of_readers(width, value_heads // heads)
        return FlaMixer(
            heads,
            value_heads,
            width,
            value_width,
            queries=Channels(width),
            keys=Channels(width),
            value_channels=value_heads * value_width,
            taps=convolution_taps(config, default=True),
            # f_proj.0 leads to a rank that equals the value width.
            gates=(("f_proj.1.weight", "gate projection", gates), ("dt_bias", "gate bias", gates)),
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `head_dim`, and `expand_v` so that the value width stays."""
        return {**config, "head_dim": kept_width, "expand_v": expand_v_for(head_value_width(config), kept_width)}
