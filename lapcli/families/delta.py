"""What DeltaNet and Gated DeltaNet share: fla's layout, and lapcli's own models in memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lapcli.families.base import Family, Member, Observer, Role, StatefulLayer, key_axis_members

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


def delta_members(config: Mapping[str, Any], mixer: str, key_width: int) -> tuple[Member, ...]:
    """The coupled group of one layer: the projections, and the short convolutions where there are any."""
    convolutions = _CONVOLUTIONS if config.get("use_short_conv", True) else ()
    return key_axis_members(mixer, (*_PROJECTIONS, *convolutions), key_width)


def softmax_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Layers that are softmax attention in a hybrid of fla's (`attn.layers`); they keep no state."""
    attention = config.get("attn") or {}
    return frozenset(attention.get("layers") or ())


def delta_layers(
    config: Mapping[str, Any], *, heads: int, value_heads: int, key_width: int, value_width: int
) -> tuple[StatefulLayer, ...]:
    """All stateful layers of a model whose layers are alike."""
    skipped = softmax_layers(config)
    return tuple(
        StatefulLayer(
            index=index,
            mixer=f"model.layers.{index}.attn",
            heads=heads,
            value_heads=value_heads,
            key_width=key_width,
            value_width=value_width,
            members=delta_members(config, f"model.layers.{index}.attn", key_width),
        )
        for index in range(config["num_hidden_layers"])
        if index not in skipped
    )


class DeltaModels(Family):
    """The part of a family that touches lapcli's own models: both expose the same tap and read scale."""

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

    def pin_read_scale(self, model: "Module", layer: StatefulLayer, scale: float) -> None:
        """Set the mixer's read scale, `K^-1/2` otherwise."""
        mixer: Any = model.get_submodule(layer.mixer)
        mixer.read_scale = scale
