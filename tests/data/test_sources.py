"""How a source is named, and what is said of names that mean nothing."""

from pathlib import Path

import pytest

from lapcli.data.sources import check_source, describe_source, fingerprint, open_source, parse_mixture
from lapcli.errors import DataError


def test_weights_become_shares():
    parts = parse_mixture("builtin:3, recall:1")
    assert [(part.name, part.share) for part in parts] == [("builtin", 0.75), ("recall", 0.25)]


@pytest.mark.parametrize("source", ["builtin", "builtin:1", "builtin:0.5"])
def test_a_single_source_is_all(source: str):
    assert [(part.name, part.share) for part in parse_mixture(source)] == [("builtin", 1.0)]


def test_an_existing_path_is_taken_as_it_is(tmp_path: Path):
    path = tmp_path / "a,b:2.txt"
    path.write_text("text")
    assert [part.name for part in parse_mixture(str(path))] == [str(path)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no data source"),
        ("builtin:1,", "empty part"),
        ("builtin,recall:1", "builtin has no weight"),
        ("builtin:0,recall:1", r"must be above 0"),
        ("builtin:-1,recall:1", r"must be above 0"),
        ("builtin:nan,recall:1", r"must be above 0"),
        ("builtin:inf,recall:1", r"must be above 0"),
        ("builtin:nan", r"must be above 0"),
        ("builtin:1,builtin:2", "names builtin twice"),
    ],
)
def test_bad_mixtures(source: str, message: str):
    with pytest.raises(DataError, match=message):
        parse_mixture(source)


@pytest.mark.parametrize(
    ("name", "nearest"), [("finweb", "fineweb"), ("bultin", "builtin"), ("wikitxt", "wikitext"), ("re-call", "recall")]
)
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str):
    with pytest.raises(DataError, match=f"Did you mean '{nearest}'"):
        check_source(name)


def test_a_missing_file_gets_its_neighbour(tmp_path: Path):
    (tmp_path / "books.jsonl").write_text("")
    with pytest.raises(DataError, match=r"Did you mean '.*/books\.jsonl'"):
        check_source(str(tmp_path / "boks.jsonl"))


def test_a_missing_file_without_a_slash_is_no_hub_id():
    with pytest.raises(DataError, match="neither a file or folder"):
        check_source("data/none.jsonl")


def test_builtin_has_two_splits():
    assert {d.name for d in open_source("builtin")}.isdisjoint(d.name for d in open_source("builtin", split="heldout"))
    with pytest.raises(DataError, match="splits train and heldout, not 'test'"):
        open_source("builtin", split="test")


def test_builtin_says_its_python():
    import platform

    assert describe_source("builtin") == f"builtin (Python {platform.python_version()}, train)"


def test_a_fingerprint_is_of_local_parts_alone(tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    both = fingerprint(f"{tmp_path}/a.txt:0.5,{tmp_path}/b.txt:0.25,builtin:0.1,fineweb:0.1,recall:0.05")
    assert both.keys() == {f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"}
    (tmp_path / "b.txt").write_text("another")
    now = {f"{tmp_path}/{name}": fingerprint(f"{tmp_path}/{name}")[f"{tmp_path}/{name}"] for name in ("a.txt", "b.txt")}
    assert [name for name in both if both[name] != now[name]] == [f"{tmp_path}/b.txt"]
    assert fingerprint("builtin") == fingerprint("owner/name") == {}
