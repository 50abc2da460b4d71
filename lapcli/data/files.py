"""Documents from local files: text, JSONL and parquet, plain or compressed, one file or a folder of them."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from lapcli.artifacts.digest import digest_document, digest_file
from lapcli.data.documents import Document
from lapcli.errors import DataError

TEXT_FIELDS = ("text", "content")
"""Fields that hold the text, where none is named; the first that a record has is taken."""

PIECE_CHARACTERS = 16_384
"""A text file is read in pieces of about this many characters, cut at line ends."""

DIGESTED_UP_TO = 1 << 30
"""Bytes of a source that are read to name it; beyond, its files go by name, size and time of change."""

_TEXT = (".txt", ".text", ".md", ".rst", ".raw")
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet",)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
KNOWN_SUFFIXES = (*_TEXT, *_LINES, *_TABLES)


def read_path(path: Path, text_field: str | None = None) -> Iterator[Document]:
    """The documents of a file, or of all files of known kinds in a folder, in the order of their names.

    Reads as it goes: memory does not grow with the size of the file.

    Args:
        path: a text file (in pieces, blank ones left out), a JSONL file (one document a line) or a parquet file
            (one a row), each with `.gz`, `.xz` or `.bz2` after its suffix if compressed (parquet is not), or a
            folder of such files.
        text_field: the field of a record that holds its text; `None` takes `text`, else `content`.

    Yields:
        Documents named `FILE` and the number of the line, row or piece.

    Raises:
        DataError: nothing of a known kind there; bytes that are not UTF-8; a line that is no JSON object; a record
            without the field; a truncated or damaged file. The message names file and line.
    """
    if path.is_dir():
        yield from _read_folder(path, text_field)
    elif kind_of(path) in _TEXT:
        yield from _read_text(path)
    elif kind_of(path) in _LINES:
        yield from _read_lines(path, text_field)
    elif kind_of(path) in _TABLES:
        yield from _read_table(path, text_field)
    else:
        raise DataError(
            f"{path}: a file of this kind cannot be read as text; kinds known are {', '.join(KNOWN_SUFFIXES)}.",
            "One JSON document with an array has to become JSONL first: one object a line.",
        )


def digest_path(path: Path) -> str:
    """Name what `read_path` would find: a file, or the files of known kinds in a folder.

    Up to 1 GiB in all, that is the contents; of more, the size and the time of the last change of each file, since
    reading them would take as long as the work that is to be saved.

    Raises:
        DataError: a file cannot be read.
    """
    files = files_in(path) if path.is_dir() else [path]
    try:
        facts = {file: file.stat() for file in files}
        whole = sum(fact.st_size for fact in facts.values()) <= DIGESTED_UP_TO
        named = {
            file.relative_to(path).as_posix(): _content(file, fact.st_size, fact.st_mtime_ns)
            if whole
            else f"{fact.st_size} {fact.st_mtime_ns}"
            for file, fact in facts.items()
        }
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}.") from error
    return digest_document(named)


@lru_cache
def _content(file: Path, _size: int, _changed: int) -> str:
    """The digest of a file; one command asks for it several times."""
    return digest_file(file)


def text_of(record: object, text_field: str | None, where: str) -> str:
    """The text of one record.

    Args:
        record: what was read.
        text_field: as in `read_path`.
        where: names the record in errors.

    Raises:
        DataError: not an object, no such field, or a field that holds no string.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where} is a {type(record).__name__}, not an object with a text field.")
    fields = cast(dict[str, Any], record)
    wanted = TEXT_FIELDS if text_field is None else (text_field,)
    name = next((name for name in wanted if name in fields), None)
    if name is None:
        names = " or ".join(f"'{field}'" for field in wanted)
        raise DataError(
            f"{where} has no field {names}; its fields are {', '.join(map(str, fields)) or 'none'}.",
            "Name the field that holds the text.",
        )
    if not isinstance(fields[name], str):
        raise DataError(f"{where}: field '{name}' holds {type(fields[name]).__name__}, not text.")
    return fields[name]


def kind_of(path: Path) -> str:
    """The suffix that says what a file is, whatever it is compressed with."""
    stem = path.name.lower()
    for suffix in _OPENERS:
        stem = stem.removesuffix(suffix)
    return Path(stem).suffix


def _open(path: Path) -> BinaryIO:
    opener = _OPENERS.get(path.suffix.lower(), open)
    try:
        return cast(BinaryIO, opener(path, "rb"))
    except OSError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror or error}.") from error


class Line(NamedTuple):
    """A line of a text file.

    Attributes:
        number: from 1.
        text: with its end.
        end: offset of the byte after it, in the text as it is when it is not compressed.
    """

    number: int
    text: str
    end: int


def lines_of(path: Path, *, after: int = 0, offset: int = 0) -> Iterator[Line]:
    """Lines, decoded one by one so that an error can name its line.

    Args:
        path: the file, maybe compressed.
        after: how many lines come before the first that is wanted.
        offset: where they end.

    Raises:
        DataError: a line is not UTF-8, or the file is damaged.
    """
    with _open(path) as file:
        number = after
        try:
            if offset:  # pipes cannot seek
                file.seek(offset)
            for line in file:
                number += 1
                offset += len(line)
                yield Line(number, line.decode("utf-8-sig" if number == 1 else "utf-8"), offset)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}.",
                "Convert the file first, for example: iconv -f latin1 -t utf-8.",
            ) from error
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"{path} is damaged or truncated after line {number}: {error}.") from error


def files_in(folder: Path) -> list[Path]:
    """The files of known kinds, but hidden ones, in the order of their names.

    Raises:
        DataError: one of them may not be looked at.
    """
    try:
        return sorted(
            file
            for file in folder.rglob("*")
            if kind_of(file) in KNOWN_SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
            and file.is_file()
        )
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be read: {error.strerror}.") from error


def _read_folder(path: Path, text_field: str | None) -> Iterator[Document]:
    files = files_in(path)
    if not files:
        there = sorted(entry.name for entry in path.iterdir())[:5]
        raise DataError(
            f"folder {path} holds no text, JSONL or parquet file; it holds {', '.join(there) or 'nothing'}."
        )
    for file in files:
        yield from read_path(file, text_field)


def _read_text(path: Path) -> Iterator[Document]:
    piece: list[str] = []
    size = count = 0
    for line in lines_of(path):
        piece.append(line.text)
        size += len(line.text)
        if size >= PIECE_CHARACTERS:
            count += 1
            yield Document(f"{path}:{count}", "".join(piece))
            piece, size = [], 0
    text = "".join(piece)
    if text.strip():
        yield Document(f"{path}:{count + 1}", text)


def _read_lines(path: Path, text_field: str | None) -> Iterator[Document]:
    for number, line, _end in lines_of(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error.msg} at column {error.colno}.") from error
        text = text_of(record, text_field, where)
        if text.strip():
            yield Document(f"{path}:{number}", text)


def _read_table(path: Path, text_field: str | None) -> Iterator[Document]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow.", "pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            wanted = TEXT_FIELDS if text_field is None else (text_field,)
            column = next((name for name in wanted if name in names), None)
            if column is None:
                text_of(dict.fromkeys(names), text_field, f"{path}, row 1")
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = text_of({column: value}, column, f"{path}, row {number}")
                    if text.strip():
                        yield Document(f"{path}:{number}", text)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no whole parquet file (row {number + 1}): {error}") from error
