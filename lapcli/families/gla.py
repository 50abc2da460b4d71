"""GLA (fla's `gla`): a gate for each key channel, no norm; several query heads may share a key head."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.delta_net import channels_of_a_head
from lapcli.families.fields import bad_field, optional_integer, positive_integer
from lapcli.families.fla_mixers import Channels, FlaMixer, FlaMixers, convolution_taps

_FEATURE_MAPS = {None: "linear", "swish": "silu", "sqrelu": "relu2"} | {
    name: name for name in ("relu", "sigmoid", "silu", "gelu")
}
"""fla's names to transformers'."""


class GatedLinearAttention(FlaMixers):
    """A head's key width is `round(hidden_size * expand_k) // num_heads`; there are `num_kv_heads` key heads."""

    name = "gla"
    model_types = ("gla",)
    tested = "masked oracle on fla's own model (interpreter and GPU), reload by stock fla config classes"

    def mixer(self, config: Mapping[str, Any]) -> FlaMixer:
        """Each query head keeps a state; those that share a key head lie side by side."""
        readers = positive_integer(config, "num_heads")
        heads = optional_integer(config, "num_kv_heads", readers)
        if readers % heads:
            raise bad_field("num_kv_heads", heads, f"a divisor of num_heads = {readers}")
        width, value_width = (channels_of_a_head(config, field) for field in ("expand_k", "expand_v"))
        feature_map = config.get("feature_map")
        if feature_map not in _FEATURE_MAPS:
            raise bad_field("feature_map", feature_map, f"one of {', '.join(map(str, _FEATURE_MAPS))}")
        taps = convolution_taps(config, default=False)
        keys = Channels(width)
        return FlaMixer(
            heads,
            readers,
            width,
            value_width,
            queries=Channels.of_readers(width, readers // heads),
            keys=keys,
            value_channels=heads * value_width,
            taps=taps,
            activation="linear" if taps is None else "silu",
            feature_map=_FEATURE_MAPS[feature_map],
            l2_normalised=False,
            # The first matrix leads to the gate's low rank, which is no key axis.
            gates=(("gk_proj.1.weight", "gate projection", keys), ("gk_proj.1.bias", "gate bias", keys)),
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `expand_k`; fla rounds the product, so the plain quotient is exact."""
        return {**config, "expand_k": kept_width * config["num_heads"] / config["hidden_size"]}
