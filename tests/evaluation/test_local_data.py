import bz2
import gzip
import lzma
import re

import pytest

from lapcli.errors import DataError
from lapcli.evaluation.local_data import find_hub_copy, find_local, read_documents, wikitext_pages
from lapcli.testing import shared_data

RAW = " \n = First = \n \n Words . \n \n = = Part = = \n \n More , = 3 . \n \n = Second ( film ) = \n \n Other . \n"


def test_pages_are_cut_at_top_headings_and_lose_nothing():
    pages = wikitext_pages(RAW)
    assert [page.strip().split("\n")[0] for page in pages] == ["= First = ", "= Second ( film ) = "]
    assert "\n".join([" ", *pages]) == RAW


def test_text_before_the_first_heading_is_a_page():
    assert wikitext_pages("stray line\n = A = \n x") == ["stray line", " = A = \n x"]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(" = = Part = = ", id="second level"),
        pytest.param(" = = = Part = = = ", id="third level"),
        pytest.param(" a = b = c ", id="formula"),
        pytest.param(" = = ", id="bare"),
        pytest.param(" = ", id="one sign"),
    ],
)
def test_other_lines_start_no_page(line):
    assert len(wikitext_pages(f" = A = \n{line}\n x")) == 1


@pytest.mark.parametrize(
    ("suffix", "opener"),
    [
        pytest.param("", open, id="plain"),
        pytest.param(".xz", lzma.open, id="xz"),
        pytest.param(".gz", gzip.open, id="gz"),
        pytest.param(".bz2", bz2.open, id="bz2"),
    ],
)
def test_compressed_copies_are_found_and_read(tmp_path, suffix, opener):
    path = tmp_path / "wikitext-2" / f"wiki.test.raw{suffix}"
    path.parent.mkdir()
    with opener(path, "wb") as handle:
        handle.write(RAW.encode())
    found = find_local("wikitext", tmp_path)
    assert found is not None
    assert found[0] == path
    assert [record["page"] for record in found[1].read(path)] == wikitext_pages(RAW)


def test_no_copy_is_no_find(tmp_path):
    assert find_local("wikitext", tmp_path) is None
    assert find_local("arc_easy", tmp_path) is None
    assert find_hub_copy("allenai/ai2_arc", tmp_path) is None


@pytest.mark.parametrize("place", ["allenai/ai2_arc", "ai2_arc"])
def test_hub_copies_are_found(tmp_path, place):
    (tmp_path / place / "data").mkdir(parents=True)
    assert find_hub_copy("allenai/ai2_arc", tmp_path) == tmp_path / place


def test_documents_of_text_and_of_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (document,) = read_documents(tmp_path / "a.txt")
    assert document.text == "one\ntwo\n"
    # A line separator inside a string is no end of a line.
    (tmp_path / "b.jsonl").write_text('{"text": "x\u2028y", "id": 1}\n\n{"text": "z"}\n')
    assert [document.text for document in read_documents(tmp_path / "b.jsonl")] == ["x\u2028y", "z"]
    assert [document.name for document in read_documents(tmp_path / "b.jsonl")] == ["b.jsonl:1", "b.jsonl:3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.txt", b"caf\xe9", "not UTF-8", id="latin-1"),
        pytest.param("a.txt", b" \n", "no text", id="blank"),
        pytest.param("a.jsonl", b'{"text": "a"}\n{"text"', "line 2: no JSON", id="broken line"),
        pytest.param(
            "a.jsonl", b'{"body": "a"}\n', r"line 1: no text in the field 'text' \(there is: body\)", id="field"
        ),
        pytest.param("a.jsonl", b"[1]\n", r"line 1: no JSON object \(there is: list\)", id="list"),
        pytest.param("a.jsonl", b"\n", "no line", id="empty"),
        pytest.param("a.txt.xz", b"not xz", "cannot be read", id="not xz"),
        pytest.param("a.txt.gz", gzip.compress(b"x" * 999)[:20], "cannot be read", id="truncated gz"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_documents(tmp_path / name)


def test_lambada_needs_a_last_word(tmp_path):
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b"}\n{"text": "alone"}\n')
    found = find_local("lambada_openai", tmp_path)
    assert found is not None
    with pytest.raises(DataError, match="line 2"):
        found[1].read(found[0])


@pytest.mark.shared
def test_shared_copies_are_complete():
    root = shared_data()
    if root is None:
        pytest.skip("needs the shared data folder: wikitext-2 and eval")
    path, task = find_local("wikitext", root / "data") or pytest.fail("no wikitext")
    pages = [record["page"] for record in task.read(path)]
    # The data set has 62 pages; 241,211 words are what its sources were aligned to, and white space at both ends
    # of a page counts as two more in lm-eval's way of counting.
    assert len(pages) == 62
    assert sum(len(page.split()) for page in pages) == 241211
    assert sum(len(re.split(r"\s+", page)) for page in pages) == 241211 + 2 * 62
    path, task = find_local("lambada_openai", root / "data") or pytest.fail("no lambada")
    assert len(task.read(path)) == 5153
