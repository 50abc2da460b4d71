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


STOCK_MODELS: dict[str, Builder] = {
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
}
"""A tiny model by the name of its `model_type`: key width 32, vocabulary of the byte tokenizer, all layer types."""


def tiny_stock_model(
    model_type: str, folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config: Any
) -> Path:
    """Write a tiny model of a stock class and a byte tokenizer.

    Weights are those of `fill_weights`, in fp32.

    Args:
        model_type: a key of `STOCK_MODELS`.
        folder: where to; made if missing.
        seed: of the weights.
        max_shard_size: a small one makes several shards and an index.
        config: fields of the config that are to be otherwise.

    Returns:
        The folder.
    """
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)  # for what `fill_weights` leaves as the library draws it
    model = STOCK_MODELS[model_type]({"vocab_size": len(tokenizer), **config})
    fill_weights(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder
