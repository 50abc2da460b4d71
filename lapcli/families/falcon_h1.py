"""Falcon-H1: Mamba-2 beside softmax attention in every layer, with multipliers between projection and convolution.

The library makes the vector of multipliers from the config when it loads, one number each for all channels of z, x, B,
C and dt, so it follows the state width by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lapcli.families.base import Family, Observer, StatefulLayer
from lapcli.families.fields import bad_field, positive_integer
from lapcli.families.packed import MambaGroups, expanded_width

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


class FalconH1(Family):
    """Every layer keeps a state; the width is `mamba_d_state`, and `mamba_d_ssm` may set the inner width."""

    name = "falcon_h1"
    model_types = ("falcon_h1",)
    tested = "masked oracle on transformers' own model (1 and 2 groups, multipliers), reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare all layers; they are alike."""
        own_width = config.get("mamba_d_ssm") is not None
        inner = positive_integer(config, "mamba_d_ssm") if own_width else expanded_width(config, "mamba_expand")
        groups = MambaGroups.read(config, inner)
        mixers = (f"model.layers.{index}.mamba" for index in range(positive_integer(config, "num_hidden_layers")))
        factors = _factors(config)
        layers = (groups.layer(index, disk=mixer, memory=mixer) for index, mixer in enumerate(mixers))
        return tuple(
            replace(layer, members=tuple(replace(m, factor=factors.get(m.role, 1.0)) for m in layer.members))
            for layer in layers
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `mamba_d_state`; the multipliers are one for all of B and one for all of C."""
        return {**config, "mamba_d_state": kept_width}

    def attach(self, model: "Module", layer: StatefulLayer, observer: Observer) -> "list[RemovableHandle]":
        """Let the taps see the projection's output times the multipliers, as the convolution gets it."""
        from lapcli.families.taps import attach_taps

        mixer: Any = model.get_submodule(layer.mixer)
        projected: list[Tensor] = []

        def multiply(_module: "Module", _args: Any, output: "Tensor") -> "Tensor":
            projected.append(output)
            return output * mixer.mup_vector

        def restore(_module: "Module", _args: Any, _output: "Tensor") -> "Tensor":
            return projected.pop()

        # Hooks run in the order in which they were added: the taps look between these two, the model gets its own.
        before = mixer.in_proj.register_forward_hook(multiply)
        taps = attach_taps(model, layer, observer)
        return [before, *taps, mixer.in_proj.register_forward_hook(restore)]


def _factors(config: Mapping[str, Any]) -> dict[str, float]:
    """The multipliers of B and C, the third and the fourth of z, x, B, C and dt; 1 where the config says none."""
    found = config.get("ssm_multipliers")
    if found is None:
        return {}
    numbers = found if isinstance(found, Sequence) and not isinstance(found, str) else ()
    if len(numbers) != 5 or any(not isinstance(n, int | float) or isinstance(n, bool) for n in numbers):
        raise bad_field("ssm_multipliers", found, "a list of 5 numbers, or null,")
    return {"key projection": float(numbers[2]), "query projection": float(numbers[3])}
