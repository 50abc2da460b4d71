"""Seeded draws that depend on nothing but the seed and the number of items."""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def draw(items: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """At most `limit` of the items, without repetition, in their order; all of them where the limit is `None`."""
    if limit is None or limit >= len(items):
        return list(items)
    chosen = random.Random(seed).sample(range(len(items)), limit)
    return [items[index] for index in sorted(chosen)]
