"""Tiny models of stock transformers classes, one for each family, written by the library's own `save_pretrained`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lapcli.testing.models import byte_tokenizer, fill_weights

Builder = Callable[[dict[str, Any]], Any]
"""Config fields that are to be otherwise, to a model."""

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_QWEN = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    **_IDS,
}
_WITHOUT_MLP = {name: value for name, value in _QWEN.items() if name != "intermediate_size"}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _qwen3_next(config: dict[str, Any]) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**_QWEN, **_EXPERTS, **config}))


def _mamba2(config: dict[str, Any]) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "expand": 2, "num_heads": 8, "head_dim": 16, "state_size": 32}
    return Mamba2ForCausalLM(Mamba2Config(**{**sizes, "n_groups": 1, "chunk_size": 16, **_IDS, **config}))


_MAMBA_HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 512,
    **_IDS,
}


def _bamba(config: dict[str, Any]) -> Any:
    from transformers import BambaConfig, BambaForCausalLM

    return BambaForCausalLM(BambaConfig(**{**_MAMBA_HYBRID, "attn_layer_indices": [1], **config}))


def _falcon_h1(config: dict[str, Any]) -> Any:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = {"head_dim": 16, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_rms_norm": True}
    # Each of z, x, B, C and dt has a multiplier of its own, and so has the mixer's input.
    multipliers = {"ssm_multipliers": [0.5, 0.8, 1.7, 0.6, 1.2], "ssm_in_multiplier": 1.25}
    return FalconH1ForCausalLM(FalconH1Config(**{**_MAMBA_HYBRID, **sizes, **multipliers, **config}))


def _granitemoehybrid(config: dict[str, Any]) -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    parts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
    types = ["linear_attention", "full_attention", "linear_attention"]
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**{**_MAMBA_HYBRID, "layer_types": types, **parts, **config})
    )


def _nemotron_h(config: dict[str, Any]) -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 1,
        "ssm_state_size": 32,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "max_position_embeddings": 512,
    }
    return NemotronHForCausalLM(NemotronHConfig(**{**sizes, **_IDS, **config}))


def _zamba2(config: dict[str, Any]) -> Any:
    from transformers import Zamba2Config, Zamba2ForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        # Two layers that share a transformer block, each with low-rank adapters of its own.
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "num_attention_heads": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 32,
        "chunk_size": 16,
        "max_position_embeddings": 512,
    }
    return Zamba2ForCausalLM(Zamba2Config(**{**sizes, **_IDS, **config}))


_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
_VISION_IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_QWEN4 = {
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 160,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
}


def _qwen_with_text_class(stem: str, fields: dict[str, Any], config: dict[str, Any]) -> Any:
    """The text model, or with `multimodal=True` the whole one."""
    import transformers

    # One more: the tokenizer class that transformers takes for these types adds Qwen's own end of text.
    text = {**fields, **config, "vocab_size": config["vocab_size"] + 1}
    if not text.pop("multimodal", False):
        return getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, f"{stem}TextConfig")(**text))
    whole = getattr(transformers, f"{stem}Config")(
        text_config=text,
        vision_config=dict(_VISION),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **_VISION_IDS,
    )
    return getattr(transformers, f"{stem}ForConditionalGeneration")(whole)


def _qwen3_5(config: dict[str, Any]) -> Any:
    return _qwen_with_text_class("Qwen3_5", _QWEN, config)


def _qwen3_5_moe(config: dict[str, Any]) -> Any:
    return _qwen_with_text_class("Qwen3_5Moe", {**_WITHOUT_MLP, **_EXPERTS}, config)


def _qwen4_exp(config: dict[str, Any]) -> Any:
    return _qwen_with_text_class("Qwen4Exp", {**_WITHOUT_MLP, **_EXPERTS, **_QWEN4}, config)


def _lara_mini(config: dict[str, Any]) -> Any:
    from transformers import LaraMiniConfig, LaraMiniForCausalLM

    kinds = ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
    fields = {**_WITHOUT_MLP, **_EXPERTS, "layer_types": kinds, "sliding_window": 64}
    return LaraMiniForCausalLM(LaraMiniConfig(**{**fields, **config}))


def _olmo_hybrid(config: dict[str, Any]) -> Any:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    fields = {name: value for name, value in _QWEN.items() if name != "head_dim"}
    return OlmoHybridForCausalLM(OlmoHybridConfig(**{**fields, **config}))


_LATENT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    **_IDS,
}
_LINEAR = {"linear_head_dim": 32, "linear_num_heads": 2, "linear_conv_kernel_dim": 4}


def _kimi_linear(config: dict[str, Any]) -> Any:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    return KimiLinearForCausalLM(KimiLinearConfig(**{**_LATENT, **_LINEAR, **config}))


def _glm5_next(config: dict[str, Any]) -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    latent = {name: value for name, value in _LATENT.items() if name != "num_local_experts"}
    indexed = {"q_lora_rank": 32, "qk_rope_head_dim": 0, "n_routed_experts": 4, "hc_mult": 2}
    # Every position of the tests is selected: a choice among them would make rounding errors visible.
    indexer = {"index_topk": 128, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4}
    fields = {**latent, **indexed, **indexer, **_LINEAR, **config}
    tower = {name: value for name, value in _VISION.items() if name != "num_position_embeddings"}
    images: Any = {name: value for name, value in _VISION_IDS.items() if not name.startswith("vision")}
    whole = Glm5NextConfig(
        text_config=fields,
        vision_config={**tower, "projection_intermediate_size": 32},
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
        **images,
    )
    return Glm5NextForConditionalGeneration(whole)


def _bailing_hybrid(config: dict[str, Any]) -> Any:
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    # Its KDA layers have as many heads as the others, and the width that `head_dim` says until it is overwritten.
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_mtp_layers": 0}
    return BailingHybridForCausalLM(BailingHybridConfig(**{**_LATENT, **sizes, **config}))


STOCK_MODELS: dict[str, Builder] = {
    "kimi_linear": _kimi_linear,
    "glm5_next": _glm5_next,
    "bailing_hybrid": _bailing_hybrid,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen4_exp": _qwen4_exp,
    "lara_mini": _lara_mini,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}
"""A tiny model by the name of its `model_type`: key width 32, vocabulary of the byte tokenizer, all layer types."""


def tiny_stock_model(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a tiny model of a stock class and a byte tokenizer.

    Weights are those of `fill_weights`.

    Args:
        model_type: a key of `STOCK_MODELS`.
        folder: where to; made if missing.
        seed: of the weights.
        max_shard_size: a small one makes several shards and an index.
        dtype: of the weights on disk.
        config: fields of the config that are to be otherwise.

    Returns:
        The folder.
    """
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)  # for what `fill_weights` leaves as the library draws it
    model = STOCK_MODELS[model_type]({"vocab_size": len(tokenizer), **config})
    fill_weights(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def release_config(folder: Path) -> None:
    """Say the heads of a KDA model as the releases of its family do; transformers saves other fields."""
    import json

    path = folder / "config.json"
    config = json.loads(path.read_text())
    part = config.get("text_config", config)
    count, width, taps = (part.pop(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    heads = {"head_dim": width, "num_heads": count, "short_conv_kernel_size": taps}
    if config["model_type"] == "glm5_next":
        part["linear_attn_config"] = {**heads, "gate_lower_bound": part.pop("linear_lower_bound"), "safe_gate": True}
        path.write_text(json.dumps(config))
        return
    kinds = config.pop("layer_types")
    if config["model_type"] == "kimi_linear":
        config["linear_attn_config"] = {
            **heads,
            "kda_layers": [number for number, kind in enumerate(kinds, 1) if kind == "linear_attention"],
            "full_attn_layers": [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"],
        }
    else:
        config |= {"head_dim": width, "short_conv_kernel_size": taps, "layer_group_size": 2}
    path.write_text(json.dumps(config))


def lay_convolutions(folder: Path, *, fused: bool) -> None:
    """Write OLMo-Hybrid's convolutions over [q, k, v] anew: as one tensor, or cut where q and k end, as released.

    transformers itself writes three parts of equal length.
    """
    import json

    from safetensors.torch import load_file, save_file

    config, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    tensors = load_file(path)
    for first in [name for name in tensors if ".q_conv1d." in name]:
        names = [first.replace(".q_conv1d.", f".{side}_conv1d.") for side in "qkv"]
        whole = torch.cat([tensors.pop(name) for name in names])
        if fused:
            tensors[first.replace(".q_conv1d.", ".conv1d.")] = whole
        else:
            parts = zip(names, whole.split([keys, keys, values]), strict=True)
            tensors.update({name: part.clone() for name, part in parts})
    save_file(tensors, path, metadata={"format": "pt"})
