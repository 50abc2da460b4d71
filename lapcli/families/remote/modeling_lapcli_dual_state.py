"""Decoders of transformers of which some layers are dual-state attention; `dual_state` of the config says which.

Written by lapcli beside models that it converted. All but those layers is the installed transformers' code of the
model's family. Licence: Apache 2.0.
"""

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from .lapcli_dual_state import DualStateAttention, DualStateSettings, convert_layers


class Converted:
    """Comes before a library's model among the bases of a class, and converts the layers that the config names."""

    config: Any

    def __init__(self, config: Any):
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        model: Any = self
        convert_layers(model, DualStateSettings.of(config))
        # Once more, for what is new.
        model.post_init()

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """As the library does; gates, which come to it as linear layers, begin as they should."""
        super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(module, DualStateAttention) and module.settings.window is None:
            loaded = (getattr(value, "_is_hf_initialized", False) for value in module.new_parameters().values())
            if not any(loaded):
                module.start_states()


class LapcliDualStateLlamaConfig(LlamaConfig):
    """Llama's config and `dual_state`."""

    model_type = "lapcli_dual_state_llama"

    dual_state: dict[str, Any] | None = None


class LapcliDualStateLlamaForCausalLM(Converted, LlamaForCausalLM):
    """The language model."""

    config: LapcliDualStateLlamaConfig


class LapcliDualStateMistralConfig(MistralConfig):
    """Mistral's config and `dual_state`."""

    model_type = "lapcli_dual_state_mistral"

    dual_state: dict[str, Any] | None = None


class LapcliDualStateMistralForCausalLM(Converted, MistralForCausalLM):
    """The language model."""

    config: LapcliDualStateMistralConfig


class LapcliDualStateQwen2Config(Qwen2Config):
    """Qwen2's config and `dual_state`."""

    model_type = "lapcli_dual_state_qwen2"

    dual_state: dict[str, Any] | None = None


class LapcliDualStateQwen2ForCausalLM(Converted, Qwen2ForCausalLM):
    """The language model."""

    config: LapcliDualStateQwen2Config


class LapcliDualStateQwen3Config(Qwen3Config):
    """Qwen3's config and `dual_state`."""

    model_type = "lapcli_dual_state_qwen3"

    dual_state: dict[str, Any] | None = None


class LapcliDualStateQwen3ForCausalLM(Converted, Qwen3ForCausalLM):
    """The language model."""

    config: LapcliDualStateQwen3Config


class LapcliDualStateSmolLM3Config(SmolLM3Config):
    """SmolLM3's config and `dual_state`."""

    model_type = "lapcli_dual_state_smollm3"

    dual_state: dict[str, Any] | None = None


class LapcliDualStateSmolLM3ForCausalLM(Converted, SmolLM3ForCausalLM):
    """The language model."""

    config: LapcliDualStateSmolLM3Config


class LapcliDualStatePhiConfig(PhiConfig):
    """Phi's config and `dual_state`."""

    model_type = "lapcli_dual_state_phi"

    dual_state: dict[str, Any] | None = None


class LapcliDualStatePhiForCausalLM(Converted, PhiForCausalLM):
    """The language model."""

    config: LapcliDualStatePhiConfig


class LapcliDualStatePhi3Config(Phi3Config):
    """Phi3's config and `dual_state`."""

    model_type = "lapcli_dual_state_phi3"

    dual_state: dict[str, Any] | None = None


class LapcliDualStatePhi3ForCausalLM(Converted, Phi3ForCausalLM):
    """The language model."""

    config: LapcliDualStatePhi3Config


# So that a model saved again takes these files with it.
for _config, _model in (
    (LapcliDualStateLlamaConfig, LapcliDualStateLlamaForCausalLM),
    (LapcliDualStateMistralConfig, LapcliDualStateMistralForCausalLM),
    (LapcliDualStateQwen2Config, LapcliDualStateQwen2ForCausalLM),
    (LapcliDualStateQwen3Config, LapcliDualStateQwen3ForCausalLM),
    (LapcliDualStateSmolLM3Config, LapcliDualStateSmolLM3ForCausalLM),
    (LapcliDualStatePhiConfig, LapcliDualStatePhiForCausalLM),
    (LapcliDualStatePhi3Config, LapcliDualStatePhi3ForCausalLM),
):
    _config.register_for_auto_class("AutoConfig")
    _model.register_for_auto_class("AutoModelForCausalLM")
