"""What studies read from a command line."""

import argparse
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """What reads names with commas, for argparse, and refuses the first one that is none of those known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def one_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """What reads one name, as a list of one."""

    def read(text: str) -> list[str]:
        names = names_of(known)(text)
        if len(names) > 1:
            raise argparse.ArgumentTypeError(f"one name is wanted, not {len(names)}; a --work of its own for each")
        return names

    return read


def number(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def real(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def count(text: str) -> int:
    """A whole number of at least 1."""
    found = number(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return found


def several(read: Callable[[str], Any], example: str) -> Callable[[str], list[Any]]:
    """What reads values with commas.

    Args:
        read: one of them.
        example: of what is wanted, for whoever gives something else.
    """

    def read_all(text: str) -> list[Any]:
        try:
            return [read(part) for part in text.split(",")]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; values with commas are wanted, such as {example}") from None

    return read_all


def alone(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """What reads one value, as a list of one."""
    return lambda text: [read(text)]


def ending(suffix: str) -> Callable[[str], Path]:
    """What reads the name of a file that ends in this."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != suffix:
            raise argparse.ArgumentTypeError(f"{text!r} ends in {path.suffix or 'nothing'}, and {suffix} is written")
        return path

    return read


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no object; wanted is one such as {{"name": 1}}')
    return found
