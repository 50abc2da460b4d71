"""Records of a text source, each with the place from which reading goes on behind it.

The kinds of source and what is said of bad ones are those of `lapcli.data`; its readers begin at the beginning, these
wherever they are told to. A place is a small JSON-able dict, `{}` for the beginning: a byte offset in a text or JSONL
file (of the decompressed bytes, which are decompressed again up to there), a row of a parquet file (whose row group is
read again), what `datasets` keeps of a stream (which reads the shard at hand again), or a number.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lapcli.artifacts.digest import digest_document
from lapcli.data.builtin import builtin_digest, builtin_train
from lapcli.data.files import (
    KNOWN_SUFFIXES,
    PIECE_CHARACTERS,
    TEXT_FIELDS,
    Line,
    files_in,
    kind_of,
    lines_of,
    read_path,
    text_of,
)
from lapcli.data.hub import (
    PAGE_TITLE,
    HubSet,
    explain_hub_error,
    find_hub_set,
    try_network,
    without_retry_lines,
)
from lapcli.data.recall import recall_documents
from lapcli.data.sources import check_source
from lapcli.errors import DataError

Place = dict[str, Any]
"""From where to read on; `{}` is the beginning."""

RECALL_RUN = 64
"""Documents of `recall` that are made from one seed, and made again to go on among them."""


class Record(NamedTuple):
    """One document and where the next begins.

    Attributes:
        key: names it, the same in every epoch and beside every other source.
        text: never blank.
        after: the place behind it.
    """

    key: str
    text: str
    after: Place


class Records(Protocol):
    """A source that can be read from any place on."""

    def contents(self) -> str:
        """A digest that another content changes, as far as it can be told without reading everything."""
        ...

    def read(self, place: Place, order: random.Random) -> Iterator[Record]:
        """The records from a place to the end.

        Args:
            place: `Record.after` of the last one read under the same order, or `{}`.
            order: decides the order of a folder's files; the same state gives the same.

        Raises:
            DataError: while reading, as `lapcli.data.open_source`.
        """
        ...


def open_records(name: str, *, seed: int, text_field: str | None = None) -> Records:
    """The records of one source.

    Args:
        name: as in `lapcli.data.open_source`.
        seed: of `recall`.
        text_field: as in `lapcli.data.open_source`.

    Raises:
        DataError: an unknown name, or a path with nothing of a known kind.
    """
    check_source(name)
    if name == "builtin":
        return BuiltinRecords()
    if name == "recall":
        return RecallRecords(seed)
    if Path(name).exists():
        return FileRecords(Path(name), text_field)
    hub_set = find_hub_set(name)
    assert hub_set is not None, "check_source admits nothing else"
    return HubRecords(name, hub_set, text_field)


class BuiltinRecords:
    """The train part of `builtin`, from memory."""

    def contents(self) -> str:
        """Digest of all of it: it differs from one Python to the next."""
        return builtin_digest("train")

    def read(self, place: Place, order: random.Random) -> Iterator[Record]:
        """By name; a place is a number of documents."""
        start = place.get("record", 0)
        for number, document in enumerate(builtin_train()[start:], start=start + 1):
            yield Record(f"builtin:{document.name}", document.text, {"record": number})


class RecallRecords:
    """Synthetic recall, without an end.

    Args:
        seed: of all documents; each run of `RECALL_RUN` has its own, so that one can begin in the middle.
    """

    def __init__(self, seed: int):
        self._seed = seed

    def contents(self) -> str:
        """Digest of the running text."""
        return builtin_digest("train")

    def read(self, place: Place, order: random.Random) -> Iterator[Record]:
        """One after another; a place is a number of documents."""
        number = place.get("record", 0)
        while True:
            run, done = divmod(number, RECALL_RUN)
            seed = random.Random(f"recall/{self._seed}/{run}").getrandbits(64)
            for made, document in zip(range(RECALL_RUN), recall_documents(seed=seed), strict=False):
                if made >= done:
                    number += 1
                    yield Record(f"recall:{number}", document.text, {"record": number})


class FileRecords:
    """The documents of a file or a folder, as `lapcli.data.files.read_path` gives them.

    Args:
        path: what was named.
        text_field: as there.

    Raises:
        DataError: nothing of a known kind there.
    """

    def __init__(self, path: Path, text_field: str | None):
        self._path, self._text_field = path, text_field
        self._files = _files_of(path)
        if not self._files:
            # The reader of lapcli.data knows what to say of it.
            for _ in read_path(path, text_field):
                break

    def contents(self) -> str:
        """Digest of names and sizes: an edit that keeps a file's size goes unnoticed."""
        named = [
            (str(file.relative_to(self._path)) if file != self._path else file.name, file.stat().st_size)
            for file in self._files
        ]
        return digest_document(named)

    def read(self, place: Place, order: random.Random) -> Iterator[Record]:
        """File by file in a drawn order; a place is a file's rank in it and a place there."""
        files = list(self._files)
        order.shuffle(files)
        first = place.get("file", 0)
        for index, file in enumerate(files[first:], start=first):
            inside = {key: value for key, value in place.items() if key != "file"} if index == first else {}
            for record in self._read_file(file, inside):
                yield record._replace(after={"file": index, **record.after})

    def _read_file(self, file: Path, place: Place) -> Iterator[Record]:
        kind = kind_of(file)
        if kind == ".parquet":
            return _read_table(file, place, self._text_field)
        if kind in (".jsonl", ".ndjson"):
            return _read_lines(file, place, self._text_field)
        return _read_text(file, place)


class HubRecords:
    """The `train` split of a data set on the hub, streamed, as `lapcli.data.hub.read_hub` gives it.

    Args:
        name: what the user typed.
        hub_set: where it lies.
        text_field: as there.
    """

    def __init__(self, name: str, hub_set: HubSet, text_field: str | None):
        self._name, self._set, self._text_field = name, hub_set, text_field

    def contents(self) -> str:
        """Digest of its address: a data set that changes on the hub goes unnoticed."""
        return digest_document([self._set.repository, self._set.config])

    def read(self, place: Place, order: random.Random) -> Iterator[Record]:
        """In the data set's order; a place is the state of its stream, and the number of records before it."""
        rows, number = self._load(), place.get("record", 0)
        if place:
            rows.load_state_dict(place["rows"])
        key = f"{self._set.repository}#{self._set.config}"
        stream = iter(rows)
        page: list[str] = []
        while True:
            before = {"record": number, "rows": rows.state_dict()}
            try:
                with without_retry_lines():
                    row = next(stream)
            except StopIteration:
                break
            except Exception as error:
                raise explain_hub_error(error, self._name, self._set, number) from error
            number += 1
            text = text_of(row, self._text_field, f"data set '{self._name}', record {number}")
            if not self._set.lines:
                if text.strip():
                    yield Record(f"{key}:{number}", text, {"record": number, "rows": rows.state_dict()})
                continue
            # As `hub._joined_pages`; the title that ends a page is the first line behind it.
            if page and PAGE_TITLE.fullmatch(text):
                if "".join(page).strip():
                    yield Record(f"{key}:{number - 1}", "".join(page), before)
                page = []
            page.append(text)
        if "".join(page).strip():
            yield Record(f"{key}:{number}", "".join(page), {"record": number, "rows": rows.state_dict()})

    def _load(self) -> Any:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise DataError(f"data set '{self._name}' needs the package `datasets`.", "pip install datasets") from error
        try:
            try_network()
            with without_retry_lines():
                return load_dataset(self._set.repository, self._set.config, split="train", streaming=True)
        except Exception as error:
            raise explain_hub_error(error, self._name, self._set, 0) from error


def _files_of(path: Path) -> list[Path]:
    """The files that `read_path` would read, in the order of their names."""
    if path.is_dir():
        return files_in(path)
    return [path] if kind_of(path) in KNOWN_SUFFIXES else []


def _lines_from(path: Path, place: Place) -> Iterator[Line]:
    return lines_of(path, after=place.get("line", 0), offset=place.get("offset", 0))


def _read_text(path: Path, place: Place) -> Iterator[Record]:
    key, count = path.resolve(), place.get("piece", 0)
    piece: list[str] = []
    size = 0
    line = None
    for line in _lines_from(path, place):
        piece.append(line.text)
        size += len(line.text)
        if size >= PIECE_CHARACTERS:
            count += 1
            text = "".join(piece)
            piece, size = [], 0
            if text.strip():
                yield Record(f"{key}:{count}", text, {"offset": line.end, "line": line.number, "piece": count})
    text = "".join(piece)
    if line is not None and text.strip():
        yield Record(f"{key}:{count + 1}", text, {"offset": line.end, "line": line.number, "piece": count + 1})


def _read_lines(path: Path, place: Place, text_field: str | None) -> Iterator[Record]:
    key = path.resolve()
    for line in _lines_from(path, place):
        if not line.text.strip():
            continue
        where = f"{path}, line {line.number}"
        try:
            record = json.loads(line.text)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error.msg} at column {error.colno}.") from error
        text = text_of(record, text_field, where)
        if text.strip():
            yield Record(f"{key}:{line.number}", text, {"offset": line.end, "line": line.number})


def _read_table(path: Path, place: Place, text_field: str | None) -> Iterator[Record]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow.", "pip install pyarrow") from error
    key, start, number = path.resolve(), place.get("row", 0), 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            wanted = TEXT_FIELDS if text_field is None else (text_field,)
            column = next((name for name in wanted if name in names), None)
            if column is None:
                text_of(dict.fromkeys(names), text_field, f"{path}, row 1")
            group = 0
            while group < table.num_row_groups and number + table.metadata.row_group(group).num_rows <= start:
                number += table.metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, table.num_row_groups))
            for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=[column]):
                skipped = min(max(0, start - number), batch.num_rows)
                number += skipped
                for value in batch.column(0).slice(skipped).to_pylist():
                    number += 1
                    text = text_of({column: value}, column, f"{path}, row {number}")
                    if text.strip():
                        yield Record(f"{key}:{number}", text, {"row": number})
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no whole parquet file (row {number + 1}): {error}") from error
