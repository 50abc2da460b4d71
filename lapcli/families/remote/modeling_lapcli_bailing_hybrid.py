"""Bailing Hybrid with a key width of its own: `linear_key_head_dim` of the config.

Written by lapcli beside a model from which it cut key channels. Licence: Apache 2.0.
"""

from typing import Any

import transformers.models.bailing_hybrid.modeling_bailing_hybrid as library
from torch import Tensor
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig

from .lapcli_narrow_keys import NarrowKeyAttention, narrow_keys, register_names_on_disk


class LapcliBailingHybridConfig(BailingHybridConfig):
    """Bailing Hybrid's config and `linear_key_head_dim`; `linear_head_dim` is the value width."""

    model_type = "lapcli_bailing_hybrid"

    linear_key_head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.linear_key_head_dim is None:
            self.linear_key_head_dim = self.linear_head_dim


class LapcliBailingHybridDeltaAttention(NarrowKeyAttention, library.BailingHybridDeltaAttention):
    """The mixer."""

    library = library

    def output_gate(self, hidden_states: Tensor) -> Tensor:
        """One full projection."""
        return self.g_proj(hidden_states)


class LapcliBailingHybridForCausalLM(library.BailingHybridForCausalLM):
    """The language model."""

    config: LapcliBailingHybridConfig

    def __init__(self, config: LapcliBailingHybridConfig):
        super().__init__(config)
        narrow_keys(self, self.model.layers, config, LapcliBailingHybridDeltaAttention)


register_names_on_disk("lapcli_bailing_hybrid", of="bailing_hybrid")
# So that a model saved again takes this file with it.
LapcliBailingHybridConfig.register_for_auto_class("AutoConfig")
LapcliBailingHybridForCausalLM.register_for_auto_class("AutoModelForCausalLM")
