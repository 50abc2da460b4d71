"""What a data `SOURCE` may be, and the documents behind it.

builtin                      documentation of the running Python (`lapcli.data.builtin`)
recall                       synthetic recall, endless (`lapcli.data.recall`)
fineweb, wikitext, pg19, pile  data sets on the hub; any other as owner/name or owner/name#config
PATH                         a text, JSONL or parquet file, or a folder of them
a:0.9,b:0.1                  a mixture of the above, by tokens
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from lapcli.data.builtin import builtin_train, heldout_builtin_text, load_builtin
from lapcli.data.documents import Document
from lapcli.data.files import KNOWN_SUFFIXES, digest_path, read_path
from lapcli.data.hub import SHORT_NAMES, find_hub_set, read_hub
from lapcli.data.recall import recall_documents
from lapcli.errors import DataError

SYNTHETIC = ("builtin", "recall")
"""Sources that need neither a file nor a network."""


@dataclass(frozen=True)
class Source:
    """One part of a mixture.

    Attributes:
        name: what the user typed.
        share: of the tokens, above 0; all shares of a mixture add up to 1.
    """

    name: str
    share: float


def parse_mixture(source: str) -> tuple[Source, ...]:
    """Read `a:0.9,b:0.1`, or a single source.

    A path that exists is taken as it is, commas and colons included. Weights need not add up to 1.

    Raises:
        DataError: an empty part, a weight missing beside others, not a number, or not above 0; a name twice.
    """
    if not source.strip():
        raise DataError("no data source is named.", f"Known: {', '.join(_known())}, or a path.")
    if Path(source).exists():
        return (Source(source, 1.0),)
    parts = [part.strip() for part in source.split(",")]
    named: dict[str, float | None] = {}
    for part in parts:
        name, weight = _split_weight(part)
        if not name:
            raise DataError(f"data source '{source}' has an empty part.", "Write a mixture as a:0.9,b:0.1")
        if name in named:
            raise DataError(f"data source '{source}' names {name} twice.")
        named[name] = weight
    for name, weight in named.items():
        if weight is None and len(named) == 1:
            return (Source(name, 1.0),)
        if weight is None:
            raise DataError(f"data source '{source}': {name} has no weight.", "Write a mixture as a:0.9,b:0.1")
        if not (isfinite(weight) and weight > 0):
            raise DataError(f"data source '{source}': the weight of {name} is {weight}; it must be above 0.")
    total = sum(weight or 0.0 for weight in named.values())
    return tuple(Source(name, (weight or 0.0) / total) for name, weight in named.items())


def check_source(name: str) -> None:
    """Refuse a name behind which there can be nothing, before any work.

    Raises:
        DataError: naming the nearest known source or file.
    """
    if name in SYNTHETIC or Path(name).exists():
        return
    looks_like_file = name.startswith((".", "/", "~")) or name.casefold().endswith(
        (*KNOWN_SUFFIXES, ".gz", ".xz", ".bz2", ".json", ".csv")
    )
    if find_hub_set(name) is not None and not looks_like_file:
        return
    near = difflib.get_close_matches(name, _known() + _neighbours(name), n=1, cutoff=0.6)
    raise DataError(
        f"data source '{name}' is neither a file or folder here nor a known data set.",
        f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(_known())}, owner/name on the hub, or a path.",
    )


def open_source(name: str, *, split: str = "train", seed: int = 0, text_field: str | None = None) -> Iterator[Document]:
    """The documents of one source, in its own order, read as they are asked for.

    Args:
        name: one of the kinds in this module's table, but a mixture.
        split: `train` or `heldout` of `builtin`; a split of a hub data set. Files have no splits.
        seed: of `recall`.
        text_field: of JSONL, parquet and hub records; `None` takes `text`, else `content`.

    Raises:
        DataError: at once for an unknown name or split; while reading, as `files.read_path` and `hub.read_hub`.
    """
    check_source(name)
    if name == "builtin":
        if split not in ("train", "heldout"):
            raise DataError(f"builtin has the splits train and heldout, not '{split}'.")
        return iter(builtin_train() if split == "train" else heldout_builtin_text())
    if name == "recall":
        return _recall(seed)
    if Path(name).exists():
        return read_path(Path(name), text_field)
    hub_set = find_hub_set(name)
    assert hub_set is not None, "check_source admits nothing else"
    return read_hub(name, hub_set, split, text_field)


def fingerprint(source: str) -> dict[str, str]:
    """What the files of a source or mixture hold now, so that a change of them shows.

    Returns:
        A digest (`lapcli.data.files.digest_path`) for each part that is a file or folder here, by its name. What ships
        with lapcli and data sets of the hub go by their names alone, and are left out.

    Raises:
        DataError: the mixture cannot be read, or a file.
    """
    names = [part.name for part in parse_mixture(source)]
    return {name: digest_path(Path(name)) for name in names if name not in SYNTHETIC and Path(name).exists()}


def describe_source(name: str, split: str = "train") -> str:
    """One line about a source for logs and artifacts."""
    if name == "builtin":
        return f"builtin (Python {load_builtin().python}, {split})"
    if name in SYNTHETIC or Path(name).exists():
        return name
    hub_set = find_hub_set(name)
    if hub_set is None:
        return name
    config = f", {hub_set.config}" if hub_set.config else ""
    return f"{name} ({hub_set.repository}{config}, {split})"


def _recall(seed: int) -> Iterator[Document]:
    for number, document in enumerate(recall_documents(seed=seed), start=1):
        yield Document(f"recall:{number}", document.text)


def _split_weight(part: str) -> tuple[str, float | None]:
    name, colon, weight = part.rpartition(":")
    if not colon:
        return part, None
    try:
        return name.strip(), float(weight)
    except ValueError:
        return part, None


def _known() -> list[str]:
    return [*SYNTHETIC, *SHORT_NAMES]


def _neighbours(name: str) -> list[str]:
    """Paths beside the one that is missing."""
    folder = Path(name).expanduser().parent
    if not folder.is_dir():
        return []
    prefix = "" if folder == Path() and not name.startswith("./") else f"{name[: len(name) - len(Path(name).name)]}"
    return [f"{prefix}{entry.name}" for entry in sorted(folder.iterdir())[:1000]]
