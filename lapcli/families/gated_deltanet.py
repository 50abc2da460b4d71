"""Gated DeltaNet (fla's `gated_deltanet`): selection per key head, of which several value heads may share one."""

import math
from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Sizes
from lapcli.families.delta import DeltaModels, Heads
from lapcli.families.fields import bad_field, optional_integer, positive_integer, positive_number, switch


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

    def heads(self, config: Mapping[str, Any]) -> Heads:
        """Value heads are a multiple of the key heads."""
        heads, key_width = positive_integer(config, "num_heads"), positive_integer(config, "head_dim")
        value_heads = optional_integer(config, "num_v_heads", heads)
        if value_heads % heads:
            raise bad_field("num_v_heads", value_heads, f"a multiple of num_heads = {heads}")
        exact = key_width * positive_number(config, "expand_v")
        value_width = int(exact)
        if value_width == 0 or not math.isclose(exact, value_width, rel_tol=1e-5):
            raise bad_field(
                "expand_v", config["expand_v"], f"a factor that makes head_dim = {key_width} a whole number"
            )
        value_field = "num_heads" if config.get("num_v_heads") is None else "num_v_heads"
        return Heads(
            heads,
            value_heads,
            key_width,
            value_width,
            key_channels=("num_heads x head_dim", heads * key_width),
            value_channels=(f"{value_field} x head_dim x expand_v", value_heads * value_width),
        )

    def mixer_tensors(self, config: Mapping[str, Any], heads: Heads, hidden: tuple[str, int]) -> dict[str, Sizes]:
        """Write strength, decay and output gate, the last two where there are any."""
        value_heads = ("value heads", heads.value)
        found: dict[str, Sizes] = {"b_proj.weight": (value_heads, hidden)}
        if self.decays(config):
            found |= {"a_proj.weight": (value_heads, hidden), "A_log": (value_heads,), "dt_bias": (value_heads,)}
        if switch(config, "use_gate", True):
            found["g_proj.weight"] = (heads.value_channels, hidden)
        return found

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `head_dim`, and `expand_v` so that the value width stays."""
        value_width = int(config["head_dim"] * config["expand_v"])
        return {**config, "head_dim": kept_width, "expand_v": expand_v_for(value_width, kept_width)}
