"""How many rows of requests go through a model at once: as many as suit the device, fewer once memory ran out."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from lapcli.errors import ModelError
from lapcli.reporting import Reporter


class HasTokens(Protocol):
    """A request; its tokens go through the model."""

    @property
    def tokens(self) -> Sequence[int]:
        """At least one."""
        ...


R = TypeVar("R", bound=HasTokens)
A = TypeVar("A")


class Rows:
    """Rows a pass, remembered where memory ran out.

    Args:
        name: of the model, for messages.
        asked: rows a pass; `None`: as `suits` says.
        suits: from the tokens of the longest row to the rows that suit the device.
        reporter: told when batches are made smaller.
    """

    def __init__(self, name: str, asked: int | None, suits: Callable[[int], int], reporter: Reporter):
        self._name = name
        self._asked = asked
        self._suits = suits
        self._fits: int | None = None
        self._reporter = reporter

    def at(self, length: int) -> int:
        """How many rows to put together whose longest has that many tokens."""
        wanted = self._suits(length) if self._asked is None else self._asked
        return wanted if self._fits is None else min(wanted, self._fits)

    def run(self, batch: Sequence[R], answer: Callable[[Sequence[R]], list[A]]) -> list[A]:
        """The answers to the first requests of the batch: to all of it, or to as many as memory takes.

        Raises:
            ModelError: memory does not take one row.
        """
        while True:
            try:
                return answer(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise ModelError(
                        f"memory ran out on {self._name} with one row of {len(batch[0].tokens)} tokens",
                        "give a shorter --max-length or shorter lengths, or a larger device",
                    ) from error
                batch = batch[: len(batch) // 2]
                self._fits = len(batch)
            torch.cuda.empty_cache()
            self._reporter.warn(f"memory ran out; going on with batches of {self._fits}")
