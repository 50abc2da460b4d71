"""OLMo-Hybrid: Gated DeltaNet with a projection each for q, k and v, and convolutions on disk in three ways."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from lapcli.families.base import Family, Member, Role, StatefulLayer, Tap, key_axis_members
from lapcli.families.fields import positive_integer
from lapcli.families.packed import LinearHeads, layers_of_type

_APART = ("q_conv1d", "k_conv1d", "v_conv1d")


class OlmoHybrid(Family):
    """In memory one `conv1d` over [q, k, v]; on disk `q_conv1d`, `k_conv1d` and `v_conv1d`.

    When transformers saves a model it cuts the one convolution into three parts of *equal* length and gives them these
    names, wherever q ends; when it loads, it only puts the three one after another. So the three are taken as what they
    are together, with the cuts wherever a checkpoint has them. Checkpoints with the one `conv1d` load too.
    """

    name = "olmo_hybrid"
    model_types = ("olmo_hybrid",)
    tested = "masked oracle on transformers' own model (all three layouts on disk), reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the layers of type `linear_attention`, with the convolutions that the released checkpoints have."""
        heads = LinearHeads.read(_filled(config))
        width = heads.key_width
        activation = config.get("hidden_act", "silu")

        def layer(index: int) -> StatefulLayer:
            mixer = f"model.layers.{index}.linear_attn"
            parts: tuple[tuple[str, Role], ...] = (
                ("q_proj.weight", "query projection"),
                ("k_proj.weight", "key projection"),
                ("q_conv1d.weight", "query convolution"),
                ("k_conv1d.weight", "key convolution"),
            )

            def tap(side: str, before: int) -> Tap:
                return Tap(f"{mixer}.{side}_proj", width, 0, f"{mixer}.conv1d", width, before, activation=activation)

            return heads.layer(
                index,
                mixer,
                key_axis_members(mixer, parts, width),
                queries=tap("q", 0),
                keys=tap("k", heads.key_channels),
            )

        return tuple(layer(index) for index in layers_of_type(config, "linear_attention", default=_types))

    def members(self, layer: StatefulLayer, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Member, ...]:
        """Find the channels of the convolutions in the tensors that are there."""
        sides = [
            replace(member, offset=number * layer.heads * layer.key_width)
            for number, member in enumerate(
                member for member in layer.members if member.role in ("query convolution", "key convolution")
            )
        ]
        fused = f"{layer.mixer}.conv1d.weight"
        names = [fused] if fused in shapes else [f"{layer.mixer}.{name}.weight" for name in _APART]
        if any(name not in shapes for name in names):
            return layer.members
        assert layer.convolution is not None
        *starts, end = accumulate((shapes[name][0] for name in names), initial=0)
        if end != layer.convolution.channels:
            # The declared members are then looked at where they are cut; what does not fit, transformers refuses.
            return layer.members
        found = [
            replace(side, tensor=name, offset=side.offset - start, partial=True)
            for name, start in zip(names, starts, strict=True)
            for side in sides
        ]
        return (*(member for member in layer.members if member.role.endswith("projection")), *found)

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `linear_key_head_dim`, and the value width, whose default follows from it."""
        value_width = LinearHeads.read(_filled(config)).value_width
        return {**config, "linear_key_head_dim": kept_width, "linear_value_head_dim": value_width}


def _types(count: int) -> list[str]:
    """The types that the library takes where a config lists none: each fourth layer is softmax, or else the last."""
    types = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(count)]
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


def _filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults of fields that are missing or null."""
    given = {name: value for name, value in config.items() if value is not None}
    heads = given.get("num_attention_heads")
    filled = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": 4, **given}
    if "linear_key_head_dim" not in filled:
        keys = positive_integer(filled, "linear_num_key_heads")
        filled["linear_key_head_dim"] = int(0.75 * positive_integer(given, "hidden_size") / keys)
    filled.setdefault("linear_value_head_dim", 2 * positive_integer(filled, "linear_key_head_dim"))
    return filled
