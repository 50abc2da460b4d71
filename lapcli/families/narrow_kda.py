"""Kimi Delta Attention: each key channel decays by itself, so the gate's rows are cut with the keys.

The libraries' configs have one width for keys and values. A slice says its key width in a field of its own,
`linear_key_head_dim`, under a model type of its own, with the code in `lapcli.families.remote`.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lapcli.families.base import (
    Convolution,
    Family,
    ModelCode,
    PredictionHead,
    Role,
    StatefulLayer,
    Tap,
    key_axis_members,
)
from lapcli.families.fields import positive_integer
from lapcli.families.packed import text_part, with_text_part

OWN_TYPE = "lapcli_"
"""How the model types of slices begin; the family's follows."""

_KEY_WIDTH = "linear_key_head_dim"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_IN_MIXER = re.compile(r"\.(self_attn|attention)\.")


@dataclass(frozen=True)
class KdaHeads:
    """Heads of a layer, whatever a config calls them.

    Attributes:
        count: each with a state.
        key_width: `K`.
        value_width: `V`.
        taps: length of the short convolution.
        activation: after it.
    """

    count: int
    key_width: int
    value_width: int
    taps: int
    activation: str

    @classmethod
    def read(cls, part: Mapping[str, Any], heads: str, width: str, taps: str) -> "KdaHeads":
        """From the fields of these names, and a slice's key width.

        Raises:
            ModelError: a field has no usable value.
        """
        value_width = positive_integer(part, width)
        return cls(
            count=positive_integer(part, heads),
            key_width=positive_integer(part, _KEY_WIDTH) if _KEY_WIDTH in part else value_width,
            value_width=value_width,
            taps=positive_integer(part, taps),
            activation=part.get("hidden_act", "silu"),
        )

    @classmethod
    def nested(cls, part: Mapping[str, Any]) -> "KdaHeads":
        """From `linear_*` fields, or those of a release's `linear_attn_config`, which come before them.

        Raises:
            ModelError: a field has no usable value.
        """
        nested = part.get("linear_attn_config")
        nested = nested if isinstance(nested, Mapping) else {}
        release = {
            "linear_num_heads": "num_heads",
            "linear_head_dim": "head_dim",
            "linear_conv_kernel_dim": "short_conv_kernel_size",
        }
        named = {field: nested[name] for field, name in release.items() if name in nested}
        return cls.read({**part, **named}, *release)


class StockKda(Family):
    """q, k and v are apart on disk and so are their convolutions, which transformers makes one over [q, k, v]."""

    code: ClassVar[ModelCode]
    """What loads a slice."""

    disk: ClassVar[str]
    """How a mixer's tensors begin in a checkpoint, with the layer's number to fill in."""

    memory: ClassVar[str]
    """Name of a mixer as a module, likewise."""

    gate: ClassVar[str]
    """The projection of which each row is the decay of one key channel."""

    @abstractmethod
    def heads(self, part: Mapping[str, Any]) -> KdaHeads:
        """Read the heads from the language model's part of a config."""

    @abstractmethod
    def linear_layers(self, part: Mapping[str, Any]) -> list[int]:
        """Read the numbers of the layers that are not softmax attention."""

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the layers that keep a state."""
        part = text_part(config)
        heads = self.heads(part)
        return tuple(self._layer(index, heads) for index in self.linear_layers(part))

    def _layer(self, index: int, heads: KdaHeads) -> StatefulLayer:
        parts: list[tuple[str, Role]] = [
            ("q_proj.weight", "query projection"),
            ("k_proj.weight", "key projection"),
            ("q_conv1d.weight", "query convolution"),
            ("k_conv1d.weight", "key convolution"),
            (f"{self.gate}.weight", "gate projection"),
            ("dt_bias", "gate bias"),
        ]
        width, side = heads.key_width, heads.count * heads.key_width
        mixer = self.memory.format(index)

        def tap(name: str, before: int) -> Tap:
            return Tap(f"{mixer}.{name}", width, 0, f"{mixer}.conv1d", width, before, activation=heads.activation)

        return StatefulLayer(
            index=index,
            mixer=mixer,
            heads=heads.count,
            value_heads=heads.count,
            key_width=width,
            value_width=heads.value_width,
            members=key_axis_members(self.disk.format(index), parts, width),
            l2_normalised=True,
            convolution=Convolution(2 * side + heads.count * heads.value_width, heads.taps),
            queries=tap("q_proj", 0),
            keys=tap("k_proj", side),
        )

    def mtp(self, config: Mapping[str, Any], names: Collection[str]) -> PredictionHead | None:
        """The layers after the last one; they keep a state where they have decays."""
        last = positive_integer(text_part(config), "num_hidden_layers")
        layer_of = {name: int(found[1]) for name in names if "visual" not in name and (found := _LAYER.search(name))}
        head = {name: number for name, number in layer_of.items() if number >= last}
        if not head:
            return None
        recurrent = {number for name, number in head.items() if name.endswith(".A_log")}
        stateful = {name for name, number in head.items() if number in recurrent and _IN_MIXER.search(name)}
        return PredictionHead(frozenset(head), frozenset(stateful))

    def model_code(self, config: Mapping[str, Any]) -> ModelCode | None:
        """Lapcli's own for a slice."""
        return self.code if str(config.get("model_type", "")).startswith(OWN_TYPE) else None

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `linear_key_head_dim` and the type and code that know it; with all channels the config stays as it is."""
        if self.model_code(config) is None and kept_width == self.heads(text_part(config)).key_width:
            return dict(config)
        sliced = with_text_part(config, **{_KEY_WIDTH: kept_width})
        if text_part(config) is not config:
            sliced = with_text_part(sliced, model_type=f"{OWN_TYPE}{self.name}_text")
        # A tokenizer's code stays where it is; a model's that came with the base does not know the width.
        others = {
            name: place
            for name, place in (config.get("auto_map") or {}).items()
            if name != "AutoConfig" and not name.startswith("AutoModel")
        }
        return {
            **sliced,
            "model_type": OWN_TYPE + self.name,
            "architectures": [self.code.model],
            "auto_map": {**self.code.auto_map(), **others},
        }
