"""Recall documents can be answered from what they state, and follow from their seed."""

import itertools
import random
from collections import Counter

import pytest

from lapcli.data.recall import (
    MIN_CHARACTERS,
    RULER_NOISE,
    Haystack,
    Needle,
    RecallMix,
    random_key,
    random_number,
    recall_documents,
    ruler_single,
    split_sentences,
)
from lapcli.errors import DataError

PROSE = [f"The {noun} stood near the river in {year}. Nobody knew why it was there, or who had built it. " * 3
         for noun, year in (("mill", 1823), ("tower", 1790), ("church", 1911))]  # fmt: skip


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack(PROSE)


LAYOUTS = {
    "list": RecallMix(list=1, text=0, ruler=0),
    "text": RecallMix(list=0, text=1, ruler=0),
    "ruler": RecallMix(list=0, text=0, ruler=1),
    "single": RecallMix(list=0, text=0, ruler=1, single=1),
    "noise": RecallMix(list=0, text=1, ruler=1, noise=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_answer_was_stated_before_it_is_asked_for(haystack: Haystack, layout: str):
    for document in itertools.islice(recall_documents(haystack, seed=3, size=1500, mix=LAYOUTS[layout]), 60):
        assert document.answers
        for start, end in document.answers:
            value = document.text[start:end]
            assert value.strip() == value != ""
            assert value in document.text[:start]
        assert list(document.answers) == sorted(document.answers)


def test_documents_fill_their_size_but_never_exceed_it(haystack: Haystack):
    mix = RecallMix(list=0, text=1, ruler=1)
    sizes = [len(d.text) for d in itertools.islice(recall_documents(haystack, seed=0, size=3000, mix=mix), 200)]
    assert max(sizes) <= 3000
    assert sorted(sizes)[100] > 2700


def test_same_seed_same_documents(haystack: Haystack):
    def some(seed: int) -> list[str]:
        return [d.text for d in itertools.islice(recall_documents(haystack, seed=seed), 20)]

    assert some(1) == some(1)
    assert not set(some(1)) & set(some(2))


def test_keys_values_and_wordings_vary(haystack: Haystack):
    documents = list(itertools.islice(recall_documents(haystack, seed=0), 300))
    values = [d.text[a:b] for d in documents for a, b in d.answers]
    lengths = Counter(len(v) for v in values if v.isdigit())
    assert set(range(1, 11)) <= set(lengths)
    assert lengths[7] > sum(lengths.values()) / 3
    assert any(v.isalpha() for v in values)
    assert any(v.count("-") == 4 and len(v) == 36 for v in values)


def test_ruler_form_is_to_the_letter():
    sentences = ["First sentence.", "Second sentence."]
    document = ruler_single(sentences, Needle("long-context", "9394710", "number"), 0.5)
    assert document.text == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
        "First sentence. One of the special magic numbers for long-context is: 9394710. Second sentence.\n"
        "What is the special magic number for long-context mentioned in the provided text? "
        "The special magic number for long-context mentioned in the provided text is 9394710."
    )
    ((start, end),) = document.answers
    assert document.text[start:end] == "9394710"


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_depth_places_the_needle(depth: float, place: int):
    sentences = [f"Sentence {i}." for i in range(4)]
    text = ruler_single(sentences, Needle("k", "v", "word"), depth, joiner="\n").text
    assert text.split("\n")[1 + place].startswith("One of the special magic words for k is: v.")


def test_noise_is_the_published_group(haystack: Haystack):
    document = next(recall_documents(haystack, seed=0, size=1500, mix=LAYOUTS["noise"]))
    assert "\n".join(RULER_NOISE) in document.text


def test_default_haystack_is_builtin_train():
    documents = itertools.islice(recall_documents(seed=0, mix=LAYOUTS["single"]), 3)
    assert all("special magic" in document.text for document in documents)


@pytest.mark.parametrize("digits", [1, 7, 10])
def test_numbers_have_exactly_that_many_digits(digits: int):
    rng = random.Random(0)
    assert {len(random_number(rng, digits)) for _ in range(200)} == {digits}


def test_keys_are_adjective_noun():
    adjective, noun = random_key(random.Random(0)).split("-")
    assert adjective.isalpha()
    assert noun.isalpha()


def test_sentences_keep_every_character_but_line_breaks():
    text = 'He said: "Go on."  Then 3.5 miles,\nno more. (It was late.) End'
    sentences = ['He said: "Go on."', "Then 3.5 miles, no more.", "(It was late.)", "End"]
    assert split_sentences(text) == sentences


def test_too_small_or_without_text_is_refused(haystack: Haystack):
    with pytest.raises(DataError, match=str(MIN_CHARACTERS)):
        next(recall_documents(haystack, seed=0, size=100))
    with pytest.raises(DataError, match="no sentences"):
        Haystack(["  "])
