"""Layouts that several stock families share: Gated DeltaNet in Qwen's naming, and Mamba-2's packed projection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lapcli.families.base import Convolution, Member, StatefulLayer, Tap
from lapcli.families.fields import bad_field, optional_integer, positive_integer, positive_number, switch


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: the nested one of a multimodal model; the whole where there is none."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """The tokens of a sequence that a model was made for; `None` where its config sets no end."""
    for part in (text_part(config), config):
        for field in ("max_position_embeddings", "n_positions"):
            limit = part.get(field)
            if isinstance(limit, int) and limit > 1:
                return limit
    return None


def with_text_part(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with fields of the language model's part changed, wherever that is."""
    text = text_part(config)
    part = {**text, **changes}
    return part if text is config else {**config, "text_config": part}


def layers_of_type(
    config: Mapping[str, Any],
    *kinds: str,
    field: str = "layer_types",
    default: Callable[[int], Sequence[str]] | None = None,
) -> list[int]:
    """The numbers of the layers that `layer_types`, or another field, says are of one of these kinds.

    Args:
        config: the parsed `config.json`, or the language model's part.
        kinds: the types wanted.
        field: that holds the list.
        default: what the library takes for a model of so many layers where the list is missing or null.

    Raises:
        ModelError: the list is missing and there is no default, or it does not have one entry for each layer.
    """
    count = positive_integer(config, "num_hidden_layers")
    types = config.get(field)
    if types is None and default is not None:
        types = default(count)
    if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != count:
        raise bad_field(field, types, f"a list of num_hidden_layers = {count} names")
    return [index for index, kind in enumerate(types) if kind in kinds]


def qwen_linear_layers(config: Mapping[str, Any]) -> list[int]:
    """The numbers of a Qwen model's Gated DeltaNet layers, also where a config says only every how many is none.

    Raises:
        ModelError: a field has no usable value.
    """
    if config.get("layer_types") is not None:
        return layers_of_type(config, "linear_attention")
    interval = optional_integer(config, "full_attention_interval", 4)
    return [index for index in range(positive_integer(config, "num_hidden_layers")) if (index + 1) % interval]


@dataclass(frozen=True)
class LinearHeads:
    """Heads of a Gated DeltaNet layer as Qwen's configs say them.

    Attributes:
        key: key heads.
        value: value heads.
        key_width: of a head.
        value_width: of a head.
        taps: length of the short convolution.
    """

    key: int
    value: int
    key_width: int
    value_width: int
    taps: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "LinearHeads":
        """From `linear_*` fields.

        Raises:
            ModelError: a field has no usable value.
        """
        key, value = (
            positive_integer(config, "linear_num_key_heads"),
            positive_integer(config, "linear_num_value_heads"),
        )
        if value % key:
            raise bad_field("linear_num_value_heads", value, f"a multiple of linear_num_key_heads = {key}")
        return cls(
            key,
            value,
            positive_integer(config, "linear_key_head_dim"),
            positive_integer(config, "linear_value_head_dim"),
            positive_integer(config, "linear_conv_kernel_dim"),
        )

    @property
    def key_channels(self) -> int:
        """Of all key heads."""
        return self.key * self.key_width

    @property
    def value_channels(self) -> int:
        """Of all value heads."""
        return self.value * self.value_width

    def layer(self, index: int, mixer: str, members: Sequence[Member], *, queries: Tap, keys: Tap) -> StatefulLayer:
        """A layer with these heads."""
        return StatefulLayer(
            index=index,
            mixer=mixer,
            heads=self.key,
            value_heads=self.value,
            key_width=self.key_width,
            value_width=self.value_width,
            members=tuple(members),
            l2_normalised=True,
            convolution=Convolution(2 * self.key_channels + self.value_channels, self.taps),
            queries=queries,
            keys=keys,
        )

    def convolution_members(self, tensor: str) -> tuple[Member, Member]:
        """One convolution over all of [q, k, v], each with its heads side by side."""
        return (
            Member(tensor, "query convolution", self.key_width),
            Member(tensor, "key convolution", self.key_width, offset=self.key_channels),
        )


def expanded_width(config: Mapping[str, Any], field: str) -> int:
    """The inner width of a Mamba mixer: `hidden_size` times the factor in a field, rounded down as libraries do.

    Raises:
        ModelError: a field has no usable value.
    """
    return int(positive_number(config, field) * positive_integer(config, "hidden_size"))


@dataclass(frozen=True)
class MambaGroups:
    """Sizes of a Mamba-2 mixer, whatever a config calls them.

    Attributes:
        heads: each with a state.
        head_width: `V`.
        groups: which share B and C, the keys and queries.
        state_width: `K`.
        taps: length of the short convolution.
        bias: whether the convolution has one.
        activation: after the convolution.
        projection_bias: whether `in_proj` has one.
    """

    heads: int
    head_width: int
    groups: int
    state_width: int
    taps: int
    bias: bool
    activation: str
    projection_bias: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], inner: int) -> "MambaGroups":
        """From the `mamba_*` fields that Bamba and its descendants have.

        Args:
            config: the parsed `config.json`.
            inner: channels of all heads together.

        Raises:
            ModelError: a field has no usable value.
        """
        heads = positive_integer(config, "mamba_n_heads")
        if inner % heads:
            raise bad_field("mamba_n_heads", heads, f"a divisor of the mixer's width {inner}")
        return cls(
            heads=heads,
            head_width=inner // heads,
            groups=positive_integer(config, "mamba_n_groups"),
            state_width=positive_integer(config, "mamba_d_state"),
            taps=positive_integer(config, "mamba_d_conv"),
            bias=switch(config, "mamba_conv_bias", True),
            activation=config.get("hidden_act", "silu"),
            projection_bias=switch(config, "mamba_proj_bias", False),
        )

    def layer(self, index: int, *, disk: str, memory: str) -> StatefulLayer:
        """A layer whose `in_proj` has the rows [z, x, B, C, dt] and whose `conv1d` has the channels [x, B, C].

        Args:
            index: of the layer.
            disk: how its mixer's tensors begin in the checkpoint.
            memory: name of its mixer as a module.
        """
        inner, side, width = self.heads * self.head_width, self.groups * self.state_width, self.state_width
        convolution = f"{disk}.conv1d"
        members = [
            Member(f"{disk}.in_proj.weight", "key projection", width, offset=2 * inner),
            Member(f"{disk}.in_proj.weight", "query projection", width, offset=2 * inner + side),
            Member(f"{convolution}.weight", "key convolution", width, offset=inner),
            Member(f"{convolution}.weight", "query convolution", width, offset=inner + side),
        ]
        if self.projection_bias:
            members += [
                Member(f"{disk}.in_proj.bias", "key projection bias", width, offset=2 * inner),
                Member(f"{disk}.in_proj.bias", "query projection bias", width, offset=2 * inner + side),
            ]
        if self.bias:
            members += [
                Member(f"{convolution}.bias", "key convolution bias", width, offset=inner),
                Member(f"{convolution}.bias", "query convolution bias", width, offset=inner + side),
            ]

        def tap(before: int) -> Tap:
            return Tap(
                f"{memory}.in_proj", width, 2 * inner + before, f"{memory}.conv1d", width, inner + before,
                activation=self.activation,
            )  # fmt: skip

        return StatefulLayer(
            index=index,
            mixer=memory,
            heads=self.groups,
            value_heads=self.heads,
            key_width=width,
            value_width=self.head_width,
            members=tuple(members),
            convolution=Convolution(inner + 2 * side, self.taps),
            keys=tap(0),
            queries=tap(side),
        )
