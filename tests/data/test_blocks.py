"""Blocks hold exactly the documents' tokens in the promised convention, the same ones every time."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lapcli.data import blocks
from lapcli.data.blocks import Separators, separators_of, token_blocks
from lapcli.errors import DataError
from lapcli.reporting import SilentReporter

BOS, EOS = 300, 301


class Bytes:
    """A tokenizer of bytes, with separators as asked for."""

    def __init__(self, bos: int | None = None, eos: int | None = EOS, adds_bos: bool = False):
        self.bos_token_id, self.eos_token_id, self._adds = bos, eos, adds_bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        start = [self.bos_token_id] if self._adds and add_special_tokens else []
        return {"input_ids": start + list(text.encode())}


def make(source: str, tokenizer: Any = None, **sizes: Any) -> blocks.TokenBlocks:
    sizes = {"samples": 4, "seq_len": 16, "seed": 0, **sizes}
    return token_blocks(source, tokenizer or Bytes(), reporter=SilentReporter(), **sizes)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"<document {i:03d}>"}) + "\n" for i in range(200)))
    return path


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        pytest.param(Bytes(), Separators((), (EOS,)), id="eos-only"),
        pytest.param(Bytes(BOS, EOS, adds_bos=True), Separators((BOS,), (EOS,)), id="both"),
        pytest.param(Bytes(BOS, EOS), Separators((), (EOS,)), id="bos-not-added"),
        pytest.param(Bytes(EOS, EOS, adds_bos=True), Separators((EOS,), ()), id="one-token-for-both"),
        pytest.param(Bytes(EOS, EOS), Separators((), (EOS,)), id="one-token-not-added"),
        pytest.param(Bytes(BOS, None), Separators((BOS,), ()), id="no-eos"),
        pytest.param(Bytes(None, None), Separators((), ()), id="none"),
    ],
)
def test_separators(tokenizer: Bytes, expected: Separators):
    assert separators_of(tokenizer) == expected


def test_blocks_are_the_documents_in_a_row(lines: Path):
    made = make(str(lines), Bytes(BOS, EOS, adds_bos=True), samples=200, seq_len=16)
    # Each document has 14 bytes, BOS and EOS, so that here blocks and documents coincide.
    assert (made.ids[:, 0] == BOS).all()
    assert (made.ids[:, -1] == EOS).all()
    texts = [bytes(row[1:-1].tolist()).decode() for row in made.ids]
    assert sorted(texts) == [f"<document {i:03d}>" for i in range(200)]
    assert texts != sorted(texts)
    assert made.ids.dtype == torch.int64


def test_no_token_is_lost_between_blocks(lines: Path):
    made = make(str(lines), samples=300, seq_len=10)
    assert made.tokens == 3000
    joined = bytes(i if i < 256 else ord("|") for i in made.ids.flatten().tolist()).decode()
    assert joined.count("|") == 200
    assert set(joined.split("|")) == {f"<document {i:03d}>" for i in range(200)} | {""}


def test_the_same_seed_gives_the_same_digest(lines: Path):
    first, again, other = (make(str(lines), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.ids, again.ids)
    assert first.digest == again.digest
    assert other.digest != first.digest


def test_fewer_samples_are_the_first_of_more(lines: Path):
    assert torch.equal(make(str(lines), samples=3).ids, make(str(lines), samples=9).ids[:3])


def test_digest_knows_the_shape(lines: Path):
    wide, narrow = make(str(lines), samples=2, seq_len=16), make(str(lines), samples=4, seq_len=8)
    assert torch.equal(wide.ids.flatten(), narrow.ids.flatten())
    assert wide.digest != narrow.digest


def test_long_documents_are_taken_in_pieces(tmp_path: Path):
    path = tmp_path / "two.jsonl"
    letters = ["a", "b"]
    path.write_text("".join(json.dumps({"text": f"{letter * 9} " * 5000}) + "\n" for letter in letters))
    made = make(str(path), Bytes(BOS, EOS, adds_bos=True), samples=4, seq_len=25_001)
    ids = made.ids.flatten().tolist()
    assert ids.count(BOS) == ids.count(EOS) == 2
    assert ids.count(ord("a")) == ids.count(ord("b")) == 45_000
    words = bytes(i if i < 256 else ord(" ") for i in ids).split()
    assert {bytes(word) for word in words} == {b"a" * 9, b"b" * 9}, "no word is torn by a cut"


def test_mixture_takes_its_shares_evenly(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name * 50}\n" * 200)
    made = make(f"{tmp_path}/a.txt:3,{tmp_path}/b.txt:1", samples=40, seq_len=20)
    of_b = [ord("b") in row.tolist() for row in made.ids]
    assert sum(of_b) == 10
    assert all(sum(of_b[i : i + 4]) == 1 for i in range(0, 40, 4))


def test_recall_and_builtin_need_no_network(monkeypatch: pytest.MonkeyPatch):
    import socket

    def refuse(*_: Any) -> None:
        raise AssertionError("a socket was asked for")

    monkeypatch.setattr(socket, "socket", refuse)
    made = make("builtin:0.5,recall:0.5", samples=8, seq_len=64)
    assert made.description.startswith("0.5 builtin (Python 3.")


def test_streams_are_read_no_further_than_needed(monkeypatch: pytest.MonkeyPatch):
    read = itertools.count()

    def endless(*_: Any, **__: Any):
        for number in read:
            yield blocks.Document(f"n:{number}", f"text number {number}")

    monkeypatch.setattr(blocks, "open_source", endless)
    make("recall", samples=10, seq_len=16)
    assert next(read) < blocks.BUFFER_PIECES + 40


def test_progress_is_told(lines: Path):
    class Counting(SilentReporter):
        advanced = 0

        def task(self, description: str, total: float | None = None, unit: str = ""):
            assert total == 4
            return super().task(description, total, unit)

    made = token_blocks(str(lines), Bytes(), samples=4, seq_len=8, seed=0, reporter=Counting())
    assert made.ids.shape == (4, 8)


@pytest.mark.parametrize(("sizes", "message"), [({"samples": 0}, "--samples is 0"), ({"seq_len": 0}, "--seq-len is 0")])
def test_sizes_below_one_are_refused_before_reading(sizes: dict[str, int], message: str):
    with pytest.raises(DataError, match=message):
        make("builtin", **sizes)


def test_too_little_text_says_what_there_is(lines: Path):
    # 200 documents of 14 bytes and EOS.
    with pytest.raises(DataError, match=r"holds 3000 tokens, 187 samples of 16; 188 samples are asked"):
        make(str(lines), samples=188)
    with pytest.raises(
        DataError, match=r"holds 3000 tokens, 0 samples of 4000; 1 samples.*(?s:.)Lower --seq-len to 3000"
    ):
        make(str(lines), samples=1, seq_len=4000)


def test_too_little_of_a_mixture_names_the_part(tmp_path: Path, lines: Path):
    small = tmp_path / "small.txt"
    small.write_text("tiny")
    with pytest.raises(DataError, match=r"small\.txt' holds 5 tokens.*its share of"):
        make(f"{lines}:1,{small}:1")


def test_an_unknown_part_is_refused_before_any_reading(lines: Path):
    with pytest.raises(DataError, match="Did you mean 'recall'"):
        make(f"{lines}:1,recal:1", samples=10**9)
