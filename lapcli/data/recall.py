"""`recall`: synthetic documents that hide values under keys in running text, and ask for them later.

Three layouts, mixed by `RecallMix`:

- `list`: nothing but entries, then questions; the densest form, from which recall is learned soonest;
- `text`: sentences of various wordings between the sentences of running text, questions after them or at the end;
- `ruler`: the published single-needle and multi-key prompts of RULER (Hsieh et al. 2024, arXiv 2404.06654, table 2
  and appendix B), whose wording is kept to the letter because models are measured with it.

Keys are words of our own lists or of the running text, values are numbers of 1 to 10 digits, words, or UUIDs.
Everything follows from the seed and the running text.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from lapcli.data.builtin import builtin_train
from lapcli.data.words import ADJECTIVES, NOUNS
from lapcli.errors import DataError

RULER_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
RULER_INTRODUCTION = {
    "one": (
        "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards."
    ),
    "several": (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards."
    ),
}
RULER_QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
RULER_ANSWER = "The special magic {kind} for {key} mentioned in the provided text is"
RULER_NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)

MIN_CHARACTERS = 450
"""The shortest document that can be asked for: RULER's prompt alone takes so many."""

# What is stated, how it is asked for, and what stands before the value in the answer.
_WORDINGS = (
    ("The code for {key} is {value}.", "What is the code for {key}?", "The code for {key} is"),
    ("Remember that {key} was given {value}.", "What was {key} given?", "It was given"),
    ("In the register {key} stands at {value}.", "Where does {key} stand in the register?", "At"),
    ("They wrote {value} beside the name of {key}.", "What stood beside the name of {key}?", "There stood"),
    ("{value} belongs to {key}.", "What belongs to {key}?", "To {key} belongs"),
    ("Let {key} be known as {value}.", "What is {key} known as?", "It is known as"),
    ("The entry under {key} reads {value}.", "What does the entry under {key} read?", "It reads"),
    ("{key} = {value}", "{key} = ?", "{key} ="),
    ("For {key}, keep {value} in mind.", "What is to be kept in mind for {key}?", "For {key}, keep"),
    ("Key: {key}. Value: {value}.", "Key: {key}.", "Value:"),
)
# One entry of a list, and the same entry asked for again.
_ENTRIES = (
    ("{key}: {value}", "{key}:"),
    ("{key} = {value}", "{key} ="),
    ("- {key} ({value})", "- {key} ("),
    ("{key} -> {value}", "{key} ->"),
    ("the number of {key} is {value}", "the number of {key} is"),
    ("for {key} take {value};", "for {key} take"),
)
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”)\]]))\s+(?=[\"'“(\[]?[A-Z0-9])")
_PLAIN_WORD = re.compile(r"[A-Za-z][a-z]{3,}")


@dataclass(frozen=True)
class RecallDocument:
    """A text that asks for what it stated.

    Attributes:
        text: the document.
        answers: for each question the half-open character span of the value that answers it, in order.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class RecallMix(NamedTuple):
    """Relative weights of the layouts, and bounds on how much is asked.

    Attributes:
        list: weight of bare lists.
        text: weight of our own wordings in running text.
        ruler: weight of RULER's prompts.
        single: share of the `ruler` layout that hides one needle and asks once.
        noise: share of the `text` and `ruler` layouts whose running text is RULER's repeated noise sentences.
        max_entries: most values hidden in one document; three times as many in a list.
        asked: how often a list asks for its values, each time in another order.
    """

    list: float = 0.2
    text: float = 0.4
    ruler: float = 0.4
    single: float = 0.35
    noise: float = 0.15
    max_entries: int = 12
    asked: int = 1


class Needle(NamedTuple):
    """One hidden pair.

    Attributes:
        key: what it is hidden under.
        value: what is to be recalled.
        kind: `number`, `word` or `uuid`, as RULER names it.
    """

    key: str
    value: str
    kind: str


class Haystack:
    """Running text as sentences, from which stretches are cut at random.

    Args:
        texts: the running text; each is split into sentences.
        max_sentence: sentences longer than this many characters are left out (tables, code).

    Raises:
        DataError: no sentence is left.
    """

    def __init__(self, texts: Iterable[str], max_sentence: int = 400):
        self.sentences = [
            sentence for text in texts for sentence in split_sentences(text) if len(sentence) <= max_sentence
        ]
        if not self.sentences:
            raise DataError("the running text for `recall` holds no sentences.", "Give it prose.")

    def stretch(self, rng: random.Random, size: int) -> list[str]:
        """Consecutive sentences from a random place, together of at most `size` characters with blanks."""
        taken: list[str] = []
        position = rng.randrange(len(self.sentences))
        # A sentence that does not fit is passed over, so that one long one does not end a stretch early.
        for _ in range(size // 8 + 8):
            sentence = self.sentences[position % len(self.sentences)]
            position += 1
            if len(sentence) + 1 <= size:
                taken.append(sentence)
                size -= len(sentence) + 1
            elif size < 60:
                break
        return taken

    def word(self, rng: random.Random) -> str:
        """A plain word of four or more letters from a random sentence, or of our own list."""
        for _ in range(4):
            found = _PLAIN_WORD.findall(rng.choice(self.sentences))
            if found:
                return rng.choice(found)
        return rng.choice(NOUNS)


class _NoiseHaystack:
    """RULER's repeated sentences, one group after the other."""

    def stretch(self, rng: random.Random, size: int) -> list[str]:
        group = sum(len(sentence) + 1 for sentence in RULER_NOISE)
        return [*RULER_NOISE] * (size // group)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, with line breaks inside them turned to blanks."""
    parts = _SENTENCE_END.split(" ".join(text.split()))
    return [part for part in parts if part]


def recall_documents(
    haystack: Haystack | None = None,
    *,
    seed: int,
    size: int | Callable[[random.Random], int] = 3000,
    mix: RecallMix | None = None,
) -> Iterator[RecallDocument]:
    """Endless documents that state values and ask for them.

    Args:
        haystack: the running text; `None` takes the train part of `builtin`.
        seed: the only source of chance.
        size: characters of a document, at most (about three to a token where digits stand alone), or a function
            that draws it.
        mix: which layouts, how many entries.

    Yields:
        `RecallDocument`s, each with at least one answer.

    Raises:
        DataError: a size below `MIN_CHARACTERS`.
    """
    rng = random.Random(seed)
    hay = haystack or _builtin_haystack()
    weights = mix or RecallMix()
    layouts = {"list": weights.list, "text": weights.text, "ruler": weights.ruler}
    layouts_by_name = {"list": _list_document, "text": _text_document, "ruler": _ruler_document}
    while True:
        limit = size(rng) if callable(size) else size
        if limit < MIN_CHARACTERS:
            raise DataError(f"a recall document of {limit} characters is asked for; it takes {MIN_CHARACTERS}.")
        layout = rng.choices(list(layouts), list(layouts.values()))[0]
        document = layouts_by_name[layout](rng, hay, limit, weights)
        if len(document.text) <= limit:
            yield document


def ruler_single(sentences: Sequence[str], needle: Needle, depth: float, *, joiner: str = " ") -> RecallDocument:
    """RULER's single-needle prompt with its answer.

    Args:
        sentences: the running text.
        needle: what to hide.
        depth: where: 0 before the first sentence, 1 after the last.
        joiner: what separates sentences: a blank for prose, a line break for the repeated noise.

    Returns:
        The document; `text[: answers[0][0]]` without its last blank is the prompt.
    """
    place = round(depth * len(sentences))
    statement = RULER_NEEDLE.format(kind=f"{needle.kind}s", key=needle.key, value=needle.value)
    writer = _Writer()
    writer.add(RULER_INTRODUCTION["one"].format(kind=needle.kind) + "\n")
    writer.add(joiner.join([*sentences[:place], statement, *sentences[place:]]) + "\n")
    _ask_as_ruler(writer, needle)
    return writer.document()


def random_number(rng: random.Random, digits: int = 7) -> str:
    """A number of exactly that many digits, as text."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits)) if digits > 1 else str(rng.randrange(10))


def random_key(rng: random.Random) -> str:
    """A key as RULER makes them: adjective-noun."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


@cache
def _builtin_haystack() -> Haystack:
    return Haystack(document.text for document in builtin_train())


class _Writer:
    """Text under construction that remembers where its answers stand."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._answers: list[tuple[int, int]] = []

    def add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def answer(self, text: str) -> None:
        self._answers.append((self._length, self._length + len(text)))
        self.add(text)

    def document(self) -> RecallDocument:
        return RecallDocument("".join(self._parts), tuple(self._answers))


def _ask_as_ruler(writer: _Writer, needle: Needle) -> None:
    writer.add(RULER_QUESTION.format(kind=needle.kind, key=needle.key) + " ")
    writer.add(RULER_ANSWER.format(kind=needle.kind, key=needle.key) + " ")
    writer.answer(needle.value)
    writer.add(".")


def _value(rng: random.Random, hay: Haystack) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.45:
        return random_number(rng, 7), "number"
    if draw < 0.8:
        return random_number(rng, rng.randint(1, 10)), "number"
    if draw < 0.93:
        return " ".join(hay.word(rng) for _ in range(rng.choice((1, 1, 2, 3)))), "word"
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])), "uuid"


def _key(rng: random.Random, hay: Haystack) -> str:
    draw = rng.random()
    if draw < 0.5:
        return random_key(rng)
    if draw < 0.75:
        return hay.word(rng)
    if draw < 0.9:
        return f"{hay.word(rng)} {hay.word(rng)}"
    return f"{rng.choice(NOUNS)} {random_number(rng, rng.randint(1, 3))}"


def _needles(rng: random.Random, hay: Haystack, count: int, kind: str | None = None) -> list[Needle]:
    found: dict[str, Needle] = {}
    while len(found) < count:
        key = _key(rng, hay)
        value, its_kind = _value(rng, hay)
        if (kind is None or its_kind == kind) and key.casefold() not in found:
            found[key.casefold()] = Needle(key, value, its_kind)
    return list(found.values())


def _questions(rng: random.Random, needles: list[Needle]) -> list[Needle]:
    """Every needle once in a new order, some of them twice."""
    again = [needle for needle in needles if rng.random() < 0.2]
    asked = needles + again
    rng.shuffle(asked)
    return asked


def _list_document(rng: random.Random, hay: Haystack, limit: int, mix: RecallMix) -> RecallDocument:
    form, ask = rng.choice(_ENTRIES)
    # An entry is written once and asked for about as often as it should be, with its number, key and form.
    count = max(1, min(3 * mix.max_entries, limit // ((1 + mix.asked) * (len(form) + 22))))
    needles = _needles(rng, hay, rng.randint(max(1, count // 2), count))
    writer = _Writer()
    for needle in needles:
        writer.add(form.format(key=needle.key, value=needle.value) + "\n")
    end = form.split("{value}")[1]
    for needle in (needle for _ in range(mix.asked) for needle in _questions(rng, needles)):
        question = ask.format(key=needle.key)
        writer.add(question if question.endswith("(") else f"{question} ")
        writer.answer(needle.value)
        writer.add(f"{end}\n")
    return writer.document()


def _text_document(rng: random.Random, hay: Haystack, limit: int, mix: RecallMix) -> RecallDocument:
    count = rng.randint(1, max(1, min(mix.max_entries, limit // 250)))
    needles = _needles(rng, hay, count)
    one_wording = rng.choice(_WORDINGS) if rng.random() < 0.5 else None
    wording = {needle.key: one_wording or rng.choice(_WORDINGS) for needle in needles}
    stated = [wording[needle.key][0].format(key=needle.key, value=needle.value) for needle in needles]
    asked = _questions(rng, needles)
    spent = sum(len(text) + 1 for text in stated)
    spent += sum(sum(map(len, wording[needle.key][1:])) + 2 * len(needle.key) + len(needle.value) for needle in asked)
    noise = rng.random() < mix.noise
    joiner = "\n" if noise else " "
    sentences = (_NoiseHaystack() if noise else hay).stretch(rng, max(0, limit - spent))

    early = rng.random() < 0.4  # ask soon after, in the text; else at the end
    writer = _Writer()
    waiting = sorted(rng.randint(0, len(sentences)) for _ in needles)
    pending: list[Needle] = []

    def ask(needle: Needle) -> None:
        _, question, lead = wording[needle.key]
        writer.add(f"{question.format(key=needle.key)} {lead.format(key=needle.key)} ")
        writer.answer(needle.value)
        writer.add("." + joiner)

    index = 0
    for position in range(len(sentences) + 1):
        while index < len(needles) and waiting[index] == position:
            writer.add(stated[index] + joiner)
            pending.append(needles[index])
            index += 1
        if position < len(sentences):
            writer.add(sentences[position] + joiner)
        if early and pending and rng.random() < 0.25:
            ask(pending.pop(rng.randrange(len(pending))))
    if not early:
        writer.add("\n")
        pending = asked
    for needle in pending:
        ask(needle)
    return writer.document()


def _ruler_document(rng: random.Random, hay: Haystack, limit: int, mix: RecallMix) -> RecallDocument:
    noise = rng.random() < mix.noise
    joiner = "\n" if noise else " "
    source = _NoiseHaystack() if noise else hay
    kind = rng.choices(("number", "word", "uuid"), (0.85, 0.05, 0.1))[0]
    if rng.random() < mix.single:
        (needle,) = _needles(rng, hay, 1, kind)
        sentences = source.stretch(rng, max(0, limit - 330 - 2 * len(needle.value) - 3 * len(needle.key)))
        return ruler_single(sentences, needle, rng.random(), joiner=joiner)
    # A statement and a question of RULER's take some 250 characters with their key and value.
    count = rng.randint(1, max(1, min(mix.max_entries, (limit - 150) // 260)))
    needles = _needles(rng, hay, count, kind)
    asked = _questions(rng, needles)
    spent = 160 + sum(55 + len(n.key) + len(n.value) for n in needles)
    spent += sum(130 + 2 * len(n.key) + len(n.value) for n in asked)
    sentences = source.stretch(rng, max(0, limit - spent))
    stated = [RULER_NEEDLE.format(kind=f"{kind}s", key=n.key, value=n.value) for n in needles]
    for statement in stated:
        sentences.insert(rng.randint(0, len(sentences)), statement)
    writer = _Writer()
    writer.add(RULER_INTRODUCTION["several"].format(kind=f"{kind}s") + "\n")
    writer.add(joiner.join(sentences) + "\n")
    for needle in asked:
        _ask_as_ruler(writer, needle)
        writer.add("\n")
    return writer.document()
