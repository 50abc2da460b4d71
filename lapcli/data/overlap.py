"""Keeping held-out text out of training text, paragraph by paragraph.

Two renderings of one manual differ in line breaks, quotes and markup, so paragraphs are compared as sequences
of words: letters and digits only, case folded. A paragraph is held to occur in the held-out text when

- it has the same words as a whole held-out paragraph, or
- it has at least `MIN_WORDS` words and all of them occur there in a row, or
- any `RUN_WORDS` of its words in a row occur there (the usual contamination criterion of language models).
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

RUN_WORDS = 13
MIN_WORDS = 4

_WORD = re.compile(r"[^\W_]+")
_BREAK = re.compile(r"(\n(?:[ \t\r\f\v]*\n)+)")


def words_of(text: str) -> list[str]:
    """The words of a text: runs of letters and digits, case folded; `_` separates."""
    return _WORD.findall(text.casefold())


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of a text, which blank lines separate; without empty ones."""
    return [part for part in _BREAK.split(text)[::2] if part.strip()]


class Cleaned(NamedTuple):
    """A text after `HeldOutIndex.clean`.

    Attributes:
        text: what is left, with the paragraph breaks it had; may be empty.
        dropped: number of paragraphs taken out.
    """

    text: str
    dropped: int


class HeldOutIndex:
    """Answers whether a paragraph occurs in a set of held-out texts.

    Args:
        texts: the held-out texts, each whole.
    """

    def __init__(self, texts: Iterable[str]):
        self._paragraphs: set[tuple[str, ...]] = set()
        self._runs: dict[int, set[tuple[str, ...]]] = {length: set() for length in range(MIN_WORDS, RUN_WORDS + 1)}
        for text in texts:
            self._paragraphs.update(tuple(words_of(part)) for part in paragraphs_of(text))
            words = words_of(text)
            for length, runs in self._runs.items():
                runs.update(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
        self._paragraphs.discard(())

    def occurs(self, paragraph: str) -> bool:
        """Whether the paragraph occurs in the held-out texts (see the module's rule)."""
        words = words_of(paragraph)
        if tuple(words) in self._paragraphs:
            return True
        if len(words) < MIN_WORDS:
            return False
        if len(words) <= RUN_WORDS:
            return tuple(words) in self._runs[len(words)]
        # Every run of RUN_WORDS words covers a whole seed of MIN_WORDS that starts at a multiple of the stride,
        # so that looking up the seeds rules nearly every paragraph out at a tenth of the look-ups.
        stride = RUN_WORDS - MIN_WORDS + 1
        seeds, runs = self._runs[MIN_WORDS], self._runs[RUN_WORDS]
        for seed in range(0, len(words) - MIN_WORDS + 1, stride):
            if tuple(words[seed : seed + MIN_WORDS]) not in seeds:
                continue
            first, last = max(0, seed - stride + 1), min(seed, len(words) - RUN_WORDS)
            if any(tuple(words[i : i + RUN_WORDS]) in runs for i in range(first, last + 1)):
                return True
        return False

    def clean(self, text: str) -> Cleaned:
        """The text without the paragraphs that occur in the held-out texts."""
        parts = _BREAK.split(text)
        dropped = 0
        kept: list[str] = []
        for i in range(0, len(parts), 2):
            if self.occurs(parts[i]):
                dropped += 1
            else:
                kept.extend(parts[i : i + 2])
        if not dropped:
            return Cleaned(text, 0)
        return Cleaned("".join(kept).rstrip(), dropped)
