"""The front's use of a tokenizer: prompts to tokens, chats to prompts, tokens to what log-probabilities show."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lapcli.errors import UsageError
from lapcli.runtime.generation import encode_prompts

_Result = TypeVar("_Result")

_BROKEN = "\N{REPLACEMENT CHARACTER}"


def _byte_alphabet() -> dict[str, int]:
    """What byte-level tokenizers write for each byte (GPT-2's table): itself where it can be printed, else others."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Texts:
    """A tokenizer in a thread of its own: a long text takes a while, and a tokenizer takes one call at a time.

    Args:
        tokenizer: any of transformers'.
        chat_template: of chats; default: the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        # The length of a prompt is judged by us.
        tokenizer.model_max_length = 10**12

    async def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts, as `lapcli generate` takes them.

        Raises:
            UsageError: one has none.
        """
        return await self._do(lambda: encode_prompts(self.tokenizer, prompts))

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a chat, up to where the answer begins.

        Raises:
            UsageError: the model has no chat template, or it does not take these messages.
        """
        if self.chat_template is None:
            raise UsageError("this model has no chat template", "use /v1/completions, or serve with --chat-template")
        return await self._do(lambda: self._chat(messages))

    def _chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UsageError(f"the chat template does not take these messages: {error}") from error
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise UsageError("the chat template makes no text of these messages")
        return list(tokens)

    async def _do(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def token(self, number: int) -> tuple[str, bytes]:
        """The text of one token, special ones included, and its bytes.

        A token that ends within a character has no text; it gets OpenAI's, `bytes:\\xe2\\x80`, so that no two tokens
        have the same.
        """
        text = self.tokenizer.decode([number], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _BROKEN not in text:
            return text, text.encode()
        piece = self.tokenizer.convert_ids_to_tokens(number)
        if not isinstance(piece, str) or any(character not in _BYTES for character in piece):
            return text, text.encode()
        raw = bytes(_BYTES[character] for character in piece)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
