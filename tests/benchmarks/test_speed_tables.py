import importlib.util
import json
import sys
from pathlib import Path

import pytest

from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapcli.benchmarks.speed.tables import (
    crossings,
    generation_crossings,
    notes,
    prefill_crossings,
    share_crossings,
    tables,
)
from lapcli.errors import ArtifactError

ROOT = Path(__file__).resolve().parents[2]


def row(what, width, way, seconds, *, batch=64, tokens=512, floor=1e-3, status="measured", model="gdn", **more):
    cell = Cell(what, model, 1 - width / 256, way, batch, tokens, 6, 6, width, 512)
    timed = {} if seconds is None else {"seconds": seconds, "floor_seconds": floor}
    return Row(cell, status, **timed, more=more)


DECODE = [
    row("decode", 256, "lapcli", 3.0e-3, floor=2.5e-3),
    row("decode", 256, "fla graph", 5.0e-3, floor=2.5e-3),
    row("decode", 128, "lapcli", 2.0e-3, floor=1.6e-3),
    row("decode", 128, "fla graph", 4.0e-3, floor=1.6e-3),
    row("decode", 64, "lapcli", None, status="out of memory"),
    row("decode", 64, "fla graph", 3.0e-3, floor=1.2e-3),
    row("decode", 256, "library", None, status="not here"),
]


GENERATED = [row("generate", 128, way, seconds, batch=1) for way, seconds in (("lapcli", 1e-3), ("library", 2e-2))]


def test_ways_stand_side_by_side_beside_the_floor_and_the_unpruned_baseline():
    (table,) = tables(DECODE)
    assert table.columns == [
        "model, K", "batch", "tokens", "floor, ms", "lapcli, ms", "fla graph, ms",
        "lapcli / floor", "fla graph / lapcli", "unpruned fla graph / lapcli",
    ]  # fmt: skip
    assert table.rows == [
        ["gdn, 256", "64", "512", "2.5", "3", "5", "1.20", "1.67", "1.67"],
        ["gdn, 128", "64", "512", "1.6", "2", "4", "1.25", "2.00", "2.50"],
        ["gdn, 64", "64", "512", "1.2", "out of memory", "3", "-", "-", "-"],
    ]
    assert table.markdown()[0].startswith("| model, K | batch |")


def test_memory_is_compared_with_the_base():
    found = [
        row("memory", 256, "lapcli", 0.02, batch=1000, tokens_per_second=5e4, fit=1000, memory=80 * 2**30),
        row("memory", 128, "lapcli", 0.02, batch=1990, tokens_per_second=9e4, fit=1990, memory=80 * 2**30),
    ]
    (table,) = tables(found)
    assert table.rows[1][1:4] == ["80", "1990", "1.99"]
    assert table.rows[1][-2:] == ["90000", "1.80"]


def test_what_a_sequence_keeps_and_where_a_converted_model_gets_faster():
    rows = [
        row("decode", 256, "lapcli", seconds, tokens=tokens, model=model, key_value_bytes=kv << 20, state_bytes=s << 20)
        for model, tokens, seconds, kv, s in (
            ("llama", 1024, 1e-3, 40, 0), ("llama", 4096, 4e-3, 160, 0),
            ("llama, 50 % states", 1024, 2e-3, 20, 10), ("llama, 50 % states", 4096, 3e-3, 80, 10),
        )
    ]  # fmt: skip
    (kept,) = [table for table in tables(rows) if table.title == "What one sequence keeps, MiB"]
    assert kept.rows == [
        ["llama", "1024", "40", "0", "40", "1.00"],
        ["llama", "4096", "160", "0", "160", "1.00"],
        ["llama, 50 % states", "1024", "20", "10", "30", "0.75"],
        ["llama, 50 % states", "4096", "80", "10", "90", "0.56"],
    ]
    # From 1 ms too slow to 1 ms faster: half way.
    assert share_crossings(rows) == ["decode, lapcli, batch 64: llama, 50 % states is faster from about 2560 tokens on"]
    assert share_crossings(DECODE) == []


def test_notes_say_each_thing_once():
    assert notes([DECODE[-1], DECODE[-1]]) == ["library: "]
    (said,) = notes([row("decode", 64, "fla", None, status="failed")])
    assert said.startswith("decode, gdn, K 64, batch 64, fla: failed")


def test_crossings_are_straight_between_places():
    assert crossings([0, 10, 20], [1, 1, 1], [0, 2, 3], ("a", "b")) == [(5.0, "a")]
    assert crossings([0, 10], [2, 0], [1, 1], ("a", "b")) == [(5.0, "a")]
    assert crossings([0, 10], [1, 1], [2, 3], ("a", "b")) == []


def test_where_a_pruned_prompt_gets_faster():
    rows = [
        row("prefill", width, "fla", seconds, tokens=tokens)
        for width, by_tokens in ((256, {512: 2.0, 2048: 4.0}), (128, {512: 3.0, 2048: 3.0}))
        for tokens, seconds in by_tokens.items()
    ]
    assert prefill_crossings(rows) == ["prefill, gdn, fla, batch 64: K 128 is faster from about 1280 tokens on"]


def test_after_how_many_tokens_a_slower_prompt_has_paid():
    rows = [
        row("prefill", 256, "lapcli", 1.0, tokens=2048),
        row("prefill", 128, "lapcli", 1.5, tokens=2048),
        row("decode", 256, "lapcli", 0.010),
        row("decode", 128, "lapcli", 0.005),
    ]
    assert generation_crossings(rows) == [
        "gdn, batch 64, prompts of 2048: lapcli, K 128 overtakes lapcli, K 256 after 100 generated tokens"
    ]


@pytest.fixture
def measured(tmp_path):
    results = Results(
        "lapcli bench decode",
        {"device": "NVIDIA H200", "date": "2026-11-30", "versions": {"torch": "2.11.0"}, "copy_bytes": 4.26e12,
         "product_flops": 7.8e14},
        path=tmp_path / "decode.json",
    )  # fmt: skip
    for each in (*DECODE, *GENERATED):
        results.add(each)
    return tmp_path


@pytest.fixture
def write_page(monkeypatch):
    """The script's `main`."""
    spec = importlib.util.spec_from_file_location("performance", ROOT / "scripts" / "performance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their own module up.
    monkeypatch.setitem(sys.modules, "performance", module)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["performance.py", *map(str, arguments)])
        module.main()

    return run


def test_the_page_holds_what_was_measured_and_nothing_else(measured, write_page):
    page, remarks = measured / "performance.md", measured / "remarks.md"
    remarks.write_text("The convolution.\n")
    write_page(measured / "decode.json", "--output", page, "--notes", remarks)
    text = page.read_text()
    for said in (
        "## `lapcli bench decode`", "NVIDIA H200, 2026-11-30; torch 2.11.0", "copies 4.26 TB/s", "The convolution.",
        "| gdn, 128 | 64 | 512 | 1.6 | 2 | 4 | 1.25 | 2.00 | 2.50 |",
        "| decode, batch 64, half the state: times unpruned fla with a graph | >= 2.2 | 2.50 | yes |",
        "| decode, batch 64, half the state: of the floor | <= 1.25 | 1.25 | yes |",
        "times the library's `generate` of the same model | >= 15 | 20.00 | yes |",
    ):  # fmt: skip
        assert said in text, said
    # Of what was not measured there is no line.
    assert "prefill" not in text
    assert "a quarter of the state" not in text


def test_a_file_that_is_none_is_refused(measured, write_page):
    (measured / "other.json").write_text(json.dumps({"kind": "sweep"}))
    with pytest.raises(ArtifactError, match="holds no results"):
        write_page(measured / "other.json", "--output", measured / "page.md")
    assert not (measured / "page.md").exists()
