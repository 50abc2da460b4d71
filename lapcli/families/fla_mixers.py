"""What the models share that fla's own classes run: fla's names, on disk and in memory, and heads that occur in copies.

fla's kernels need a CUDA device; slicing needs neither the device nor fla.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lapcli.families.base import Convolution, Family, Member, Role, StatefulLayer, Tap
from lapcli.families.delta import softmax_layers
from lapcli.families.fields import bad_field, optional_integer, positive_integer, positive_number, switch


@dataclass(frozen=True)
class Channels:
    """Where the key channels of each head lie along an axis that holds every head `copies` times.

    Attributes:
        stride: from one head to the next.
        copies: how often each head occurs.
        copy_stride: from one copy of a head to the next.
    """

    stride: int
    copies: int = 1
    copy_stride: int = 0

    @classmethod
    def of_readers(cls, key_width: int, readers: int) -> "Channels":
        """Every head `readers` times in a row, as of the query or value heads that share it: `(h g) k`."""
        return cls(readers * key_width, readers, key_width)

    @classmethod
    def of_writes(cls, key_width: int, heads: int, writes: int) -> "Channels":
        """All heads `writes` times over, as where a token writes several keys: `(n h) k`."""
        return cls(key_width, writes, heads * key_width)

    def members(self, tensor: str, role: Role) -> tuple[Member, ...]:
        """A member for each copy."""
        return tuple(Member(tensor, role, self.stride, offset=copy * self.copy_stride) for copy in range(self.copies))


@dataclass(frozen=True)
class FlaMixer:
    """A layer of fla's with `q_proj`, `k_proj` and, where it has short convolutions, `q_conv1d`, `k_conv1d`.

    Attributes:
        heads: key heads `H`.
        value_heads: heads with a state.
        key_width: `K`.
        value_width: `V`.
        queries: where `q_proj` holds the heads.
        keys: where `k_proj` does.
        value_channels: rows of `v_proj`.
        taps: length of the short convolutions; `None` where there are none.
        activation: of keys and queries, after the convolution or the projection.
        feature_map: after that.
        gates: tensors with a gate for each key channel.
        gated: whether the state decays.
        l2_normalised: whether keys and queries are divided by their length.
    """

    heads: int
    value_heads: int
    key_width: int
    value_width: int
    queries: Channels
    keys: Channels
    value_channels: int
    taps: int | None
    activation: str = "silu"
    feature_map: str = "linear"
    gates: tuple[tuple[str, Role, Channels], ...] = ()
    gated: bool = True
    l2_normalised: bool = True

    def layer(self, index: int) -> StatefulLayer:
        """The layer of that number."""
        name = f"model.layers.{index}.attn"
        members = [
            *self.queries.members(f"{name}.q_proj.weight", "query projection"),
            *self.keys.members(f"{name}.k_proj.weight", "key projection"),
        ]
        if self.taps is not None:
            members += self.queries.members(f"{name}.q_conv1d.weight", "query convolution")
            members += self.keys.members(f"{name}.k_conv1d.weight", "key convolution")
        for tensor, role, channels in self.gates:
            members += channels.members(f"{name}.{tensor}", role)
        per_key_head = (self.queries.copies + self.keys.copies) * self.key_width
        return StatefulLayer(
            index=index,
            mixer=name,
            heads=self.heads,
            value_heads=self.value_heads,
            key_width=self.key_width,
            value_width=self.value_width,
            members=tuple(members),
            gated=self.gated,
            l2_normalised=self.l2_normalised,
            convolution=(
                None if self.taps is None else Convolution(self.heads * per_key_head + self.value_channels, self.taps)
            ),
            keys=self._tap(f"{name}.k_", self.keys),
            queries=self._tap(f"{name}.q_", self.queries),
        )

    def _tap(self, prefix: str, channels: Channels) -> Tap:
        return Tap(
            f"{prefix}proj",
            channels.stride,
            convolution=None if self.taps is None else f"{prefix}conv1d",
            convolution_stride=channels.stride,
            activation=self.activation,
            feature_map=self.feature_map,
            copies=channels.copies,
            copy_stride=channels.copy_stride,
        )


class FlaMixers(Family):
    """Models whose mixers are alike, in `model.layers.N.attn`; a hybrid's softmax layers are left out."""

    library: ClassVar[str | None] = "fla"

    @abstractmethod
    def mixer(self, config: Mapping[str, Any]) -> FlaMixer:
        """The mixer, by the library's own arithmetic.

        Raises:
            ModelError: a field has no usable value.
        """

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the stateful layers; they are alike."""
        mixer, skipped = self.mixer(config), softmax_layers(config)
        count = positive_integer(config, "num_hidden_layers")
        return tuple(mixer.layer(index) for index in range(count) if index not in skipped)


def convolution_taps(config: Mapping[str, Any], default: bool) -> int | None:
    """The length of the short convolutions, or `None` where there are none."""
    return optional_integer(config, "conv_size", 4) if switch(config, "use_short_conv", default) else None


def head_value_width(config: Mapping[str, Any]) -> int:
    """`V`, where fla computes it as `int(head_dim * expand_v)`.

    Raises:
        ModelError: the product is no whole number.
    """
    key_width = positive_integer(config, "head_dim")
    exact = key_width * positive_number(config, "expand_v")
    if int(exact) == 0 or not math.isclose(exact, int(exact), rel_tol=1e-5):
        raise bad_field("expand_v", config["expand_v"], f"a factor that makes head_dim = {key_width} a whole number")
    return int(exact)


def value_heads_of(config: Mapping[str, Any], heads: int) -> int:
    """`num_v_heads`, or as many as key heads.

    Raises:
        ModelError: no multiple of them.
    """
    value_heads = optional_integer(config, "num_v_heads", heads)
    if value_heads % heads:
        raise bad_field("num_v_heads", value_heads, f"a multiple of num_heads = {heads}")
    return value_heads
