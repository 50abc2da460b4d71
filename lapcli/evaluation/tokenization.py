"""What an evaluation must know of a tokenizer: its name by content, and which token a text begins with."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from lapcli.errors import UsageError
from lapcli.evaluation.settings import Bos


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of the tokenizer's vocabulary and rules, hexadecimal."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are set by calls, and change no token of a text.
        document = {
            name: part for name, part in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")
        }
    else:
        document = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token}
    text = json.dumps([document, special], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text alone, without special ones."""
    # A text longer than the model takes is cut into windows later; transformers would warn of it here.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, as `encode` gives them; of many a fast tokenizer makes them with all cores."""
    if not texts or getattr(tokenizer, "backend_tokenizer", None) is None:
        return [encode(tokenizer, text) for text in texts]
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """The text of tokens, special ones and all, as it is."""
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def squeeze(text: str) -> str:
    """A text as what tokenizers keep of it: some put blanks around punctuation, or lower-case."""
    return "".join(text.split()).casefold()


def text_start(tokenizer: Any, bos: Bos) -> int | None:
    """The token that the first token of a text is scored from; `None`: the first token is not scored.

    Raises:
        UsageError: one is asked for, and the tokenizer has neither BOS nor EOS.
    """
    if bos == "never":
        return None
    token = _start_token(tokenizer)
    if token is None and bos == "always":
        raise UsageError("--bos always: the tokenizer has neither a BOS nor an EOS token", "use --bos never")
    return token


def prompt_start(tokenizer: Any, bos: Bos) -> int | None:
    """The token that a prompt begins with; `auto` follows the tokenizer.

    Raises:
        UsageError: one is asked for, and the tokenizer has neither BOS nor EOS.
    """
    if bos == "auto":
        return tokenizer.bos_token_id if adds_bos(tokenizer) else None
    return text_start(tokenizer, bos)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS token before a text by itself."""
    if tokenizer.bos_token_id is None:
        return False
    return tokenizer.encode("a", add_special_tokens=True)[:1] == [tokenizer.bos_token_id]


def token_name(tokenizer: Any, token: int | None) -> str | None:
    """A token as the tokenizer spells it."""
    return None if token is None else str(tokenizer.convert_ids_to_tokens(token))


def _start_token(tokenizer: Any) -> int | None:
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
