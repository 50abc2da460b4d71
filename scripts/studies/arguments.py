"""What studies read from a command line."""

import argparse
from collections.abc import Callable, Collection


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """What reads names with commas, for argparse, and refuses the first one that is none of those known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read
