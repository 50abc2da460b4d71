"""The texts of RULER's tasks, made from a seed: prompts, the answers that are right, and what has to be readable.

The definitions are the published ones (Hsieh et al. 2024, arXiv 2404.06654, tables 1 to 3 and appendix B; their
generator), the wording of the prompts is kept to the letter because models are measured with it. Running text is
the held-out part of `builtin` or the user's own, words are those of our lists and of `builtin`; nothing is fetched.
RULER's two question answering tasks, which need data sets of others, are not here.
"""

import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Literal, NamedTuple

from lapcli.data.builtin import documents_digest, heldout_builtin_text
from lapcli.data.documents import Document
from lapcli.data.recall import (
    RULER_ANSWER,
    RULER_INTRODUCTION,
    RULER_NEEDLE,
    RULER_NOISE,
    RULER_QUESTION,
    random_key,
    random_number,
    split_sentences,
)
from lapcli.data.words import ADJECTIVES, NOUNS
from lapcli.errors import DataError

Kind = Literal["number", "word", "uuid"]

_LONGEST_SENTENCE = 400
_MIN_SENTENCES = 20
_REMEMBERED = 4096
_NOISE = " ".join(RULER_NOISE)

_ALL_QUESTION = "What are all the special magic {kind} for {key} mentioned in the provided text?"
_ALL_ANSWER = "The special magic {kind} for {key} mentioned in the provided text are"
_DEPTHS = 40

_TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
# The slip of the pen is RULER's.
_TRACK_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined "
    "the value {value}, they are:"
)
_HOPS = 4
# As many as RULER's example has, which is filled up to 500 tokens of a common tokenizer.
_EXAMPLE_LINES = 10

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
_COMMON_WORDS = 10
_LONG = 4096
"""From this length on, RULER repeats the words of the list more often."""

_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
_CODED_LETTERS = 6
_ZETA_2 = math.pi**2 / 6
# From so many words on, the counts of the second to the fifth word of the code differ: n / zeta(2) / (1/16 - 1/25) > 1.
_MIN_CODED = math.ceil(_ZETA_2 / (1 / 16 - 1 / 25))


class RulerText(NamedTuple):
    """One question.

    Attributes:
        prompt: up to where the answer begins, without the blank before it.
        answers: what the continuation is searched for.
        facts: parts of the prompt that have to be readable in it, as often as they stand there.
    """

    prompt: str
    answers: tuple[str, ...]
    facts: tuple[str, ...]


class Material:
    """What the prompts are made of.

    Args:
        documents: the running text.

    Raises:
        DataError: too few sentences.
    """

    def __init__(self, documents: Sequence[Document]):
        sentences = [sentence for document in documents for sentence in split_sentences(document.text)]
        # Tables and the like would fill a short prompt alone.
        self.sentences = [sentence for sentence in sentences if len(sentence) <= _LONGEST_SENTENCE]
        if len(self.sentences) < _MIN_SENTENCES:
            raise DataError(
                f"the haystack holds {len(self.sentences)} sentences of at most {_LONGEST_SENTENCE} characters; "
                f"RULER's tasks need at least {_MIN_SENTENCES}",
                "give a file with more running text",
            )
        self.digest = documents_digest(list(documents))
        self._text = "\n".join(self.sentences)
        self._held: dict[str, bool] = {}

    def holds(self, text: str) -> bool:
        """Whether the running text holds this one, which is asked again for each size of a prompt."""
        if text not in self._held:
            if len(self._held) >= _REMEMBERED:
                self._held.clear()
            self._held[text] = text in self._text
        return self._held[text]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Distinct English words in lower case, in alphabetical order."""
        text = " ".join(document.text for document in heldout_builtin_text())
        letters = set(string.ascii_lowercase)
        plain = {word for word in text.split() if 4 <= len(word) <= 12 and letters.issuperset(word)}
        return tuple(sorted({*plain, *ADJECTIVES, *NOUNS}))

    @cached_property
    def words_digest(self) -> str:
        """SHA-256 of the words, hexadecimal."""
        return documents_digest([Document("words", " ".join(self.words))])


Build = Callable[[random.Random, int, int, Material], RulerText]
"""Chance, units of haystack, the prompt's length in tokens, material, to a question. More units make a longer text."""


class RulerTask(NamedTuple):
    """One of RULER's tasks.

    Attributes:
        build: makes a question.
        written: tokens that a model writes.
        smallest: units of haystack that a question takes at least.
        data: digest of what the haystack is made of.
        largest: most units that there are; `None`: no end.
    """

    build: Build
    written: int
    smallest: int
    data: Callable[[Material], str | None]
    largest: Callable[[Material], int | None] = lambda material: None


class _Needles(NamedTuple):
    """A needle task.

    Attributes:
        haystack: what hides them: RULER's repeated sentences, running text, or other needles.
        keys: how many are hidden.
        values: how many each key has.
        queries: how many keys are asked for.
        key: what keys are.
        value: what values are.
    """

    haystack: Literal["noise", "essay", "needles"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    key: Kind = "word"
    value: Kind = "number"


def _needle_text(form: _Needles, rng: random.Random, size: int, length: int, material: Material) -> RulerText:
    taken: set[str] = set()
    kinds = f"{form.value}s"

    def fresh(kind: Kind) -> str:
        while True:
            found = _drawn(rng, kind)
            # A running text that holds the value would give it away, or give away another.
            if found not in taken and (form.haystack != "essay" or not material.holds(found)):
                taken.add(found)
                return found

    hidden = {fresh(form.key): [fresh(form.value) for _ in range(form.values)] for _ in range(form.keys)}
    statements = [
        RULER_NEEDLE.format(kind=kinds, key=key, value=value) for key, values in hidden.items() for value in values
    ]
    rng.shuffle(statements)
    asked = rng.sample(list(hidden), form.queries)
    depths = sorted(rng.sample(range(_DEPTHS), len(statements)))
    start = rng.randrange(len(material.sentences))
    if form.haystack == "noise":
        units = [_NOISE] * size
    elif form.haystack == "essay":
        units = [material.sentences[(start + step) % len(material.sentences)] for step in range(size)]
    else:
        units = [RULER_NEEDLE.format(kind=kinds, key=fresh(form.key), value=fresh(form.value)) for _ in range(size)]
    for depth, statement in reversed(list(zip(depths, statements, strict=True))):
        units.insert(round(size * depth / (_DEPTHS - 1)), statement)
    one = form.queries * form.values == 1
    kind = form.value if one else kinds
    names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    introduction, question, answer = (
        (RULER_INTRODUCTION["one"], RULER_QUESTION, RULER_ANSWER)
        if one
        else (RULER_INTRODUCTION["several"], _ALL_QUESTION, _ALL_ANSWER)
    )
    context = (" " if form.haystack == "essay" else "\n").join(units)
    return RulerText(
        f"{introduction.format(kind=kind)}\n{context}\n"
        f"{question.format(kind=kind, key=names)} {answer.format(kind=kind, key=names)}",
        tuple(value for key in asked for value in hidden[key]),
        tuple(statements),
    )


def _drawn(rng: random.Random, kind: Kind) -> str:
    if kind == "number":
        return random_number(rng, 7)
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return random_key(rng)


def _tracking(rng: random.Random, size: int, length: int, material: Material) -> RulerText:
    example = _chain(rng, _EXAMPLE_LINES, letters=3)
    asked = _chain(rng, size, letters=5)
    return asked._replace(prompt=f"{example.prompt} {' '.join(example.answers)}\n\n\n\n{asked.prompt}")


def _chain(rng: random.Random, lines: int, letters: int) -> RulerText:
    names: list[str] = []
    while len(names) <= _HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10000, 100000))
    assignments = [f"VAR {names[0]} = {value}"]
    assignments += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    units = [f"{_NOISE}\n"] * lines
    places = sorted(rng.sample(range(lines), len(assignments)))
    for shift, (place, assignment) in enumerate(zip(places, assignments, strict=True)):
        units.insert(place + shift, assignment)
    context = " ".join(units)
    prompt = (_TRACK + _TRACK_ANSWER).format(context=context, value=value, count=len(names))
    return RulerText(prompt, tuple(names), tuple(assignments))


def _common_words(rng: random.Random, size: int, length: int, material: Material) -> RulerText:
    long = length >= _LONG
    shown, shown_answers = _word_list(rng, material, 40 if long else 20, 10 if long else 3, 3 if long else 1)
    asked, answers = _word_list(rng, material, size, 30 if long else 6, 3 if long else 1)
    example = f"{_COMMON.format(context=shown)}{_numbered(shown_answers)}"
    return RulerText(f"{example}\n{_COMMON.format(context=asked)}", tuple(answers), tuple(answers))


def _word_list(rng: random.Random, material: Material, count: int, often: int, rarely: int) -> tuple[str, list[str]]:
    """A numbered list of words, ten of which come often, and those ten."""
    words = rng.sample(material.words, count)
    common, others = words[:_COMMON_WORDS], words[_COMMON_WORDS:]
    listed = common * often + others * rarely
    rng.shuffle(listed)
    return _numbered(listed), common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _frequent_words(rng: random.Random, size: int, length: int, material: Material) -> RulerText:
    # The most frequent one is noise, and is shown as dots.
    code = ["..."]
    while len(code) < max(5, length // 50):
        word = "".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))
        if word not in code:
            code.append(word)
    text = [word for rank, word in enumerate(code, 1) for _ in range(int(size / rank**2 / _ZETA_2))]
    rng.shuffle(text)
    return RulerText(_FREQUENT.format(context=" ".join(text)), tuple(code[1:4]), tuple(code[1:4]))


def _needle_task(form: _Needles) -> RulerTask:
    data = {
        "noise": lambda material: documents_digest([Document("RULER noise", _NOISE)]),
        "essay": lambda material: material.digest,
        "needles": lambda material: None,
    }
    return RulerTask(partial(_needle_text, form), written=128, smallest=1, data=data[form.haystack])


RULER_TASKS: dict[str, RulerTask] = {
    "niah_single_1": _needle_task(_Needles("noise")),
    "niah_single_2": _needle_task(_Needles("essay")),
    "niah_single_3": _needle_task(_Needles("essay", value="uuid")),
    "niah_multikey_1": _needle_task(_Needles("essay", keys=4)),
    "niah_multikey_2": _needle_task(_Needles("needles")),
    "niah_multikey_3": _needle_task(_Needles("needles", key="uuid", value="uuid")),
    "niah_multivalue": _needle_task(_Needles("essay", values=4)),
    "niah_multiquery": _needle_task(_Needles("essay", keys=4, queries=4)),
    "ruler_vt": RulerTask(
        _tracking,
        written=30,
        smallest=_HOPS + 1,
        data=lambda material: documents_digest([Document("RULER noise", _NOISE)]),
    ),
    "ruler_cwe": RulerTask(
        _common_words,
        written=120,
        smallest=2 * _COMMON_WORDS,
        data=lambda material: material.words_digest,
        largest=lambda material: len(material.words),
    ),
    "ruler_fwe": RulerTask(_frequent_words, written=50, smallest=_MIN_CODED, data=lambda material: None),
}
"""By the names that lm-eval has for them."""
