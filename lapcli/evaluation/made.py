"""Prompts that were made for one model and serve the next one with the same tokenizer."""

from collections.abc import Callable, Hashable
from typing import Any

# Python takes some 36 bytes for each.
_MOST_TOKENS = 1 << 22


class Made:
    """Keeps what was made, as long as it is not too much.

    Args:
        wanted: whether anything is to be kept: a single model needs nothing twice.
    """

    def __init__(self, wanted: bool = True):
        self._left = _MOST_TOKENS if wanted else 0
        self._kept: dict[Hashable, Any] = {}

    def prompts(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes, or made for this key before.

        Args:
            key: all that it depends on.
            make: gives prompts, each with `tokens`, or something else, which is not kept.
        """
        if key in self._kept:
            return self._kept[key]
        found = make()
        tokens = sum(len(each.tokens) for each in found) if isinstance(found, list) else self._left + 1
        if tokens <= self._left:
            self._left -= tokens
            self._kept[key] = found
        return found
