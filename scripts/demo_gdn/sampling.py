"""Which rows of the resident pool make up each step."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from demo_gdn.corpus import TRAINED
from demo_gdn.recall_rows import STAGES

TEXT_WEIGHTS = {"books": 0.74, "techdocs": 0.13, "openstax": 0.04, "wiki": 0.07, "builtin": 0.02}
"""Shares of the rows that are not recall."""
RECALL_SHARE = ((0.0, 0.34), (0.4, 0.34), (1.0, 0.28))
"""Share of recall rows by progress, linear in between: recall emerges late, so it gets its mass early."""
STAGE_ENDS = (0.15, 0.3, 1.0)
"""Progress at which each stage of the recall curriculum ends."""


class Region(NamedTuple):
    """A stretch of the pool."""

    start: int
    length: int


class Sampler:
    """Draws the starts of rows.

    Args:
        text: regions of the text streams, by source.
        recall: one region for each stage of the curriculum, whole rows of `length + 1`.
        batch: rows of a step.
        length: tokens of a row.
        seed: of all draws.
    """

    def __init__(self, text: dict[str, Region], recall: list[Region], *, batch: int, length: int, seed: int):
        self._rng = np.random.default_rng(seed)
        self._batch, self._length = batch, length
        self._text = {name: self._windows(region) for name, region in text.items()}
        self._recall = [self._rows(region) for region in recall]
        self._weights = np.asarray([TEXT_WEIGHTS[name] for name in text])
        self._weights /= self._weights.sum()

    def step(self, progress: float) -> np.ndarray:
        """`[batch]` starts for a step at that progress (0 to 1)."""
        moments, shares = zip(*RECALL_SHARE, strict=True)
        share = float(np.interp(progress, moments, shares))
        recalled = int(self._batch * share + self._rng.random())
        stage = min(next(i for i, end in enumerate(STAGE_ENDS) if progress <= end or end == 1.0), len(STAGES) - 1)
        starts = [next(self._recall[stage]) for _ in range(recalled)]
        counts = self._rng.multinomial(self._batch - recalled, self._weights)
        for rows, count in zip(self._text.values(), counts, strict=True):
            starts.extend(next(rows) for _ in range(count))
        return np.asarray(starts, dtype=np.int64)

    def _windows(self, region: Region) -> Iterator[int]:
        """Windows of a stream in a new order and at a new offset each time round; targets reach one further."""
        usable = region.length - self._length - 1
        if usable < 0:
            raise ValueError(f"a text stream holds {region.length} tokens, fewer than a row of {self._length + 1}")
        while True:
            offset = int(self._rng.integers(min(self._length, usable + 1)))
            count = 1 + (usable - offset) // self._length
            for index in self._rng.permutation(count).tolist():
                yield region.start + offset + index * self._length

    def _rows(self, region: Region) -> Iterator[int]:
        row = self._length + 1
        while True:
            for index in self._rng.permutation(region.length // row).tolist():
                yield region.start + index * row


def check_weights() -> None:
    """Every trained source has a weight, and no other."""
    if set(TEXT_WEIGHTS) != set(TRAINED):
        raise ValueError(f"TEXT_WEIGHTS names {sorted(TEXT_WEIGHTS)}, the corpus {sorted(TRAINED)}")
