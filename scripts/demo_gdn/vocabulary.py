"""The tokenizer of `demo:gdn`: byte-level BPE, digits alone, one boundary token that begins and ends documents."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

BOUNDARY = "<|endoftext|>"
"""Stands before every document and after the last: it is both BOS and EOS."""
PADDING = "<|pad|>"


def train_tokenizer(texts: list[str], vocab_size: int) -> str:
    """Train on the texts; return the tokenizer as JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


@lru_cache(maxsize=2)
def load_tokenizer_json(tokenizer_json: str) -> Any:
    """The `tokenizers.Tokenizer` of that JSON; its threads stay off, processes are used instead."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json)


def save_tokenizer(tokenizer_json: str, output: Path, max_length: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads."""
    # Indented as `tokenizers` writes it, merges and vocabulary would take three times the bytes.
    document = json.loads(tokenizer_json)
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    (output / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOUNDARY,
        "eos_token": BOUNDARY,
        "pad_token": PADDING,
        "padding_side": "left",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
