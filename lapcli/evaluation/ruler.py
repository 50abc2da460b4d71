"""RULER's tasks (`ruler_texts`), filled up to a length in tokens, written by the model, scored by RULER's metric.

A prompt and the tokens that are written after it never exceed the length. How much haystack fits is found by bisection.
Sizes that are clear from the tokens of their words are not tokenised (`counting`); what is returned was, and was seen
to fit, and the search ends whatever the tokenizer does. What a prompt states is looked for in the *decoded* prompt.

The score of a prompt is the share of its answers that the text written after it contains, upper and lower case being
the same (RULER's "string match all"). More text cannot lose an answer that is there, so that a row ends as soon as it
has all of them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lapcli.errors import ModelError
from lapcli.evaluation.counting import WordCounter
from lapcli.evaluation.decoding import Writing, stop_tokens, write_greedily
from lapcli.evaluation.estimates import accuracy, mean
from lapcli.evaluation.made import Made
from lapcli.evaluation.misfit import Misfit, say
from lapcli.evaluation.results import Score
from lapcli.evaluation.ruler_texts import RULER_TASKS, Material, RulerTask, RulerText
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import DEFAULT_RULER_LENGTHS, EvaluationSettings
from lapcli.evaluation.tokenization import (
    decode,
    encode,
    encode_all,
    prompt_start,
    squeeze,
    token_name,
)
from lapcli.reporting import Reporter

FORM = "RULER, string match all"
METRIC = "string_match"
# The search for the size stops this close to the largest, as a part of it.
_CLOSE = 128
# Tokens that a guess from words may be off, before it is believed no more, and those within which it decides nothing.
_OFF = 2
_DOUBT = 4
# Prompts, and tokens of prompts, that a tokenizer is given at once.
_TOGETHER = 64
_TOKENS_TOGETHER = 1 << 19


class RulerPrompt(NamedTuple):
    """One question in tokens.

    Attributes:
        tokens: the prompt.
        text: what it was made from.
    """

    tokens: list[int]
    text: RulerText


def make_prompts(
    name: str,
    material: Material,
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    seed: int,
    start: int | None,
    counter: WordCounter | None = None,
) -> list[RulerPrompt] | Misfit:
    """The prompts of one task and length.

    Args:
        name: of the task, one of `RULER_TASKS`.
        material: what they are made of.
        tokenizer: the model's.
        length: most tokens of a prompt with what is written after it.
        samples: how many.
        seed: with the task, the length and the sample's number the only source of chance.
        start: a token that each prompt begins with, or `None`.
        counter: one of this tokenizer, which knows words of other prompts.

    Returns:
        The prompts, or why there are none.

    Raises:
        ModelError: the tokenizer loses what the prompt states.
    """
    search = _Search(name, material, tokenizer, length, seed, start, counter or WordCounter(tokenizer))
    together = max(1, min(_TOGETHER, _TOKENS_TOGETHER // length))
    prompts: list[RulerPrompt] = []
    size = search.task.smallest
    while len(prompts) < samples:
        sizes: list[int] = []
        misfit: Misfit | None = None
        for sample in range(len(prompts), min(samples, len(prompts) + together)):
            found = search.size(sample, sizes[-1] if sizes else size)
            if isinstance(found, Misfit):
                misfit = found
                break
            sizes.append(found)
        made = search.prompts(len(prompts), sizes)
        for prompt in made:
            _assert_readable(name, prompt, tokenizer)
        prompts += made
        # Where the words said something else than the tokenizer does, it is asked from there on.
        if len(made) == len(sizes) and misfit is not None:
            return misfit
        size = sizes[len(made) - 1] if made else size
    return prompts


class _Search:
    """Finds how much haystack fits, by as few texts in tokens as may be.

    Args:
        name: of the task.
        material: of the prompts.
        tokenizer: the model's.
        length: most tokens of a prompt with what is written after it.
        seed: of the prompts.
        start: a token that each prompt begins with, or `None`.
        counter: guesses the tokens of a text.

    Attributes:
        task: by its name.
    """

    def __init__(
        self,
        name: str,
        material: Material,
        tokenizer: Any,
        length: int,
        seed: int,
        start: int | None,
        counter: WordCounter,
    ):
        self.task, self._counter = RULER_TASKS[name], counter
        self._name, self._length, self._tokenizer = name, length, tokenizer
        self._text = partial(_text, name, material, length, seed)
        self._start = [] if start is None else [start]
        self._room = length - self.task.written - len(self._start)
        self._largest = min(length, self.task.largest(material) or length)  # a unit takes a token at least
        self._counted: dict[tuple[int, int], list[int]] = {}

    def size(self, sample: int, guess: int) -> int | Misfit:
        """The largest size of a sample, or one nearly as large.

        Sizes of which the words leave no doubt are not tokenised. `prompts` does so with what was found.

        Args:
            sample: its number.
            guess: where the search begins.
        """
        smallest = self.task.smallest
        if not self._fits(sample, smallest):
            needed = self._length - self._room + len(self._tokens(sample, smallest))
            # Where only the words say so, `prompts` finds that they are wrong.
            if needed > self._length:
                return Misfit(self._name, self._length, needed)
        return largest_size(partial(self._fits, sample), smallest, self._largest, guess)

    def prompts(self, first: int, sizes: Sequence[int]) -> list[RulerPrompt]:
        """The prompts of the samples from `first` on, up to one where the guess was wrong, and is believed no more."""
        places = list(enumerate(sizes, first))
        texts = {place: self._text(*place) for place in places}
        missing = [place for place in places if place not in self._counted]
        tokens = encode_all(self._tokenizer, [texts[place].prompt for place in missing])
        self._counted |= dict(zip(missing, tokens, strict=True))
        found: list[RulerPrompt] = []
        for place in places:
            if self._counter.believed:
                off = abs(self._counter.guess(texts[place].prompt) - len(self._counted[place]))
                self._counter.believed = off <= _OFF
                if not self._counter.believed:
                    break
            found.append(RulerPrompt([*self._start, *self._counted[place]], texts[place]))
        self._counted.clear()
        return found

    def _fits(self, sample: int, size: int) -> bool:
        if self._counter.believed:
            guess = self._counter.guess(self._text(sample, size).prompt)
            if abs(guess - self._room) > _DOUBT:
                return guess <= self._room
        return len(self._tokens(sample, size)) <= self._room

    def _tokens(self, sample: int, size: int) -> list[int]:
        if (sample, size) not in self._counted:
            self._counted[sample, size] = encode(self._tokenizer, self._text(sample, size).prompt)
        return self._counted[sample, size]


def largest_size(fits: Callable[[int], bool], smallest: int, largest: int, guess: int) -> int:
    """The largest size that fits, or one that fits and is less than a hundredth smaller.

    Args:
        fits: whether a size does.
        smallest: one that fits; it is not asked about.
        largest: the search ends there.
        guess: where it begins.

    Returns:
        A size that was seen to fit, or `smallest`.
    """
    low, high = smallest, largest + 1  # what fits, and what does not or is out of bounds
    size = max(guess, smallest + 1)
    step = max(1, size // 16)
    # Outwards from the guess in steps that double, until the largest lies between two sizes.
    while low < size < high:
        if fits(size):
            low, size = size, size + step
        else:
            high, size = size, size - step
        step *= 2
    while high - low > max(1, low // _CLOSE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def misfits(
    names: Sequence[str],
    material: Material,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    seed: int,
    start: int | None,
) -> dict[str, list[Misfit]]:
    """The lengths that have no room for a task, of those tasks that there are any of; the first prompt shows it.

    Args:
        names: of tasks.
        material: as for `make_prompts`, as are the others.
        tokenizer: the model's.
        lengths: to be looked at.
        seed: of the prompts.
        start: a token that each prompt begins with, or `None`.
    """
    found: dict[str, list[Misfit]] = {}
    for name in names:
        task = RULER_TASKS[name]
        for length in lengths:
            first = encode(tokenizer, _text(name, material, length, seed, 0, task.smallest).prompt)
            if (needed := len(first) + (start is not None) + task.written) > length:
                found.setdefault(name, []).append(Misfit(name, length, needed))
    return found


def measure_ruler(
    name: str,
    material: Material,
    loaded: LoadedModel,
    settings: EvaluationSettings,
    *,
    batch_size: int | None,
    reporter: Reporter,
    made: Made | None = None,
) -> list[Score]:
    """The share of answers that the model gives, for each length that has room for the task.

    Args:
        name: of the task, one of `RULER_TASKS`.
        material: what the prompts are made of.
        loaded: the model.
        settings: `ruler_lengths`, `niah_samples` (`limit` overrides it), `bos` and `seed` are read. Without lengths
            the default ones are taken.
        batch_size: rows per pass, `None` for automatic.
        reporter: progress goes here.
        made: keeps prompts for other models, of the same settings and material.

    Returns:
        One score a length. Those of a task that another length had no room for say so in their notes.

    Raises:
        ModelError: the tokenizer loses what a prompt states, the logits are not numbers, or memory runs out.
    """
    task, tokenizer = RULER_TASKS[name], loaded.tokenizer
    start = prompt_start(tokenizer, settings.bos)
    samples = settings.limit or settings.niah_samples
    scores: list[Score] = []
    left_out: list[Misfit] = []
    for length in dict.fromkeys(settings.ruler_lengths or DEFAULT_RULER_LENGTHS):
        make = partial(
            make_prompts, name, material, tokenizer,
            length=length, samples=samples, seed=settings.seed, start=start, counter=loaded.words,
        )  # fmt: skip
        prompts = make() if made is None else made.prompts((name, loaded.tokenizer_digest, length), make)
        if isinstance(prompts, Misfit):
            left_out.append(prompts)
            continue
        shares = _shares(
            prompts,
            task,
            loaded,
            batch_size=batch_size,
            reporter=reporter,
            description=f"{name} {length} on {loaded.name}",
        )
        one = all(len(prompt.text.answers) == 1 for prompt in prompts)
        scores.append(
            Score(
                task=name,
                metric=METRIC,
                higher_is_better=True,
                estimate=accuracy([share == 1 for share in shares]) if one else mean(shares),
                settings={
                    "form": FORM,
                    "samples": samples,
                    "written": task.written,
                    "bos": settings.bos,
                    "start_token": token_name(tokenizer, start),
                    "seed": settings.seed,
                    "data": task.data(material),
                    "tokenizer": loaded.tokenizer_digest,
                },
                length=length,
                counts={"tokens": sum(len(prompt.tokens) for prompt in prompts)},
            )
        )
    if not left_out:
        return scores
    said = say(left_out)
    if not scores:
        reporter.warn(f"{name} {said}")
    return [replace(score, notes=(said,)) for score in scores]


def string_match(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that a text contains, upper and lower case being the same."""
    low = text.lower()
    return sum(answer.lower() in low for answer in answers) / len(answers)


def _text(name: str, material: Material, length: int, seed: int, sample: int, size: int) -> RulerText:
    # Seeded by text, which Python hashes the same way in every version.
    rng = random.Random(f"{name} {seed} {length} {sample}")
    return RULER_TASKS[name].build(rng, size, length, material)


def _shares(
    prompts: Sequence[RulerPrompt],
    task: RulerTask,
    loaded: LoadedModel,
    *,
    batch_size: int | None,
    reporter: Reporter,
    description: str,
) -> list[float]:
    """For each prompt the share of its answers in what the model writes."""
    ours, tokenizer = loaded.processes, loaded.tokenizer

    def share(written: list[int], prompt: RulerPrompt) -> float:
        return string_match(tokenizer.decode(written, skip_special_tokens=True), prompt.text.answers)

    mine = range(len(prompts))[ours.rank :: ours.size]
    written = write_greedily(
        loaded,
        [
            Writing(
                prompts[index].tokens, task.written, lambda tokens, prompt=prompts[index]: share(tokens, prompt) == 1
            )
            for index in mine
        ],
        stop=stop_tokens(loaded),
        batch_size=batch_size,
        reporter=reporter,
        description=description,
    )
    found = torch.zeros(len(prompts), dtype=torch.float64)
    for index, tokens in zip(mine, written, strict=True):
        found[index] = share(tokens, prompts[index])
    # Each place was filled by one process and is zero elsewhere.
    ours.add([found])
    return found.tolist()


def _assert_readable(name: str, prompt: RulerPrompt, tokenizer: Any) -> None:
    text = decode(tokenizer, prompt.tokens)
    if text == prompt.text.prompt and all(fact in text for fact in prompt.text.facts):
        return
    seen, meant = squeeze(text), squeeze(prompt.text.prompt)
    for fact in map(squeeze, prompt.text.facts):
        if not 0 < meant.count(fact) <= seen.count(fact):
            raise ModelError(
                f"the tokenizer does not give back {fact!r} of a prompt of {name}",
                "RULER needs a tokenizer that keeps words and digits",
            )
