"""Token by token to text, without half characters, and without what a stop text hides."""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LOOK_BACK = 6
"""Tokens before the new ones that are decoded with them, since decoders treat the first of a text as a beginning."""
_LONGEST = 16
"""Tokens that are waited for until broken bytes are shown as what they are: no character has so many bytes."""


class TextStream:
    """The text of one row as its tokens come.

    Args:
        tokenizer: any of transformers'.
        stop: texts that end the row.
        prompt: the tokens before, which are not shown; they decide whether the first token begins with a space.
        skip_special_tokens: whether special tokens have no text.

    Attributes:
        stopped: whether a stop text was met.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ):
        self.tokenizer, self.stop, self.skip = tokenizer, tuple(stop), skip_special_tokens
        self._tokens = list(prompt[-_LOOK_BACK:])
        self._shown = len(self._tokens)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take in a token, and return what can be shown now."""
        self._tokens.append(token)
        return self._release(self._new_text(last=False), last=False)

    def finish(self) -> str:
        """Return what was held back, when no token will follow."""
        return self._release(self._new_text(last=True), last=True)

    def _new_text(self, *, last: bool) -> str:
        """The text of the tokens that were not shown; empty while it ends within a character."""
        start = max(0, self._shown - _LOOK_BACK)
        before = self._decode(self._tokens[start : self._shown])
        whole = self._decode(self._tokens[start:])
        waiting = len(self._tokens) - self._shown
        if not last and whole.endswith(_BROKEN) and waiting < _LONGEST:
            return ""
        self._shown = len(self._tokens)
        # What was shown never changes by what follows, except where it ended in broken bytes.
        common = len(before) if whole.startswith(before) else len(before.rstrip(_BROKEN))
        return whole[common:]

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)

    def _release(self, text: str, *, last: bool) -> str:
        """What of the text is neither a stop text nor may be the beginning of one."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [text.index(stop) for stop in self.stop if stop in text]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = 0 if last else max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that a stop text begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
