"""The unit every text source yields."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text with a name that says where it came from.

    Attributes:
        name: unique within its source (`collections.OrderedDict.popitem`, `books.jsonl:17`).
        text: the text, never empty.
    """

    name: str
    text: str
