"""Local files of every kind, and what is said of bad ones."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from lapcli.data.files import PIECE_CHARACTERS, digest_path, read_path
from lapcli.errors import DataError

TEXTS = ["one text", "zwei Texte, größer", "three\nlines\nhere"]


def texts_of(path: Path, field: str | None = None) -> list[str]:
    return [document.text for document in read_path(path, field)]


def jsonl(field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(TEXTS)).encode()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)],
    ids=["plain", "gz", "xz", "bz2"],
)
def test_jsonl_plain_and_compressed(tmp_path: Path, suffix: str, pack):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(jsonl()))
    assert texts_of(path) == TEXTS
    assert [document.name for document in read_path(path)] == [f"{path}:{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize("field", ["text", "content"])
def test_text_field_is_found(tmp_path: Path, field: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(field))
    assert texts_of(path) == TEXTS


def test_text_field_can_be_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl("body"))
    assert texts_of(path, "body") == TEXTS


def test_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": [0, 1, 2], "content": TEXTS}), path)
    assert texts_of(path) == TEXTS


def test_text_file_comes_in_pieces_that_join_to_the_whole(tmp_path: Path):
    path = tmp_path / "a.txt"
    text = "".join(f"Line {i} of a long text.\n" for i in range(3000))
    path.write_text(text)
    pieces = texts_of(path)
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert all(PIECE_CHARACTERS <= len(piece) < PIECE_CHARACTERS + 30 for piece in pieces[:-1])


def test_reading_is_lazy(tmp_path: Path):
    """Damage further down is met only when reading gets there."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl() + b"not json\n")
    documents = read_path(path)
    assert [next(documents).text for _ in range(3)] == TEXTS
    with pytest.raises(DataError, match="line 4 is not JSON"):
        next(documents)


def test_folder_in_order_of_names_without_hidden_or_unknown_files(tmp_path: Path):
    for name, text in (("b.txt", "second"), ("a.md", "first"), (".c.txt", "hidden"), ("d.bin", "unknown")):
        (tmp_path / name).write_text(text)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "e.txt").write_text("third")
    assert texts_of(tmp_path) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.txt", b"good\nbad \xff\n", "line 2 is not UTF-8: byte 0xff at 4", id="text-not-utf8"),
        pytest.param("a.jsonl", b'{"text": "g"}\n{"text": "\xe9"}\n', "line 2 is not UTF-8", id="jsonl-not-utf8"),
        pytest.param(
            "a.jsonl",
            b'{"text": "g"}\n{"body": "x", "id": 1}\n',
            "line 2 has no field 'text' or 'content'; its fields are body, id",
            id="no-field",
        ),
        pytest.param("a.jsonl", b'{"text": null}\n', "line 1: field 'text' holds NoneType", id="null"),
        pytest.param("a.jsonl", b'["text"]\n', "line 1 is a list", id="not-an-object"),
        pytest.param("a.jsonl", b'{"text": \n', "line 1 is not JSON", id="not-json"),
        pytest.param("a.jsonl.gz", gzip.compress(jsonl() * 50)[:-20], "damaged or truncated", id="truncated-gz"),
        pytest.param("a.jsonl.xz", lzma.compress(jsonl() * 500)[:-60], "damaged or truncated", id="truncated-xz"),
        pytest.param("a.jsonl.xz", b"no xz at all", "damaged or truncated", id="foreign-xz"),
        pytest.param("a.parquet", b"PAR1 not really", "no whole parquet file", id="foreign-parquet"),
        pytest.param("a.csv", b"a,b\n", "cannot be read as text", id="unknown-kind"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, name: str, content: bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts_of(path)
    assert str(path) in str(caught.value)


def test_parquet_without_the_field_lists_its_columns(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": [0], "body": ["x"]}), path)
    with pytest.raises(DataError, match="no field 'text' or 'content'; its fields are id, body"):
        texts_of(path)


def test_folder_without_text_says_what_it_holds(tmp_path: Path):
    (tmp_path / "image.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"no text, JSONL or parquet file; it holds image\.png"):
        texts_of(tmp_path)


def changed(path: Path, at: int) -> None:
    os.utime(path, ns=(at, at))


def test_a_digest_is_of_the_contents(tmp_path: Path):
    file = tmp_path / "t.txt"
    file.write_text("one")
    changed(file, 1)
    first = digest_path(file)
    changed(file, 2)
    assert digest_path(file) == first
    file.write_text("two")  # of the same length
    changed(file, 3)
    assert digest_path(file) != first


def test_a_folders_digest_is_of_what_would_be_read(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    first = digest_path(tmp_path)
    (tmp_path / "notes.pdf").write_text("no text")
    (tmp_path / ".hidden.txt").write_text("nor this")
    assert digest_path(tmp_path) == first
    (tmp_path / "b.txt").write_text("two")
    assert digest_path(tmp_path) != first


def test_of_very_much_text_sizes_and_times_are_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lapcli.data.files.DIGESTED_UP_TO", 5)
    monkeypatch.setattr("lapcli.data.files.digest_file", lambda _path: pytest.fail("read"))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one")
        changed(tmp_path / name, 1)
    first = digest_path(tmp_path)
    assert digest_path(tmp_path) == first
    changed(tmp_path / "b.txt", 2)
    assert digest_path(tmp_path) != first
