"""Nemotron-H and Nemotron 3: Mamba-2 layers among softmax attention, MLPs and experts, each a layer of its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lapcli.errors import ModelError
from lapcli.families.base import Family, PredictionHead, StatefulLayer
from lapcli.families.fields import bad_field, positive_integer, switch
from lapcli.families.packed import MambaGroups

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_STATEFUL = {"linear_attention", "mamba"}
# Fields that the library takes by another name too, and then by that one alone.
_OTHER_NAMES = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}


class NemotronH(Family):
    """A list or a pattern of letters says what each layer is; the width is `ssm_state_size`."""

    name = "nemotron_h"
    model_types = ("nemotron_h",)
    tested = "masked oracle on transformers' own model (1 and 4 groups, experts), reload in a fresh process"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the Mamba layers of the model itself; transformers loads no MTP head (`mtp.*`)."""
        fields = {**config, **{name: config[other] for name, other in _OTHER_NAMES.items() if other in config}}
        groups = MambaGroups(
            heads=positive_integer(fields, "mamba_num_heads"),
            head_width=positive_integer(fields, "mamba_head_dim"),
            groups=positive_integer(fields, "n_groups"),
            state_width=positive_integer(fields, "ssm_state_size"),
            taps=positive_integer(fields, "conv_kernel"),
            bias=switch(fields, "use_conv_bias", True),
            activation=fields.get("mamba_hidden_act", "silu"),
            projection_bias=switch(fields, "use_bias", False),
        )
        return tuple(
            groups.layer(index, disk=f"backbone.layers.{index}.mixer", memory=f"model.layers.{index}.mixer")
            for index, kind in enumerate(_kinds(config))
            if kind in _STATEFUL
        )

    def mtp(self, config: Mapping[str, Any], names: Collection[str]) -> PredictionHead | None:
        """All under `mtp`; every kind of layer is a `mixer`, and one with a state has a convolution and one input."""
        head = super().mtp(config, names)
        if head is None:
            return None
        modules = {member.tensor.split(".")[-2] for layer in self.layers(config) for member in layer.members}
        stateful = (name for name in head.stateful if not modules.isdisjoint(name.split(".")))
        return replace(head, stateful=frozenset(stateful))

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `ssm_state_size`; the head width has a field of its own."""
        return {**config, "ssm_state_size": kept_width}


def _kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """The type of every layer: a list of names, or in published configs a string of letters."""
    for field in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        value = config.get(field)
        if isinstance(value, str) and value and set(value) <= _LETTERS.keys():
            return [_LETTERS[letter] for letter in value]
        if isinstance(value, list) and value:
            return value
        if value is not None:
            raise bad_field(field, value, f"a list of layer types, or letters out of {' '.join(_LETTERS)},")
    raise ModelError(
        "config.json has none of layers_block_type, layer_types and hybrid_override_pattern, so it does not say which "
        f"layers keep a state; a list of layer types is wanted, or a pattern out of {' '.join(_LETTERS)}",
        "put config.json right, or download the model again",
    )
