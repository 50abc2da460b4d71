"""Gated DeltaNet (fla's `gated_deltanet`): selection per key head, of which several value heads may share one."""

import math
from collections.abc import Mapping
from typing import Any

from lapcli.families.base import StatefulLayer
from lapcli.families.delta import DeltaModels, delta_layers


def expand_v_for(value_width: int, key_width: int) -> float:
    """The `expand_v` with which fla's `int(head_dim * expand_v)` gives back exactly `value_width`.

    Plain division falls one short for some widths (the product rounds down below the integer); the next float up
    then does not.
    """
    ratio = value_width / key_width
    if int(key_width * ratio) != value_width:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


class GatedDeltaNet(DeltaModels):
    """The width is `head_dim`, and `expand_v` must follow it or V changes on reload."""

    name = "gated_deltanet"
    model_types = ("gated_deltanet",)
    tested = "masked oracle, reload by stock fla config classes; fla's own kernels and model on an H200"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the stateful layers."""
        heads, key_width = config["num_heads"], config["head_dim"]
        return delta_layers(
            config,
            heads=heads,
            value_heads=config.get("num_v_heads") or heads,
            key_width=key_width,
            value_width=int(key_width * config["expand_v"]),
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `head_dim`, and `expand_v` so that the value width stays."""
        value_width = int(config["head_dim"] * config["expand_v"])
        return {**config, "head_dim": kept_width, "expand_v": expand_v_for(value_width, kept_width)}
