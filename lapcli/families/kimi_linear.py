"""Kimi Linear: Kimi Delta Attention between layers of latent attention."""

from collections.abc import Mapping, Sequence
from typing import Any

from lapcli.families.base import ModelCode
from lapcli.families.fields import bad_field, positive_integer
from lapcli.families.narrow_kda import OWN_TYPE, KdaHeads, StockKda
from lapcli.families.packed import layers_of_type


class KimiLinear(StockKda):
    """The gate is of low rank: `f_b_proj` after `f_a_proj`, whose rank is not the key axis."""

    name = "kimi_linear"
    model_types = ("kimi_linear", OWN_TYPE + "kimi_linear")
    tested = "masked oracle on transformers' own model, reload in a fresh process with lapcli's modelling file"
    code = ModelCode(
        "modeling_lapcli_kimi_linear",
        ("lapcli_narrow_keys",),
        "LapcliKimiLinearConfig",
        "LapcliKimiLinearForCausalLM",
    )
    disk = memory = "model.layers.{}.self_attn"
    gate = "f_b_proj"

    def heads(self, part: Mapping[str, Any]) -> KdaHeads:
        """From `linear_*` fields or `linear_attn_config`."""
        return KdaHeads.nested(part)

    def linear_layers(self, part: Mapping[str, Any]) -> list[int]:
        """From `layer_types`, or `kda_layers`, which count from 1, or every layer but each fourth after the first."""
        if part.get("layer_types") is not None:
            return layers_of_type(part, "linear_attention")
        count = positive_integer(part, "num_hidden_layers")
        nested = part.get("linear_attn_config")
        numbers = nested.get("kda_layers") if isinstance(nested, Mapping) else None
        if numbers is None:
            return [index for index in range(count) if not index or index % 4]
        if not isinstance(numbers, Sequence) or not all(isinstance(n, int) and 1 <= n <= count for n in numbers):
            raise bad_field("kda_layers", numbers, f"a list of numbers from 1 to num_hidden_layers = {count}")
        return sorted(number - 1 for number in numbers)
