"""Nemotron-H and Nemotron 3: Mamba-2 layers among softmax attention, MLPs and experts, each a layer of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from lapcli.families.base import Family, StatefulLayer
from lapcli.families.fields import bad_field, positive_integer, switch
from lapcli.families.packed import MambaGroups, refuse_projection_bias

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
        """Declare the Mamba layers; those of a head for further tokens (MTP) would have to be cut too, and are refused.

        Raises:
            ModelError: a field has no usable value, the input projection has a bias, or an MTP head keeps a state.
        """
        fields = {**config, **{name: config[other] for name, other in _OTHER_NAMES.items() if other in config}}
        refuse_projection_bias(fields, "use_bias")
        if config.get("num_nextn_predict_layers"):
            kinds = _kinds(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or ()
            if _STATEFUL.intersection(kinds):
                raise bad_field("mtp_layers_block_type", kinds, "an MTP head without Mamba layers")
        groups = MambaGroups(
            heads=positive_integer(fields, "mamba_num_heads"),
            head_width=positive_integer(fields, "mamba_head_dim"),
            groups=positive_integer(fields, "n_groups"),
            state_width=positive_integer(fields, "ssm_state_size"),
            taps=positive_integer(fields, "conv_kernel"),
            bias=switch(fields, "use_conv_bias", True),
            activation=fields.get("mamba_hidden_act", "silu"),
        )
        kinds = _kinds(config, "layers_block_type", "layer_types", "hybrid_override_pattern")
        if kinds is None:
            raise bad_field("layers_block_type", None, "a list of layer types, or hybrid_override_pattern,")
        return tuple(
            groups.layer(index, disk=f"backbone.layers.{index}.mixer", memory=f"model.layers.{index}.mixer")
            for index, kind in enumerate(kinds)
            if kind in _STATEFUL
        )

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set `ssm_state_size`; the head width has a field of its own."""
        return {**config, "ssm_state_size": kept_width}


def _kinds(config: Mapping[str, Any], *fields: str) -> list[str] | None:
    """The types of layers from the first of these fields that is there: a list of names or a string of letters."""
    for field in fields:
        value = config.get(field)
        if isinstance(value, str) and set(value) <= _LETTERS.keys():
            return [_LETTERS[letter] for letter in value]
        if isinstance(value, Sequence) and not isinstance(value, str):
            return list(value)
        if value is not None:
            raise bad_field(field, value, f"a list of layer types, or letters out of {' '.join(_LETTERS)},")
    return None
