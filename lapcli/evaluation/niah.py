"""Needle in a haystack: one 7-digit number hidden in running text, and asked for at the end.

The prompts have RULER's published wording (S-NIAH with a number; Hsieh et al. 2024, arXiv 2404.06654), and are made
here from a seed. A prompt with its answer never exceeds its length, depths are spread evenly from the first sentence to
the last, and the needle is looked for in the *decoded* prompt, so that a tokenizer cannot lose it unseen.

Scored is whether greedy decoding gives exactly the answer's tokens. Greedy decoding does so if and only if each answer
token is the most probable one after the prompt and the answer tokens before it, which one forward pass over prompt and
answer shows for all of them at once.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lapcli.data.builtin import documents_digest
from lapcli.data.documents import Document
from lapcli.data.recall import (
    RULER_NEEDLE,
    RULER_NOISE,
    Needle,
    random_key,
    random_number,
    ruler_single,
    split_sentences,
)
from lapcli.errors import DataError, ModelError, UsageError
from lapcli.evaluation.estimates import accuracy
from lapcli.evaluation.made import Made
from lapcli.evaluation.misfit import Misfit, say
from lapcli.evaluation.results import Score
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.tokenization import (
    decode,
    encode,
    encode_all,
    prompt_start,
    squeeze,
    token_name,
)
from lapcli.reporting import Reporter

DIGITS = 7
FORM = "RULER S-NIAH, number"
# Room left unused below a length: finding a sentence that fills less is not worth the search.
_SLACK = 8
_MISFITS = 40
_MIN_SENTENCES = 20
# Prompts, and tokens of prompts, that a tokenizer is given at once.
_TOGETHER = 64
_TOKENS_TOGETHER = 1 << 18


class NoRoom(UsageError):
    """A length that has no room for a question.

    Attributes:
        needed: tokens that the question takes with its answer.
    """

    def __init__(self, needed: int, length: int):
        super().__init__(
            f"a NIAH prompt takes {needed} tokens without any haystack, more than the length {length}",
            "give longer lengths",
        )
        self.needed = needed


def noise_documents() -> list[Document]:
    """RULER's repeated sentences (S-NIAH-1) as a text to hide in; they go on as long as a prompt needs."""
    return [Document("RULER noise", " ".join(RULER_NOISE * _MIN_SENTENCES))]


class Haystack:
    """Running text in sentences, with their lengths in tokens.

    Args:
        documents: the text.
        tokenizer: counts the tokens.
        joiner: what stands between two sentences.

    Raises:
        DataError: too few sentences.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Any, joiner: str = " "):
        self.joiner = joiner
        self.sentences = [sentence for document in documents for sentence in split_sentences(document.text)]
        if len(self.sentences) < _MIN_SENTENCES:
            raise DataError(
                f"the haystack holds {len(self.sentences)} sentences; a needle needs at least {_MIN_SENTENCES}",
                "give a file with more running text",
            )
        self.digest = documents_digest(list(documents))
        self._text = "\n".join(self.sentences)
        # Whole paragraphs of tables may be longer than the model takes; transformers would warn of it.
        texts = [f"{joiner}{sentence}" for sentence in self.sentences]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
        self._lengths = [len(ids) for ids in encoded["input_ids"]]

    def number(self, rng: random.Random) -> str:
        """A number of seven digits that the text does not hold."""
        while True:
            value = random_number(rng, DIGITS)
            if value not in self._text:
                return value

    def stretch(self, rng: random.Random, tokens: int) -> list[str]:
        """Sentences in order from a random place, together of about that many tokens and not clearly more.

        A sentence that does not fit is passed over, and the end of the text is followed by its start.
        """
        taken: list[str] = []
        position = rng.randrange(len(self.sentences))
        misfits = 0
        while tokens > _SLACK and misfits < _MISFITS:
            index = position % len(self.sentences)
            position += 1
            if self._lengths[index] <= tokens:
                taken.append(self.sentences[index])
                tokens -= self._lengths[index]
            else:
                misfits += 1
        return taken


class Prompt(NamedTuple):
    """One question.

    Attributes:
        tokens: the prompt.
        answer: the tokens that are right, the blank before the number among them.
        needle: what is hidden.
        depth: where it was put, 0 before the first sentence, 1 after the last.
    """

    tokens: list[int]
    answer: list[int]
    needle: Needle
    depth: float


def make_prompts(
    haystack: Haystack, tokenizer: Any, *, length: int, samples: int, seed: int, start: int | None
) -> list[Prompt]:
    """The prompts of one length.

    Args:
        haystack: the running text.
        tokenizer: the model's.
        length: most tokens of a prompt with its answer.
        samples: how many; sample i has depth `i / (samples - 1)`.
        seed: with the length and the sample's number the only source of chance.
        start: a token that each prompt begins with, or `None`.

    Raises:
        NoRoom: the length has no room for the question.
        ModelError: the tokenizer loses the needle.
    """
    prompts: list[Prompt] = []
    together = max(1, min(_TOGETHER, _TOKENS_TOGETHER // length))
    for first in range(0, samples, together):
        questions: list[_Question] = []
        for sample in range(first, min(samples, first + together)):
            depth = sample / (samples - 1) if samples > 1 else 0.5
            rng = _chance(seed, length, sample)
            needle = Needle(random_key(rng), haystack.number(rng), "number")
            spent = _bare(needle, depth, length, tokenizer, start, haystack.joiner)
            questions.append(_Question(haystack.stretch(rng, length - spent), needle, depth))
        prompts += _filled(questions, haystack.joiner, tokenizer, length, start)
    return prompts


def misfits(task: str, settings: EvaluationSettings, tokenizer: Any) -> list[Misfit]:
    """The lengths that have no room for a question, seen before any text is read; the first prompt shows it.

    Args:
        task: its name.
        settings: `niah_lengths`, `bos` and `seed` are read.
        tokenizer: the model's.
    """
    start = prompt_start(tokenizer, settings.bos)
    found: list[Misfit] = []
    for length in dict.fromkeys(settings.niah_lengths):
        key = random_key(_chance(settings.seed, length, 0))
        try:
            _bare(Needle(key, "1" * DIGITS, "number"), 0.0, length, tokenizer, start, " ")
        except NoRoom as error:
            found.append(Misfit(task, length, error.needed))
    return found


def measure_niah(
    documents: Sequence[Document],
    loaded: LoadedModel,
    settings: EvaluationSettings,
    *,
    batch_size: int | None,
    reporter: Reporter,
    task: str = "niah",
    joiner: str = " ",
    made: Made | None = None,
) -> list[Score]:
    """The share of needles recalled exactly, for each length that has room for the question.

    Args:
        documents: the running text.
        loaded: the model.
        settings: `niah_lengths`, `niah_samples` (`limit` overrides it), `bos` and `seed` are read.
        batch_size: rows per pass, `None` for automatic.
        reporter: progress goes here.
        task: what the scores are called.
        joiner: what stands between two sentences.
        made: keeps prompts for other models, of the same settings and documents.

    Returns:
        One score a length. Where another length had no room for the question, their notes say so.
    """
    tokenizer = loaded.tokenizer
    haystack = Haystack(documents, tokenizer, joiner)
    start = prompt_start(tokenizer, settings.bos)
    samples = settings.limit or settings.niah_samples
    scores: list[Score] = []
    left_out: list[Misfit] = []
    for length in dict.fromkeys(settings.niah_lengths):
        try:
            make = partial(
                make_prompts, haystack, tokenizer,
                length=length, samples=samples, seed=settings.seed, start=start,
            )  # fmt: skip
            prompts = make() if made is None else made.prompts((task, loaded.tokenizer_digest, length), make)
        except NoRoom as error:
            left_out.append(Misfit(task, length, error.needed))
            continue
        answers = score(
            loaded,
            [Request(prompt.tokens + prompt.answer, len(prompt.answer)) for prompt in prompts],
            batch_size=batch_size,
            reporter=reporter,
            description=f"{task} {length} on {loaded.name}",
        )
        scores.append(
            Score(
                task=task,
                metric="exact_match",
                higher_is_better=True,
                estimate=accuracy([answer.greedy for answer in answers]),
                settings={
                    "form": FORM,
                    "samples": samples,
                    "bos": settings.bos,
                    "start_token": token_name(tokenizer, start),
                    "seed": settings.seed,
                    "data": haystack.digest,
                    "tokenizer": loaded.tokenizer_digest,
                },
                length=length,
                counts={"tokens": sum(len(prompt.tokens) + len(prompt.answer) for prompt in prompts)},
            )
        )
    if not left_out:
        return scores
    said = say(left_out)
    if not scores:
        reporter.warn(f"{task} {said}")
    return [replace(score, notes=(said,)) for score in scores]


def _chance(seed: int, length: int, sample: int) -> random.Random:
    # Seeded by text, which Python hashes the same way in every version.
    return random.Random(f"niah {seed} {length} {sample}")


class _Question(NamedTuple):
    """What a prompt is made of: sentences, and a needle at a depth."""

    sentences: list[str]
    needle: Needle
    depth: float


def _bare(needle: Needle, depth: float, length: int, tokenizer: Any, start: int | None, joiner: str) -> int:
    """Tokens of a prompt with its answer, without any haystack; raises `NoRoom` where they are more than the length."""
    (bare,) = _prompts([_Question([], needle, depth)], tokenizer, start, joiner)
    spent = len(bare.tokens) + len(bare.answer)
    if spent > length:
        raise NoRoom(spent, length)
    return spent


def _filled(
    questions: Sequence[_Question], joiner: str, tokenizer: Any, length: int, start: int | None
) -> list[Prompt]:
    """The prompts of the questions, of which those that are too long lose their last sentences."""
    found = _prompts(questions, tokenizer, start, joiner)
    for place, question in enumerate(questions):
        # Tokens may join or part where sentences meet, so the sum of their lengths is only nearly the whole's.
        while len(found[place].tokens) + len(found[place].answer) > length:
            question = question._replace(sentences=question.sentences[:-1])
            (found[place],) = _prompts([question], tokenizer, start, joiner)
        _assert_present(found[place], tokenizer)
    return found


def _prompts(questions: Sequence[_Question], tokenizer: Any, start: int | None, joiner: str) -> list[Prompt]:
    texts: list[str] = []
    for sentences, needle, depth in questions:
        document = ruler_single(sentences, needle, depth, joiner=joiner)
        begin, end = document.answers[0]
        texts += [document.text[:begin].removesuffix(" "), document.text[:end]]
    encoded = encode_all(tokenizer, texts)
    found: list[Prompt] = []
    for (_, needle, depth), tokens, whole in zip(questions, encoded[::2], encoded[1::2], strict=True):
        # A tokenizer may join the blank to the digit after it, but must not reach back into the question.
        answer = whole[len(tokens) :] if whole[: len(tokens)] == tokens else encode(tokenizer, f" {needle.value}")
        found.append(Prompt(([] if start is None else [start]) + tokens, answer, needle, depth))
    return found


def _assert_present(prompt: Prompt, tokenizer: Any) -> None:
    needle = prompt.needle
    statement = RULER_NEEDLE.format(kind=f"{needle.kind}s", key=needle.key, value=needle.value)
    seen = squeeze(decode(tokenizer, prompt.tokens))
    answer = squeeze(decode(tokenizer, prompt.answer))
    if squeeze(statement) not in seen or answer != needle.value:
        raise ModelError(
            f"the tokenizer does not give back the needle {statement!r} (answer {answer!r})",
            "NIAH needs a tokenizer that keeps words and digits",
        )
