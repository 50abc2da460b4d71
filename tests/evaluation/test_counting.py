"""Tokens guessed from words: prompts are what they are without guesses, whatever the tokenizer does."""

from collections import Counter

import pytest

from lapcli.data.builtin import heldout_builtin_text
from lapcli.evaluation import counting
from lapcli.evaluation.counting import WordCounter
from lapcli.evaluation.ruler import Misfit, make_prompts
from lapcli.evaluation.ruler_texts import RULER_TASKS
from lapcli.testing.models import byte_tokenizer


class Told:
    """The byte tokenizer, which makes of a text's tokens what it is told to, and counts the texts."""

    def __init__(self, change=lambda ids: ids):
        self._inner, self._change = byte_tokenizer(), change
        self.longest = Counter()

    def __call__(self, text, **kwargs):
        assert isinstance(text, str)
        self.longest[len(text) > 400] += 1
        return {"input_ids": self._change(self._inner(text, **kwargs).input_ids)}

    def decode(self, ids, **kwargs):
        return self._inner.decode([token for token in ids if token != 3])


def doubting(tokenizer):
    counter = WordCounter(tokenizer)
    counter.believed = False
    return counter


def both(name, material, tokenizer, length, samples=3, start=None, seed=0):
    """Prompts by guesses, and by counting alone, with the counter that guessed."""
    counter = WordCounter(tokenizer)
    found, wanted = (
        make_prompts(name, material, tokenizer, length=length, samples=samples, seed=seed, start=start, counter=each)
        for each in (counter, doubting(tokenizer))
    )
    return found, wanted, counter


@pytest.mark.parametrize(("length", "start"), [(700, None), (2048, 3)], ids=["700", "2K, BOS"])
@pytest.mark.parametrize("name", RULER_TASKS)
def test_prompts_are_those_that_counting_alone_finds(material, tokenizer, name, length, start):
    found, wanted, counter = both(name, material, tokenizer, length, start=start)
    assert found == wanted
    assert counter.believed


def test_prompts_are_not_told_by_what_a_counter_has_seen(material, tokenizer, monkeypatch):
    """Nor by what it forgets."""
    counter = WordCounter(tokenizer)
    monkeypatch.setattr(counting, "_MOST_WORDS", 100)
    for length in (1500, 900):
        for name in ("niah_multikey_3", "ruler_cwe", "ruler_vt"):
            made = [
                make_prompts(name, material, tokenizer, length=length, samples=2, seed=1, start=None, counter=each)
                for each in (counter, None, doubting(tokenizer))
            ]
            assert made[0] == made[1] == made[2]
    assert counter.believed


def test_no_room_is_found_as_by_counting(material, tokenizer):
    for length in range(140, 320, 20):
        found, wanted, _ = both("niah_multivalue", material, tokenizer, length)
        assert found == wanted
    assert isinstance(both("niah_multivalue", material, tokenizer, 140)[0], Misfit)


def test_a_guess_is_the_count_where_tokens_do_not_cross_blanks(tokenizer):
    bytes_ = byte_tokenizer()
    for text in ("", " ", "a", "one  two", " one two ", "One.\n\nTwo three é"):
        assert WordCounter(bytes_).guess(text) == len(text.encode()) + 1  # a blank before the first word
    # This one's tokens may be several blanks, of which prompts have none.
    text = " ".join(heldout_builtin_text()[0].text[:5000].split())
    counted = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert abs(WordCounter(tokenizer).guess(text) - counted) <= 2


def test_few_prompts_are_tokenised_in_search_of_one(material):
    guessed, counted = Told(), Told()
    wanted = make_prompts(
        "niah_single_2", material, counted, length=3000, samples=4, seed=0, start=None, counter=doubting(counted)
    )
    assert make_prompts("niah_single_2", material, guessed, length=3000, samples=4, seed=0, start=None) == wanted
    # A prompt of each sample, and sizes that are close to the length.
    assert guessed.longest[True] < counted.longest[True] / 2


WRONG = {
    "a token more for each ten": lambda ids: ids + [3] * (len(ids) // 10),
    "a token more for each 300": lambda ids: ids + [3] * (len(ids) // 300),
    "words are long, texts are not": lambda ids: ids + [3] * 50 * (1 < len(ids) < 40),
    "texts are long, words are not": lambda ids: ids + [3] * 100 * (len(ids) > 40),
}


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_fwe"])
@pytest.mark.parametrize("wrong", WRONG)
def test_where_guesses_are_wrong_they_are_not_believed(material, wrong, name):
    found, wanted, counter = both(name, material, Told(WRONG[wrong]), 2500)
    assert not isinstance(found, Misfit)
    assert found == wanted
    assert not counter.believed


@pytest.mark.parametrize("length", [400, 700, 760, 820])
def test_words_that_see_no_room_where_there_is_some(material, length):
    """By the words not even the smallest prompt fits; by the tokenizer it does, from some length on."""
    found, wanted, counter = both("niah_single_1", material, Told(WRONG["words are long, texts are not"]), length)
    assert found == wanted
    assert isinstance(found, Misfit) == (length < 700)
    assert counter.believed == isinstance(found, Misfit)


def test_a_text_in_the_middle_that_the_words_get_wrong(material):
    """What was made before it stays; it and what follows is counted."""
    plain = Told()
    prompts = make_prompts("niah_single_2", material, plain, length=1500, samples=5, seed=0, start=None)
    third = prompts[2].text.facts[0]

    class Odd(Told):
        def __call__(self, text, **kwargs):
            ids = super().__call__(text, **kwargs)["input_ids"]
            return {"input_ids": ids + [3] * 60 * (third in text)}

    found, wanted, counter = both("niah_single_2", material, Odd(), 1500, samples=5)
    assert found == wanted
    assert found[:2] == prompts[:2]
    assert len(found[2].tokens) <= 1500 - 128
    assert not counter.believed
