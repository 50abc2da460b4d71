"""Documents streamed from data sets on the Hugging Face hub, by short name or by id."""

import logging
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from lapcli.data.documents import Document
from lapcli.data.files import text_of
from lapcli.errors import DataError

_OFFLINE = "Go online, or name a local text, JSONL or parquet file with --data; `--data builtin` needs no network."
_PATIENCE_SECONDS = 10.0


class HubSet(NamedTuple):
    """Where a data set lies.

    Attributes:
        repository: its id on the hub.
        config: its configuration; `None` for the only or default one.
        lines: whether a record is a line of a page and has to be joined with its neighbours (WikiText).
    """

    repository: str
    config: str | None = None
    lines: bool = False


SHORT_NAMES = {
    "fineweb": HubSet("HuggingFaceFW/fineweb", "sample-10BT"),
    "wikitext": HubSet("Salesforce/wikitext", "wikitext-103-raw-v1", lines=True),
    "pg19": HubSet("emozilla/pg19"),
    "pile": HubSet("monology/pile-uncopyrighted"),
}
"""The data sets with short names. The Pile is its copy without the works that were withdrawn."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(#[\w.-]+)?")
PAGE_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*")
"""The line that begins a page of a set whose records are lines (`HubSet.lines`): `= Title =`, one level deep."""


def find_hub_set(name: str) -> HubSet | None:
    """The data set of a short name or of a hub id `owner/name`, with `#config` after it if need be."""
    if name in SHORT_NAMES:
        return SHORT_NAMES[name]
    if _HUB_ID.fullmatch(name) is None:
        return None
    repository, _, config = name.partition("#")
    return HubSet(repository, config or None)


def read_hub(name: str, hub_set: HubSet, split: str, text_field: str | None = None) -> Iterator[Document]:
    """Stream the documents of one split, in the data set's order.

    Args:
        name: what the user typed, for names and errors.
        hub_set: where it lies.
        split: `train`, `validation`, ...
        text_field: as in `files.read_path`.

    Raises:
        DataError: `datasets` is missing; the data set is gated, gone, or has no such split or configuration;
            the network is down or was lost in mid-stream.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"data set '{name}' needs the package `datasets`.", "pip install datasets") from error
    try:
        try_network()
        with without_retry_lines():
            rows: Iterable[Any] = load_dataset(hub_set.repository, hub_set.config, split=split, streaming=True)
    except Exception as error:
        raise explain_hub_error(error, name, hub_set, 0) from error
    texts = _records(rows, name, hub_set, text_field)
    for number, text in enumerate(_joined_pages(texts) if hub_set.lines else texts, start=1):
        if text.strip():
            yield Document(f"{name}:{number}", text)


def try_network() -> None:
    """Ask the hub for a sign of life, once: its client tries for half a minute where there is no network.

    Raises:
        Exception: whatever the client raises where the hub cannot be reached.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    # In offline mode the client fails at once by itself, unless the data set is in its cache.
    with suppress(OfflineModeIsEnabled):
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS)


@contextmanager
def without_retry_lines() -> Generator[None]:
    """Silence what the hub's client says before each new attempt; what it gives up on is raised."""
    client = logging.getLogger("huggingface_hub.utils._http")
    level = client.level
    client.setLevel(logging.ERROR)
    try:
        yield
    finally:
        client.setLevel(level)


def _records(rows: Iterable[Any], name: str, hub_set: HubSet, text_field: str | None) -> Iterator[str]:
    stream = iter(rows)
    number = 0
    while True:
        try:
            with without_retry_lines():
                row = next(stream)
        except StopIteration:
            return
        except Exception as error:
            raise explain_hub_error(error, name, hub_set, number) from error
        number += 1
        yield text_of(row, text_field, f"data set '{name}', record {number}")


def _joined_pages(lines: Iterator[str]) -> Iterator[str]:
    page: list[str] = []
    for line in lines:
        if page and PAGE_TITLE.fullmatch(line):
            yield "".join(page)
            page = []
        page.append(line)
    yield "".join(page)


def explain_hub_error(error: Exception, name: str, hub_set: HubSet, records: int) -> DataError:
    """A `DataError` for whatever the hub's libraries raised; their classes differ from release to release.

    Args:
        error: what they raised.
        name: the data set as the user typed it.
        hub_set: where it lies.
        records: how many were read before.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    page = f"https://huggingface.co/datasets/{hub_set.repository}"
    said = " ".join(str(error).split())[:300]
    if "GatedRepoError" in kinds or "gated" in said.casefold():
        return DataError(
            f"data set '{name}' ({hub_set.repository}) is gated: its owner asks you to agree to terms first.",
            f"Agree at {page}, then log in: hf auth login",
        )
    gone = {"DatasetNotFoundError", "RepositoryNotFoundError", "DefunctDatasetError", "DisabledRepoError"}
    # Without a network the libraries also say "not found", but blame the connection in the text or the cause.
    offline = _is_network(error)
    if kinds & gone and not offline:
        return DataError(
            f"data set '{name}' ({hub_set.repository}) is not on the hub, or not for you: {said}",
            f"Look at {page}, or name another with --data (short names: {', '.join(SHORT_NAMES)}).",
        )
    if offline:
        when = f"after {records} records" if records else "before the first record"
        return DataError(f"the network failed {when} of data set '{name}': {said}", _OFFLINE)
    return DataError(f"data set '{name}' ({hub_set.repository}) cannot be read: {type(error).__name__}: {said}")


def _is_network(error: BaseException | None) -> bool:
    network = {"ConnectionError", "OfflineModeIsEnabled", "TimeoutError", "LocalEntryNotFoundError", "TransportError"}
    network |= {"ConnectTimeout", "ReadTimeout", "ConnectError", "ReadError", "ClientError", "MaxRetryError"}
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if network & {kind.__name__ for kind in type(error).__mro__}:
            return True
        error = error.__cause__ or error.__context__
    return False
