"""What DeltaNet, Gated DeltaNet and Q-Delta share: fla's layout, and lapcli's own models in memory."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.families.base import Convolution, Family, Member, Observer, Role, Sizes, StatefulLayer, key_axis_members
from lapcli.families.fields import bad_field, optional_integer, positive_integer, positive_number, switch

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.utils.hooks import RemovableHandle

_PROJECTIONS: tuple[tuple[str, Role], ...] = (
    ("q_proj.weight", "query projection"),
    ("k_proj.weight", "key projection"),
)
_CONVOLUTIONS: tuple[tuple[str, Role], ...] = (
    ("q_conv1d.weight", "query convolution"),
    ("k_conv1d.weight", "key convolution"),
)


def delta_members(config: Mapping[str, Any], mixer: str, key_width: int, shared: bool = False) -> tuple[Member, ...]:
    """The coupled group of one layer: the projections, and the short convolutions where there are any.

    Args:
        config: the parsed `config.json`.
        mixer: how the layer's tensors begin.
        key_width: `K`.
        shared: whether the channels of a head share a filter, which then is on no key axis.
    """
    convolutions = _CONVOLUTIONS if switch(config, "use_short_conv", True) and not shared else ()
    return key_axis_members(mixer, (*_PROJECTIONS, *convolutions), key_width)


def _mixer(index: int) -> str:
    return f"model.layers.{index}.attn"


def _mlp_width(config: Mapping[str, Any], hidden_size: int) -> tuple[str, int]:
    """The MLP's inner width: as given, else two thirds of `hidden_ratio * hidden_size`, up to a multiple of 256."""
    if config.get("intermediate_size") is not None:
        return "intermediate_size", positive_integer(config, "intermediate_size")
    ratio = 4 if config.get("hidden_ratio") is None else positive_number(config, "hidden_ratio")
    return "from hidden_size and hidden_ratio", 256 * -(-int(hidden_size * ratio * 2 / 3) // 256)


def softmax_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Layers that are softmax attention in a hybrid of fla's (`attn.layers`); they keep no state."""
    attention = config.get("attn")
    numbers = [] if attention is None else attention.get("layers") if isinstance(attention, Mapping) else None
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise bad_field("attn", attention, 'null, or {"layers": [numbers of layers], ...}')
    return frozenset(numbers)


@dataclass(frozen=True)
class Heads:
    """The heads of a layer, as a config means them, and the words for it.

    Attributes:
        key: key heads `H`.
        value: value heads `HV`.
        key_width: `K`.
        value_width: `V`.
        key_channels: all key channels, and what gives them.
        value_channels: all value channels, and what gives them.
    """

    key: int
    value: int
    key_width: int
    value_width: int
    key_channels: tuple[str, int]
    value_channels: tuple[str, int]


def _convolution(config: Mapping[str, Any], heads: Heads) -> Convolution | None:
    if not switch(config, "use_short_conv", True):
        return None
    channels = 2 * heads.key_channels[1] + heads.value_channels[1]
    return Convolution(channels, optional_integer(config, "conv_size", 4))


class DeltaModels(Family):
    """What the families share: fla's layout on disk, and lapcli's own models with their tap and read scale."""

    gated: ClassVar[bool] = True
    """Whether the state decays, unless the config says otherwise."""

    erasing: ClassVar[bool] = False
    """Whether there is query feedback."""

    @abstractmethod
    def heads(self, config: Mapping[str, Any]) -> Heads:
        """The heads of a layer, by the library's own arithmetic.

        Raises:
            ModelError: a field has no usable value.
        """

    @abstractmethod
    def mixer_tensors(self, config: Mapping[str, Any], heads: Heads, hidden: tuple[str, int]) -> dict[str, Sizes]:
        """Declare what a mixer has beyond that which all have, by name within it."""

    def decays(self, config: Mapping[str, Any]) -> bool:
        """Whether the state decays; by default the family says."""
        return self.gated

    def l2_normalised(self, config: Mapping[str, Any]) -> bool:
        """Whether keys and queries are divided by their length; by default they are."""
        return True

    def head_shared_conv(self, config: Mapping[str, Any]) -> bool:
        """Whether the channels of a key head share a filter; by default each has its own."""
        return False

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the stateful layers; they are alike."""
        heads, skipped = self.heads(config), softmax_layers(config)
        return tuple(
            StatefulLayer(
                index=index,
                mixer=_mixer(index),
                heads=heads.key,
                value_heads=heads.value,
                key_width=heads.key_width,
                value_width=heads.value_width,
                members=delta_members(config, _mixer(index), heads.key_width, self.head_shared_conv(config)),
                gated=self.decays(config),
                erasing=self.erasing,
                l2_normalised=self.l2_normalised(config),
                convolution=_convolution(config, heads),
            )
            for index in range(positive_integer(config, "num_hidden_layers"))
            if index not in skipped
        )

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Sizes]:
        """Declare embeddings, blocks, last norm and head."""
        # What no tensor's shape tells, and would be found in the middle of a run.
        switch(config, "allow_neg_eigval", False)
        if "norm_eps" in config:
            positive_number(config, "norm_eps")
        heads, skipped = self.heads(config), softmax_layers(config)
        hidden = ("hidden_size", positive_integer(config, "hidden_size"))
        vocabulary = ("vocab_size", positive_integer(config, "vocab_size"))
        mixer = self._shared_mixer_tensors(config, heads, hidden) | self.mixer_tensors(config, heads, hidden)
        inner = _mlp_width(config, hidden[1])
        block: dict[str, Sizes] = {
            "attn_norm.weight": (hidden,),
            "mlp_norm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        found: dict[str, Sizes] = {"model.embeddings.weight": (vocabulary, hidden)}
        for index in range(positive_integer(config, "num_hidden_layers")):
            if index not in skipped:
                found |= {f"{_mixer(index)}.{name}": sizes for name, sizes in mixer.items()}
            found |= {f"model.layers.{index}.{name}": sizes for name, sizes in block.items()}
        found["model.norm.weight"] = (hidden,)
        if not switch(config, "tie_word_embeddings", False):
            found["lm_head.weight"] = (vocabulary, hidden)
        return found

    def _shared_mixer_tensors(
        self, config: Mapping[str, Any], heads: Heads, hidden: tuple[str, int]
    ) -> dict[str, Sizes]:
        key, value = heads.key_channels, heads.value_channels
        found: dict[str, Sizes] = {
            "q_proj.weight": (key, hidden),
            "k_proj.weight": (key, hidden),
            "v_proj.weight": (value, hidden),
            "o_proj.weight": (hidden, value),
            "o_norm.weight": (("value width of a head", heads.value_width),),
        }
        if switch(config, "use_short_conv", True):
            taps = ("conv_size", optional_integer(config, "conv_size", 4))
            one = ("one filter a channel or head", 1)
            filters = ("num_heads", heads.key) if self.head_shared_conv(config) else key
            for side, channels in (("q", filters), ("k", filters), ("v", value)):
                found[f"{side}_conv1d.weight"] = (channels, one, taps)
        return found

    def undeclared(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Softmax mixers; a head that is stored although it is the embedding; attention over residuals."""
        free = tuple(f"{_mixer(index)}." for index in sorted(softmax_layers(config)))
        if switch(config, "tie_word_embeddings", False):
            free += ("lm_head.",)
        return free if config.get("attnres_block_size") is None else (*free, "model.")

    def attach(self, model: "Module", layer: StatefulLayer, observer: Observer) -> "list[RemovableHandle]":
        """Hook the mixer's input and its tap (which returns q and k, and may be given others)."""
        mixer = model.get_submodule(layer.mixer)

        def before(_module: "Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            observer.mixer_input(args[0] if args else kwargs["hidden_states"])

        def tapped(_module: "Module", _args: tuple[Any, ...], output: Any) -> Any:
            return observer.queries_keys(*output)

        return [
            mixer.register_forward_pre_hook(before, with_kwargs=True),
            mixer.get_submodule("tap").register_forward_hook(tapped),
        ]

    def parameter(self, model: "Module", layer: StatefulLayer, member: Member) -> "Parameter":
        """Names in memory are the names on disk."""
        return model.get_parameter(member.tensor)
