"""Which stock models have fused steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lapcli.runtime.library_models import kimi_plan, olmo_plan, qwen_plan, text_config
from lapcli.runtime.llama_models import TRANSFORMERS, why_not_llama
from lapcli.runtime.mamba import bamba_plan, falcon_plan, granite_plan, mamba2_plan, nemotron_plan, zamba2_plan

if TYPE_CHECKING:
    from lapcli.runtime.plans import Plan, Room

PLANS: dict[str, Callable[[Any, "Room"], "Plan"]] = {
    "qwen3_next": qwen_plan,
    "qwen3_5_text": qwen_plan,
    "qwen3_5_moe_text": qwen_plan,
    "lara_mini": qwen_plan,
    "olmo_hybrid": olmo_plan,
    "kimi_linear": kimi_plan,
    "bailing_hybrid": kimi_plan,
    "lapcli_kimi_linear": kimi_plan,
    "lapcli_bailing_hybrid": kimi_plan,
    "mamba2": mamba2_plan,
    "bamba": bamba_plan,
    "falcon_h1": falcon_plan,
    "granitemoehybrid": granite_plan,
    "nemotron_h": nemotron_plan,
    "zamba2": zamba2_plan,
    **TRANSFORMERS,
}
"""By the `model_type` of the language model's part."""


def why_not_library(model: Any) -> str | None:
    """Why a model of transformers has no fused steps, or `None`."""
    config = text_config(model)
    if config.model_type not in PLANS:
        return f"there are no fused steps for the model type {config.model_type!r}"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if "dynamic" in kind or kind == "longrope":
        return f"its rotary embedding ({kind}) depends on the row's length"
    return why_not_llama(model) if config.model_type in TRANSFORMERS else None
