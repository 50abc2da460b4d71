"""The demo model's training data: nothing held out in it, rows and flags as the loss expects them.

The module under test belongs to a script, so it is found beside the repository's packages.
"""

import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lapcli
from lapcli.data.builtin import heldout_builtin_text
from lapcli.data.overlap import HeldOutIndex, paragraphs_of
from lapcli.testing import shared_data

sys.path.append(str(Path(lapcli.__file__).resolve().parents[1] / "scripts"))

from demo_gdn import corpus, measure, recall_rows, sampling
from demo_gdn.vocabulary import BOUNDARY, load_tokenizer_json

PROSE = "The mill stood near the river in 1823. Nobody knew who had built it, or why it was there at all. "


def write_xz(path: Path, rows: list[dict[str, str]]) -> None:
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def held() -> list[str]:
    texts = [document.text for document in heldout_builtin_text()]
    return [p for text in texts for p in paragraphs_of(text) if len(p) > 60][:200]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, held: list[str]) -> tuple[corpus.Corpus, dict[str, list[str]]]:
    """A small corpus whose every source was salted with held-out paragraphs, and the texts behind its streams."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def salted(source: str) -> list[dict[str, str]]:
        rows = []
        for number in range(60):
            own = [f"{source} {number} {i}: {PROSE * 3}" for i in range(3)]
            own.insert(rng.randrange(4), rng.choice(held).upper().replace("\n", "\n      "))
            rows.append({"title": f"{source} {number}", "text": "\n\n".join(own)})
        return rows

    for name, file in corpus.FILES.items():
        write_xz(folder / file, salted(name))
    corpus.export_builtin(folder / "builtin.jsonl")
    built = corpus.build_corpus(
        folder, folder / "builtin.jsonl", vocab_size=600, workers=1, seed=0, limit=200_000, say=lambda _: None
    )
    tokenizer = load_tokenizer_json(built.tokenizer_json)
    texts = {
        name: tokenizer.decode(stream.tolist(), skip_special_tokens=False).split(BOUNDARY)
        for name, stream in built.streams.items()
    }
    return built, texts


@pytest.mark.parametrize("source", corpus.TRAINED)
def test_no_held_out_paragraph_is_trained_on(built: Any, source: str):
    index = HeldOutIndex(document.text for document in heldout_builtin_text())
    paragraphs = [p for text in built[1][source] for p in paragraphs_of(text)]
    assert len(paragraphs) > 50
    assert not [p for p in paragraphs if index.occurs(p)]


def test_what_was_dropped_is_counted(built: Any):
    dropped = built[0].report["paragraphs_dropped_for_heldout_builtin"]
    assert all(dropped[name] >= 55 for name in ("books", "techdocs", "openstax", "wiki"))
    assert dropped["builtin"] == 0, "its train part is clean already"


def test_streams_round_trip_and_begin_and_end_with_the_boundary(built: Any):
    texts = built[1]["books_valid"]
    assert texts[0] == texts[-1] == ""
    assert texts[1].count(PROSE) == 9


def test_digits_stand_alone(built: Any):
    tokenizer = load_tokenizer_json(built[0].tokenizer_json)
    assert tokenizer.encode("in 1823, 45").tokens[-6:] == ["2", "3", ",", "Ġ", "4", "5"]


@pytest.fixture(scope="module")
def rows(built: Any):
    corpus_, _ = built
    maker = recall_rows.RowMaker(corpus_.tokenizer_json, corpus_.haystack, corpus_.streams["books"], 512, 1)
    try:
        maker.start(1, seed=0)
        yield [maker.stage(stage) for stage in range(len(recall_rows.STAGES))]
    finally:
        maker.close()


@pytest.mark.parametrize("stage", range(3))
def test_flagged_tokens_are_values_that_the_document_states_before(built: Any, rows: Any, stage: int):
    tokenizer = load_tokenizer_json(built[0].tokenizer_json)
    boundary = tokenizer.token_to_id(BOUNDARY)
    assert rows[stage].shape == (256 * recall_rows.STAGES[stage].rows, 513)
    assert 0.3 < (rows[stage][:, 0] == boundary).mean() < 0.7
    checked = 0
    for row in rows[stage][:40].tolist():
        document: list[int] = []
        answer: list[int] = []
        for token in [*row, boundary]:
            if token >= recall_rows.FLAG:
                answer.append(token - recall_rows.FLAG)
                continue
            if answer:
                value = tokenizer.decode(answer).strip()
                assert value in tokenizer.decode(document)
                document += answer
                answer, checked = [], checked + 1
            document = [] if token == boundary else [*document, token]
    assert checked >= 40


@pytest.mark.parametrize("noise", [False, True], ids=["books", "noise"])
def test_single_needle_rows_fill_their_length_and_ask_for_a_blank_and_seven_digits(built: Any, noise: bool):
    made, mean = recall_rows.single_needle_rows(
        built[0].tokenizer_json, [PROSE * 50], length=512, count=8, noise=noise, seed=1
    )
    assert mean > 0.9 * 512
    assert ((made >= recall_rows.FLAG).sum(1) == 8).all()


def test_sampler_gives_rows_that_lie_in_their_region():
    text = {name: sampling.Region(1000 * i, 1000) for i, name in enumerate(corpus.TRAINED)}
    recall = [sampling.Region(5000 + 330 * stage, 330) for stage in range(3)]
    sampler = sampling.Sampler(text, recall, batch=16, length=32, seed=0)
    for progress in (0.0, 0.3, 1.0):
        starts = [int(s) for _ in range(30) for s in sampler.step(progress)]
        stage = next(i for i, end in enumerate(sampling.STAGE_ENDS) if progress <= end)
        of_recall = [s for s in starts if s >= 5000]
        assert all((s - recall[stage].start) % 33 == 0 for s in of_recall)
        assert all(recall[stage].start <= s < recall[stage].start + 330 for s in of_recall)
        assert all(s % 1000 + 33 <= 1000 for s in starts if s < 5000)
        moments, shares = zip(*sampling.RECALL_SHARE, strict=True)
        wanted = float(np.interp(progress, moments, shares))
        # The expected count is drawn by one uniform number a step.
        assert abs(len(of_recall) / len(starts) - wanted) < 0.03


class Parrot:
    """A network that always predicts the token before."""

    class model:
        class model:
            class embeddings:
                weight = torch.eye(50)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, 50).float() * 20


def test_measures_on_a_network_of_known_answers():
    flag = recall_rows.FLAG
    good, bad = [3, 7, flag + 7, flag + 7], [3, 7, flag + 7, flag + 8]
    stream = np.full(129, 5, dtype=np.uint16)
    measurement = measure.Measurement(
        {"same": stream}, {"rows": np.asarray([good, bad], dtype=np.int16)},
        length=32, device=torch.device("cpu"),
    )  # fmt: skip
    results = measurement(Parrot())  # pyright: ignore[reportArgumentType]
    assert results["same_ppl"] == pytest.approx(1.0, abs=1e-4)
    assert results["rows_exact"] == 0.5
    assert results["rows_tokens"] == 0.75


@pytest.mark.shared
def test_python_manual_of_the_shared_documentation_is_cleaned(held: list[str]):
    shared = shared_data()
    if shared is None:
        pytest.skip("the larger data folder is not beside the repository")
    index = HeldOutIndex(document.text for document in heldout_builtin_text())
    with lzma.open(shared / "data" / corpus.FILES["techdocs"], "rt", encoding="utf-8") as file:
        texts = [row["text"] for row in map(json.loads, file) if row["package"] == "python3.11-doc"]
    cleaned = [index.clean(text) for text in texts]
    assert sum(result.dropped for result in cleaned) > 50
    assert not [p for result in cleaned for p in paragraphs_of(result.text) if index.occurs(p)]
