"""GLM-5 Next with a key width of its own: `linear_key_head_dim` of the config's text part.

Written by lapcli beside a model from which it cut key channels. Licence: Apache 2.0.
"""

from typing import Any

import transformers.models.glm5_next.modeling_glm5_next as library
from transformers.models.glm5_next.configuration_glm5_next import (
    Glm5NextConfig,
    Glm5NextTextConfig,
    Glm5NextVisionConfig,
)

from .lapcli_narrow_keys import NarrowKeyAttention, narrow_keys, register_names_on_disk


class LapcliGlm5NextTextConfig(Glm5NextTextConfig):
    """The text part's config and `linear_key_head_dim`; `linear_head_dim` is the value width."""

    model_type = "lapcli_glm5_next_text"

    linear_key_head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.linear_key_head_dim is None:
            self.linear_key_head_dim = self.linear_head_dim


class LapcliGlm5NextConfig(Glm5NextConfig):
    """GLM-5 Next's config with that text part."""

    model_type = "lapcli_glm5_next"
    sub_configs_defaults = {"vision_config": Glm5NextVisionConfig, "text_config": LapcliGlm5NextTextConfig}  # noqa: RUF012


class LapcliGlm5NextLinearAttention(NarrowKeyAttention, library.Glm5NextTextLinearAttention):
    """The mixer."""

    library = library


class LapcliGlm5NextForConditionalGeneration(library.Glm5NextForConditionalGeneration):
    """The model with its vision tower."""

    config: LapcliGlm5NextConfig

    def __init__(self, config: LapcliGlm5NextConfig):
        super().__init__(config)
        narrow_keys(self, self.model.language_model.layers, config.text_config, LapcliGlm5NextLinearAttention)


register_names_on_disk("lapcli_glm5_next", of="glm5_next")
# So that a model saved again takes this file with it.
LapcliGlm5NextConfig.register_for_auto_class("AutoConfig")
LapcliGlm5NextForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
