"""DeltaNet (fla's `delta_net`): selection per head; the width hides in `expand_k`."""

import math
from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Sizes
from lapcli.families.delta import DeltaModels, Heads
from lapcli.families.fields import bad_field, positive_integer, positive_number, switch


def channels_of_a_head(config: Mapping[str, Any], field: str) -> int:
    """A head's share of the channels that `field` times the hidden size gives; fla rounds the product.

    Raises:
        ModelError: there is no whole number of them for each of `num_heads`.
    """
    hidden_size, heads = positive_integer(config, "hidden_size"), positive_integer(config, "num_heads")
    exact = hidden_size * positive_number(config, field)
    channels = round(exact)
    if channels == 0 or not math.isclose(exact, channels) or channels % heads:
        raise bad_field(
            field, config[field], f"a factor that makes hidden_size = {hidden_size} a multiple of num_heads = {heads}"
        )
    return channels // heads


class DeltaNet(DeltaModels):
    """The key width is `round(hidden_size * expand_k) // num_heads`."""

    name = "delta_net"
    model_types = ("delta_net",)
    gated = False
    tested = "masked oracle, reload by stock fla config classes; fla's own kernels and model on an H200"

    def heads(self, config: Mapping[str, Any]) -> Heads:
        """As many value heads as key heads."""
        heads = positive_integer(config, "num_heads")
        key_width, value_width = channels_of_a_head(config, "expand_k"), channels_of_a_head(config, "expand_v")
        return Heads(
            heads,
            heads,
            key_width,
            value_width,
            key_channels=("hidden_size x expand_k", heads * key_width),
            value_channels=("hidden_size x expand_v", heads * value_width),
        )

    def mixer_tensors(self, config: Mapping[str, Any], heads: Heads, hidden: tuple[str, int]) -> dict[str, Sizes]:
        """The write strength and the output gate, where they are learned."""
        found: dict[str, Sizes] = {}
        if switch(config, "use_beta", True):
            found["b_proj.weight"] = (("num_heads", heads.value), hidden)
        if switch(config, "use_gate", False):
            found["g_proj.weight"] = (heads.value_channels, hidden)
        return found

    def l2_normalised(self, config: Mapping[str, Any]) -> bool:
        """By default; `qk_norm` may be `sum`, which divides by the sum of absolute values."""
        return config.get("qk_norm", "l2") == "l2"

    def head_shared_conv(self, config: Mapping[str, Any]) -> bool:
        """Where the config says so; lapcli's own model has that option, and fla has not."""
        return switch(config, "head_shared_conv", False)

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `expand_k`; fla rounds the product, so the plain quotient is exact."""
        return {**config, "expand_k": kept_width * config["num_heads"] / config["hidden_size"]}
