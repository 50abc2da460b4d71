"""GLM-5 Next: Kimi Delta Attention between layers of indexed latent attention, with a vision tower."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import ModelCode
from lapcli.families.fields import positive_integer
from lapcli.families.narrow_kda import OWN_TYPE, KdaHeads, StockKda
from lapcli.families.packed import layers_of_type


class Glm5Next(StockKda):
    """The gate is of low rank: `f_b_proj` after `f_a_proj`, whose rank is not the key axis."""

    name = "glm5_next"
    model_types = ("glm5_next", OWN_TYPE + "glm5_next")
    tested = "masked oracle on transformers' own model, reload in a fresh process with lapcli's modelling file"
    code = ModelCode(
        "modeling_lapcli_glm5_next",
        ("lapcli_narrow_keys",),
        "LapcliGlm5NextConfig",
        "LapcliGlm5NextForConditionalGeneration",
        ("AutoModelForImageTextToText", "AutoModelForCausalLM"),
    )
    disk = memory = "model.language_model.layers.{}.self_attn"
    gate = "f_b_proj"

    def heads(self, part: Mapping[str, Any]) -> KdaHeads:
        """From `linear_*` fields or `linear_attn_config`."""
        return KdaHeads.nested(part)

    def linear_layers(self, part: Mapping[str, Any]) -> list[int]:
        """From `layer_types`, or every layer but each fourth."""
        if part.get("layer_types") is not None:
            return layers_of_type(part, "linear_attention")
        return [index for index in range(positive_integer(part, "num_hidden_layers")) if index % 4 != 3]
