"""Lengths that have no room for a task: what there is to say of them, the same for every task that has lengths."""

from collections.abc import Sequence
from typing import NamedTuple


class Misfit(NamedTuple):
    """A task that a length has no room for.

    Attributes:
        task: its name.
        length: in tokens.
        needed: tokens that it takes at least, those of the answer among them.
    """

    task: str
    length: int
    needed: int


def say(misfits: Sequence[Misfit]) -> str:
    """What there is to say of the lengths that have no room for one task, to follow its name."""
    lengths = ", ".join(str(misfit.length) for misfit in misfits)
    needed = max(misfit.needed for misfit in misfits)
    return f"takes {needed} tokens at least: not measured at {lengths}"
