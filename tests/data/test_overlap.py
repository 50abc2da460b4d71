"""Held-out paragraphs are found however they are rendered, and nothing else is."""

import random

import pytest

from lapcli.data.overlap import RUN_WORDS, HeldOutIndex, paragraphs_of, words_of

HELD_OUT = """\
The "try" statement specifies exception handlers and/or cleanup code
for a group of statements:

   try_stmt ::= try1_stmt | try2_stmt

When no exception occurs in the "try" clause, no exception handler is executed, and control passes on
to whatever follows, exactly as if there had been no handler there at all.

Short one.
"""


@pytest.fixture(scope="module")
def index() -> HeldOutIndex:
    return HeldOutIndex([HELD_OUT])


@pytest.mark.parametrize(
    "paragraph",
    [
        pytest.param(
            'The "try" statement specifies exception handlers and/or cleanup code\nfor a group of statements:',
            id="as-is",
        ),
        pytest.param(
            "The try statement specifies\n   exception handlers and / or cleanup code for a group of statements",
            id="unquoted-rewrapped",
        ),
        pytest.param(
            "THE ‘TRY’ STATEMENT SPECIFIES EXCEPTION HANDLERS AND/OR CLEANUP CODE FOR A GROUP OF STATEMENTS",
            id="case-and-quotes",
        ),
        pytest.param("Short one!", id="whole-short-paragraph"),
        pytest.param("no exception handler is executed", id="part-of-a-longer-one"),
        pytest.param(
            "New in 3.12. When no exception occurs in the try clause, no exception handler is executed, and control "
            "passes to the else clause, which is new text altogether.",
            id="run-of-thirteen-words-inside",
        ),
    ],
)
def test_renderings_of_held_out_paragraphs_occur(index: HeldOutIndex, paragraph: str):
    assert index.occurs(paragraph)


@pytest.mark.parametrize(
    "paragraph",
    [
        pytest.param("", id="empty"),
        pytest.param("one", id="single-word-that-occurs"),
        pytest.param("no exception handler", id="three-words-that-occur"),
        pytest.param(
            "The try statement is not what this paragraph is about, though it names exception handlers.",
            id="same-topic",
        ),
        pytest.param("to whatever follows " * 5, id="repeats-of-a-part"),
    ],
)
def test_other_paragraphs_do_not(index: HeldOutIndex, paragraph: str):
    assert not index.occurs(paragraph)


def test_every_place_of_a_long_run_is_found():
    """The stride of the seeds must not let a run slip through, wherever it stands."""
    held = [f"held{i}" for i in range(40)]
    index = HeldOutIndex([" ".join(held)])
    for before in range(25):
        own = [f"own{i}" for i in range(before)]
        tail = [f"tail{i}" for i in range(7)]
        run = held[5 : 5 + RUN_WORDS]
        assert index.occurs(" ".join([*own, *run, *tail]))
        assert not index.occurs(" ".join([*own, *run[:-1], *tail]))


def test_clean_keeps_all_else_byte_for_byte(index: HeldOutIndex):
    first, last = "A paragraph of our own,\nwith a break.", "  Another, indented."
    text = f"{first}\n\nSHORT ONE\n \n\n{last}\n"
    cleaned = index.clean(text)
    assert cleaned.dropped == 1
    assert cleaned.text == f"{first}\n\n{last}"
    assert index.clean(first) == (first, 0)
    assert index.clean("Short one") == ("", 1)


def test_cleaned_text_has_no_held_out_paragraph(index: HeldOutIndex):
    rng = random.Random(0)
    own = [f"Own paragraph {i} with {rng.random()} in it." for i in range(20)]
    mixed = own + paragraphs_of(HELD_OUT)
    rng.shuffle(mixed)
    left = paragraphs_of(index.clean("\n\n".join(mixed)).text)
    assert sorted(left) == sorted(own)


def test_words_are_letters_and_digits_folded():
    assert words_of("__init__ of Straße, 3.11's ‘x’") == ["init", "of", "strasse", "3", "11", "s", "x"]
