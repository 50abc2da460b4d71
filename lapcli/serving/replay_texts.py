"""Prompts of given numbers of tokens, made from a seed: words that a tokenizer takes for one token each."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from lapcli.serving.replay_trace import Turn

_ENOUGH = 512
"""Words to choose from."""
_CHECKED = 64


class Prompts:
    """Makes prompts.

    Where the tokenizer has words that stay what they are beside each other, a prompt is a text; where not, a list of
    token ids.

    Args:
        tokenizer: of the model, any of transformers'.
        seed: of all prompts.

    Attributes:
        as_text: whether prompts are texts.
    """

    def __init__(self, tokenizer: Any, seed: int):
        self.seed = seed
        self._overhead = len(tokenizer("", verbose=False)["input_ids"])
        self._words, self._between, self._ids = _words(tokenizer)
        self.as_text = bool(self._words)

    def of(self, turn: Turn) -> str | list[int]:
        """The prompt of a turn; what its session said before is the same in every turn."""
        wanted = max(1, turn.prompt - (self._overhead if self.as_text else 0))
        choices: Sequence[Any] = self._words or self._ids
        chosen: list[Any] = []
        for number, tokens in enumerate(turn.parts):
            chosen += random.Random(f"{self.seed}/{turn.session}/{number}").choices(choices, k=tokens)
        chosen = chosen[-wanted:]
        return self._between.join(chosen) if self.as_text else chosen


def _words(tokenizer: Any) -> tuple[list[str], str, list[int]]:
    """Words of one token each and what stands between them, or no words; and token ids."""
    special = set(tokenizer.all_special_ids)
    ids = [number for number in range(len(tokenizer)) if number not in special]
    texts = [tokenizer.decode([number], clean_up_tokenization_spaces=False) for number in ids]
    plain = [(text, number) for text, number in zip(texts, ids, strict=True) if text.isascii()]
    # Byte-level tokenizers have the space in the word, others put it between words; the last have letters alone.
    kinds = (
        ("", [(text, number) for text, number in plain if text[:1] == " " and text[1:].isalpha()]),
        (" ", [(text, number) for text, number in plain if text.isalpha()]),
        ("", [(text, number) for text, number in plain if len(text) == 1 and text.isalpha()]),
    )
    for between, words in kinds:
        kept = [
            (text, number) for text, number in itertools.islice(words, 4 * _ENOUGH) if _ids(tokenizer, text) == [number]
        ]
        kept = kept[:_ENOUGH]
        if len(kept) < 16:
            continue
        sample = random.Random(0).choices(kept, k=_CHECKED)
        if _ids(tokenizer, between.join(text for text, _ in sample)) == [number for _, number in sample]:
            return [text for text, _ in kept], between, ids
    return [], "", ids


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
