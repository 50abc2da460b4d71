"""Qwen3-Next: Gated DeltaNet with one input projection, interleaved per key head."""

from collections.abc import Mapping
from typing import Any

from lapcli.families.base import Family, Member, StatefulLayer, Tap
from lapcli.families.packed import LinearHeads, qwen_linear_layers


class Qwen3Next(Family):
    """`in_proj_qkvz` holds for each key head in turn its q, k, all its v and all its z; `conv1d` is over [q, k, v]."""

    name = "qwen3_next"
    model_types = ("qwen3_next",)
    tested = "masked oracle on transformers' own model, reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the layers of type `linear_attention`."""
        heads = LinearHeads.read(config)
        width, activation = heads.key_width, config.get("hidden_act", "silu")
        # One key head's rows: q, k, and v and z of the value heads that read it.
        group = 2 * width + 2 * heads.value_channels // heads.key

        def layer(index: int) -> StatefulLayer:
            mixer = f"model.layers.{index}.linear_attn"
            projection, convolution = f"{mixer}.in_proj_qkvz", f"{mixer}.conv1d"
            return heads.layer(
                index,
                mixer,
                [
                    Member(f"{projection}.weight", "query projection", group),
                    Member(f"{projection}.weight", "key projection", group, offset=width),
                    *heads.convolution_members(f"{convolution}.weight"),
                ],
                queries=Tap(projection, group, 0, convolution, width, 0, activation=activation),
                keys=Tap(projection, group, width, convolution, width, heads.key_channels, activation=activation),
            )

        return tuple(layer(index) for index in qwen_linear_layers(config))

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `linear_key_head_dim`; the value width has a field of its own."""
        return {**config, "linear_key_head_dim": kept_width}
