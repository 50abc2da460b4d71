"""Tiny models with tokenizers, made from a seed, for tests that need a checkpoint on disk."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lapcli.models import (
    DeltaNetConfig,
    DeltaNetForCausalLM,
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    QDeltaConfig,
    QDeltaForCausalLM,
)

_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte: `<pad>` 0, `<s>` 1, `</s>` 2, then the 256 bytes. It adds no BOS by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def tiny_gated_deltanet(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config: Any) -> Path:
    """Write a Gated DeltaNet of about 0.13 M parameters and a byte tokenizer.

    Two layers, hidden size 64, two heads of K = V = 32, weights of N(0, 0.25 / fan-in) in fp32, vocabulary 259.

    Args:
        folder: where to; made if missing.
        seed: of the weights.
        max_shard_size: a small one (`"50KB"`) makes several shards and an index.
        config: fields of `GatedDeltaNetConfig` that are to be otherwise.

    Returns:
        The folder.
    """
    settings = {**_TINY, "head_dim": 32, "expand_v": 1.0, "vocab_size": len(byte_tokenizer()), **config}
    return _write(GatedDeltaNetForCausalLM, GatedDeltaNetConfig(**settings), folder, seed, max_shard_size)


def tiny_delta_net(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config: Any) -> Path:
    """Write a DeltaNet of the same size; see `tiny_gated_deltanet`.

    Args:
        folder: where to; made if missing.
        seed: of the weights.
        max_shard_size: a small one makes several shards and an index.
        config: fields of `DeltaNetConfig` that are to be otherwise (`expand_k`, `expand_v`, `num_heads` set K and V).

    Returns:
        The folder.
    """
    settings = {**_TINY, "vocab_size": len(byte_tokenizer()), **config}
    return _write(DeltaNetForCausalLM, DeltaNetConfig(**settings), folder, seed, max_shard_size)


def tiny_qdelta(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config: Any) -> Path:
    """Write a Q-Delta of the same size; see `tiny_gated_deltanet`.

    Args:
        folder: where to; made if missing.
        seed: of the weights.
        max_shard_size: a small one makes several shards and an index.
        config: fields of `QDeltaConfig` that are to be otherwise.

    Returns:
        The folder.
    """
    settings = {**_TINY, "head_dim": 32, "expand_v": 1.0, "vocab_size": len(byte_tokenizer()), **config}
    return _write(QDeltaForCausalLM, QDeltaConfig(**settings), folder, seed, max_shard_size)


def fill_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw matrices, filters and embeddings of N(0, 0.25 / fan-in), and decays and all biases of U(-1, 1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter.shape[-1]
                parameter.normal_(0.0, 0.5 * fan_in**-0.5, generator=generator)
            elif name.endswith(("A_log", "bias", "lamb_gain")):
                # The model's own start is zeros, or random but not from this seed.
                parameter.uniform_(-1.0, 1.0, generator=generator)


def _write(model_class: type[PreTrainedModel], config: Any, folder: Path, seed: int, max_shard_size: str) -> Path:
    model: Any = model_class(config)
    fill_weights(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder
