"""docs/chunks.md shows its lines: the fastest tiles, floors worked out by hand, and nothing that has no line."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SHAPE = {"batch": 2, "time": 64, "key_heads": 1, "value_heads": 2, "key_width": 4, "value_width": 8}


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import chunks_page

    return chunks_page


def row(impl, ms, **more):
    source = {"command": "c", "machine": "m", "date": "d"}
    return {**SHAPE, "impl": impl, "ms": ms, "error": 0.001, **source, **more}


def test_operations_and_bytes_by_hand(pages):
    # A step and head: 2 * 64 * 4 / 2 of pairs, 64 * 64 / 2 of the inverse, 2 * 64 * 8 by U and M, 3 * 4 * 8 by S.
    assert pages.operations(SHAPE) == 2 * (2 * 64 * 2) * (256 + 2048 + 1024 + 96)
    # 2 heads * 4 of q and k, 2 * 2 * 8 of v and o, in bf16; 6 bytes of gates a head.
    assert pages.least_bytes(SHAPE) == 128 * (2 * (8 + 32) + 12)


def test_the_fastest_of_each_maker_is_shown(pages):
    rows = [row("triton", 3.0), row("triton 64 4 2", 2.0), row("triton 128 4 2", None), row("fla", 5.0)]
    rows.append(row("triton", 1.0, passes="forward + backward"))
    assert [found["ms"] for found in pages.fastest(rows)] == [2.0, 5.0]
    lines = pages.table(rows).splitlines()
    assert [line for line in lines if "lapkernels, 64 columns | 2.000" in line]
    assert [line for line in lines if "| fla | 5.000" in line]


def test_the_page_is_what_the_script_writes(pages, tmp_path, monkeypatch):
    page = shutil.copy(ROOT / "docs" / "chunks.md", tmp_path / "chunks.md")
    monkeypatch.setattr(sys, "argv", ["chunks_page.py", str(ROOT / "docs" / "chunks.jsonl"), str(page)])
    pages.main()
    assert Path(page).read_text() == (ROOT / "docs" / "chunks.md").read_text()
    assert (tmp_path / "img" / "chunks-roofline.svg").stat().st_size > 0
    assert all(json.loads(line)["command"] for line in (ROOT / "docs" / "chunks.jsonl").read_text().splitlines())
