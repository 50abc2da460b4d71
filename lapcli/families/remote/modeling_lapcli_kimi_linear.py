"""Kimi Linear with a key width of its own: `linear_key_head_dim` of the config.

Written by lapcli beside a model from which it cut key channels. Licence: Apache 2.0.
"""

from typing import Any

import transformers.models.kimi_linear.modeling_kimi_linear as library
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from .lapcli_narrow_keys import NarrowKeyAttention, narrow_keys, register_names_on_disk


class LapcliKimiLinearConfig(KimiLinearConfig):
    """Kimi Linear's config and `linear_key_head_dim`; `linear_head_dim` is the value width."""

    model_type = "lapcli_kimi_linear"

    linear_key_head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.linear_key_head_dim is None:
            self.linear_key_head_dim = self.linear_head_dim


class LapcliKimiLinearDeltaAttention(NarrowKeyAttention, library.KimiLinearDeltaAttention):
    """The mixer."""

    library = library


class LapcliKimiLinearForCausalLM(library.KimiLinearForCausalLM):
    """The language model."""

    config: LapcliKimiLinearConfig

    def __init__(self, config: LapcliKimiLinearConfig):
        super().__init__(config)
        narrow_keys(self, self.model.layers, config, LapcliKimiLinearDeltaAttention)


register_names_on_disk("lapcli_kimi_linear", of="kimi_linear")
# So that a model saved again takes this file with it.
LapcliKimiLinearConfig.register_for_auto_class("AutoConfig")
LapcliKimiLinearForCausalLM.register_for_auto_class("AutoModelForCausalLM")
