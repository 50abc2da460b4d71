"""The front's use of a tokenizer: prompts to tokens, chats to prompts, tokens to what log-probabilities show."""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lapcli.errors import UsageError
from lapcli.runtime.generation import encode_prompts

_Result = TypeVar("_Result")

_CHARACTERS = 16
"""Of a long text this many for each token that a prompt may have are looked at first: more than most tokens are."""
_BORDER = 64
"""Tokens by which a beginning that is cut off may differ from those of the whole."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def _byte_alphabet() -> dict[str, int]:
    """What byte-level tokenizers write for each byte (GPT-2's table): itself where it can be printed, else others."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TooLong(Exception):
    """A text has more tokens than a prompt may have.

    Args:
        most: that it may have.
    """

    def __init__(self, most: int):
        super().__init__(f"more than {most} tokens")


class Texts:
    """A tokenizer in a thread of its own: a long text takes a while, and a tokenizer takes one call at a time.

    So what is far too long is refused by its beginning, at a cost that does not grow with it: everybody waits for it.

    Args:
        tokenizer: any of transformers'.
        chat_template: of chats; default: the tokenizer's own.
        most: tokens of a prompt; `None` for any number.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None, most: int | None = None):
        self.tokenizer, self.most = tokenizer, most
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        # The length of a prompt is judged by us.
        tokenizer.model_max_length = 10**12

    async def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts, as `lapcli generate` takes them.

        Raises:
            TooLong: one has too many; not all that have are found here.
            UsageError: one has none.
        """

        def work() -> list[list[int]]:
            for prompt in prompts:
                self._refuse_far_too_long(prompt)
            return encode_prompts(self.tokenizer, prompts)

        return await self._do(work)

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a chat, up to where the answer begins.

        Raises:
            TooLong: as `encode`.
            UsageError: the model has no chat template, or it does not take these messages.
        """
        if self.chat_template is None:
            raise UsageError(
                "this model has no chat template",
                "use /v1/completions, or serve with --chat-template (plain-chat ships)",
            )
        return await self._do(lambda: self._chat(messages))

    def _chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UsageError(f"the chat template does not take these messages: {error}") from error
        self._refuse_far_too_long(text)
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise UsageError("the chat template makes no text of these messages")
        return list(tokens)

    def _refuse_far_too_long(self, text: str) -> None:
        if self.most is None:
            return
        size = _CHARACTERS * (self.most + _BORDER)
        while size < len(text):
            beginning = self.tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
            if len(beginning) > self.most + _BORDER:
                raise TooLong(self.most)
            size *= 4

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
        byte = re.fullmatch("<0x([0-9A-F]{2})>", piece) if isinstance(piece, str) else None
        if byte is not None:
            # As SentencePiece writes one that it has no piece for.
            raw = bytes.fromhex(byte[1])
        elif not isinstance(piece, str) or any(character not in _BYTES for character in piece):
            return text, text.encode()
        else:
            raw = bytes(_BYTES[character] for character in piece)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
