"""Bailing Hybrid (Ling 3): Kimi Delta Attention, with the last layer of each group latent attention."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import ModelCode
from lapcli.families.fields import optional_integer, positive_integer
from lapcli.families.narrow_kda import OWN_TYPE, KdaHeads, StockKda
from lapcli.families.packed import layers_of_type


class BailingHybrid(StockKda):
    """The gate is one full projection; on disk a mixer is `attention`, in memory `self_attn`."""

    name = "bailing_hybrid"
    model_types = ("bailing_hybrid", OWN_TYPE + "bailing_hybrid")
    tested = "masked oracle on transformers' own model, reload in a fresh process with lapcli's modelling file"
    code = ModelCode(
        "modeling_lapcli_bailing_hybrid",
        ("lapcli_narrow_keys",),
        "LapcliBailingHybridConfig",
        "LapcliBailingHybridForCausalLM",
    )
    disk = "model.layers.{}.attention"
    memory = "model.layers.{}.self_attn"
    gate = "f_proj"

    def heads(self, part: Mapping[str, Any]) -> KdaHeads:
        """From the fields of the release, or those that transformers saves: there `head_dim` is another one's width."""
        release = {
            "linear_num_heads": "num_attention_heads",
            "linear_head_dim": "head_dim",
            "linear_conv_kernel_dim": "short_conv_kernel_size",
        }
        return KdaHeads.read(part, *(new if new in part else old for new, old in release.items()))

    def linear_layers(self, part: Mapping[str, Any]) -> list[int]:
        """From `layer_types`, or every layer but the last one of each group."""
        if part.get("layer_types") is not None:
            return layers_of_type(part, "linear_attention")
        group = optional_integer(part, "layer_group_size", 6)
        return [index for index in range(positive_integer(part, "num_hidden_layers")) if (index + 1) % group]
