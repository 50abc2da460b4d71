"""Gated DeltaNet with one projection for q, k and v, as Qwen3.5 lays it out and Qwen4-Exp and Lara took over.

Where heads lie is a rule of the `model_type` alone: Qwen3-Next's interleaved tensors have other names, so a checkpoint
of one layout under a config of the other lacks a tensor and is refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lapcli.families.base import Family, Member, StatefulLayer, Tap
from lapcli.families.packed import LinearHeads, layers_of_type, qwen_linear_layers, text_part, with_text_part


class Qwen35(Family):
    """`in_proj_qkv` and `conv1d` hold [q, k, v], each with its heads side by side; `in_proj_z`, `_b`, `_a` stay.

    Multimodal checkpoints hold the language model under `model.language_model`; transformers' text classes read both
    those and text-only ones, and have it under `model`.
    """

    name = "qwen3_5"
    model_types = ("qwen3_5", "qwen3_5_text")
    tested = (
        "masked oracle on transformers' own model (text and multimodal checkpoints), reload in a fresh process; "
        "fla's kernels through transformers on an H200"
    )
    projection_on_disk: ClassVar[str] = "in_proj_qkv"
    """Whose first rows are [q, k, v]."""

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the layers of type `linear_attention`, by the names that come with such a config."""
        text = text_part(config)
        heads = LinearHeads.read(text)
        width, side = heads.key_width, heads.key_channels
        activation = text.get("hidden_act", "silu")
        disk = "model" if text is config else "model.language_model"

        def layer(index: int) -> StatefulLayer:
            mixer, stored = (f"{root}.layers.{index}.linear_attn" for root in ("model", disk))
            projection, convolution = f"{mixer}.in_proj_qkv", f"{mixer}.conv1d"
            return heads.layer(
                index,
                mixer,
                [
                    Member(f"{stored}.{self.projection_on_disk}.weight", "query projection", width),
                    Member(f"{stored}.{self.projection_on_disk}.weight", "key projection", width, offset=side),
                    *heads.convolution_members(f"{stored}.conv1d.weight"),
                ],
                queries=Tap(projection, width, 0, convolution, width, 0, activation=activation),
                keys=Tap(projection, width, side, convolution, width, side, activation=activation),
            )

        return tuple(layer(index) for index in self.linear_layers(text))

    def linear_layers(self, text: Mapping[str, Any]) -> list[int]:
        """From `layer_types`, or every layer but each fourth or what the interval says."""
        return qwen_linear_layers(text)

    def members(self, layer: StatefulLayer, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Member, ...]:
        """By the names that are there; a text model saved from a multimodal one keeps the long ones."""
        return tuple(_named(member, shapes) for member in layer.members)

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `linear_key_head_dim` of the language model; the value width has a field of its own."""
        return with_text_part(config, linear_key_head_dim=kept_width)


class Qwen35Moe(Qwen35):
    """The same with experts, which are not touched."""

    name = "qwen3_5_moe"
    model_types = ("qwen3_5_moe", "qwen3_5_moe_text")
    tested = "masked oracle on transformers' own model (text and multimodal checkpoints), reload in a fresh process"


class Qwen4Exp(Qwen35):
    """The same with experts, hyper-connections and n-gram embeddings, whose `ple.conv1d` is another; not touched."""

    name = "qwen4_exp"
    model_types = ("qwen4_exp", "qwen4_exp_text")
    tested = Qwen35Moe.tested


class LaraMini(Qwen35):
    """On disk one `in_proj` with the rows [q, k, v, z, b, a], which transformers splits when it loads."""

    name = "lara_mini"
    model_types = ("lara_mini",)
    tested = "masked oracle on transformers' own model, reload in a fresh process"
    projection_on_disk = "in_proj"

    def linear_layers(self, text: Mapping[str, Any]) -> list[int]:
        """From `layer_types`, or the released pattern of five."""
        return layers_of_type(text, "linear_attention", default=_lara_types)


def _lara_types(count: int) -> list[str]:
    """The types that Lara's library takes where a config lists none."""
    linear, sliding, full = "linear_attention", "sliding_attention", "full_attention"
    period = (linear, sliding, linear, full, sliding)
    return [period[index % len(period)] for index in range(count)]


def _named(member: Member, names: Collection[str]) -> Member:
    """The member by the name that the checkpoint has for it, or as it is declared where it has none."""
    long, short = "model.language_model.", "model."
    name = member.tensor
    other = short + name.removeprefix(long) if name.startswith(long) else long + name.removeprefix(short)
    return replace(member, tensor=other) if name not in names and other in names else member
