"""Traces of requests: when each came, how long its prompt and its answer were; and sessions made of them."""

import contextlib
import csv
import io
import lzma
import math
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.errors import DataError, UsageError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Of the Azure LLM inference traces of 2023."""
BUCKETS = (0, 2048, 4096, 8192)
"""From how many tokens of a prompt on each of the paper's classes begins (arXiv 2506.09316, table 4)."""
PAPER_SHARES = (64.68, 16.16, 16.03, 3.10)
"""Percent of the requests of the paper's replay in each class."""


class Arrival(NamedTuple):
    """A line of a trace.

    Attributes:
        seconds: after the first.
        prompt: tokens.
        answer: tokens.
    """

    seconds: float
    prompt: int
    answer: int


class Turn(NamedTuple):
    """A request of a session.

    Attributes:
        seconds: after the first.
        session: number of it.
        parts: tokens of what was said so far, by turns: a prompt, its answer, the next prompt, …, this prompt.
        answer: tokens.
        prompt: tokens of the whole prompt, after what was cut off its beginning.
    """

    seconds: float
    session: int
    parts: tuple[int, ...]
    answer: int
    prompt: int


class Fitted(NamedTuple):
    """Requests that a model's window takes.

    Attributes:
        turns: they.
        prompts_cut: of how many the prompt lost its beginning.
        answers_cut: of how many the answer is shorter than in the trace.
    """

    turns: list[Turn]
    prompts_cut: int
    answers_cut: int


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace, a CSV file as it is or packed by xz, in the order of time.

    Raises:
        DataError: it cannot be read, has other columns, or a line that is none; or it is empty.
    """
    try:
        packed = path.read_bytes()
        text = (lzma.decompress(packed) if path.suffix == ".xz" else packed).decode("utf-8-sig")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        if isinstance(error, OSError):
            why = error.strerror
        elif isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start} is of no UTF-8 text"
        else:
            why = f"what xz packed is damaged, or something else ({error})"
        raise DataError(f"cannot read {path}: {why}", "name a CSV file, or one packed by xz") from error
    lines = csv.DictReader(io.StringIO(text))
    try:
        found = _requests(lines, path)
    except csv.Error as error:
        raise DataError(f"line {lines.line_num + 1} of {path} is no line of a CSV file: {error}") from error
    if not found:
        raise DataError(f"{path} holds no request")
    found.sort(key=lambda each: each[0])
    first = found[0][0]
    # What generates nothing, or from nothing, still asks for a token from a token.
    return [Arrival(at - first, max(1, prompt), max(1, answer)) for at, prompt, answer in found]


def _requests(lines: "csv.DictReader[str]", path: Path) -> list[tuple[float, int, int]]:
    """What lines hold of `COLUMNS`, as they lie."""
    missing = [name for name in COLUMNS if name not in (lines.fieldnames or ())]
    if missing:
        raise DataError(f"{path} has no column {missing[0]}", f"the first line names them: {','.join(COLUMNS)}")
    found: list[tuple[float, int, int]] = []
    for line in lines:
        values: list[Any] = []
        for name, (read, wanted) in zip(COLUMNS, _READERS, strict=True):
            text, value = line[name], None
            with contextlib.suppress(ValueError, OverflowError):
                value = None if text is None else read(text)
            if value is None:
                what = "is missing" if text is None else f"is {text[:80]!r}"
                raise DataError(f"line {lines.line_num} of {path}: {name} {what}, and {wanted} is wanted")
            values.append(value)
        found.append((values[0], values[1], values[2]))
    return found


def _seconds(text: str) -> float:
    """A time stamp; those of Azure have seven digits of a second, one more than Python reads."""
    whole, _, fraction = text.strip().partition(".")
    if fraction and not fraction.isdecimal():
        raise ValueError(fraction)
    return datetime.fromisoformat(whole).timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _tokens(text: str) -> int | None:
    """A number of tokens; `None` for what is none."""
    number = int(text)
    return number if number >= 0 else None


_READERS = (
    (_seconds, "a time such as 2023-11-16 18:15:46.6805900"),
    *[(_tokens, "a whole number of tokens, 0 or more,")] * 2,
)
"""Of `COLUMNS`: what reads the text, and what is wanted."""


def make_sessions(arrivals: Sequence[Arrival], mean_turns: float, seed: int) -> list[Turn]:
    """Make conversations of requests that a trace tells nothing about but their lengths.

    A session has a number of turns drawn from Poisson's distribution with `mean_turns`, at least one. Each request in
    turn opens a new session, by the chance that keeps their number steady, or goes on with one of those that are open,
    each as likely; its prompt is all that the session said before, and then its own tokens.

    Args:
        arrivals: of a trace.
        mean_turns: 0 for requests without history.
        seed: of the draws.

    Source: arXiv 2506.09316, appendix C, which says "Poisson(3)" and "concatenated", and leaves the rest open.
    """
    draw = random.Random(seed)
    opens = 1.0 if mean_turns <= 0 else 1 / (mean_turns + math.exp(-mean_turns))
    open_sessions: list[tuple[int, list[int], int]] = []
    count = 0
    turns: list[Turn] = []
    for seconds, prompt, answer in arrivals:
        if not open_sessions or draw.random() < opens:
            left = max(1, _poisson(draw, mean_turns)) if mean_turns > 0 else 1
            open_sessions.append((count, [], left))
            count += 1
            place = len(open_sessions) - 1
        else:
            place = draw.randrange(len(open_sessions))
        number, said, left = open_sessions[place]
        parts = (*said, prompt)
        turns.append(Turn(seconds, number, parts, answer, sum(parts)))
        if left == 1:
            # The order of open sessions means nothing.
            open_sessions[place] = open_sessions[-1]
            open_sessions.pop()
        else:
            open_sessions[place] = (number, [*parts, answer], left - 1)
    return turns


def _poisson(draw: random.Random, mean: float) -> int:
    """A number by Poisson's distribution, by Knuth's product of uniform ones."""
    bound, product, count = math.exp(-mean), draw.random(), 0
    while product > bound:
        product *= draw.random()
        count += 1
    return count


def fit(turns: Sequence[Turn], window: int) -> Fitted:
    """Cut prompts, from the beginning, so that they and their answers are within a window of tokens.

    Raises:
        UsageError: the window holds no prompt and answer.
    """
    if window < 2:
        raise UsageError(f"a window of {window} tokens holds no prompt and answer")
    fitted: list[Turn] = []
    prompts = answers = 0
    for turn in turns:
        # An answer that fills the window would leave nothing to answer to.
        answer = min(turn.answer, window // 2) if turn.prompt + turn.answer > window else turn.answer
        prompt = min(turn.prompt, window - answer)
        prompts += prompt < turn.prompt
        answers += answer < turn.answer
        fitted.append(turn._replace(prompt=prompt, answer=answer))
    return Fitted(fitted, prompts, answers)


def scaled(arrivals: Sequence[Arrival], time_scale: float, length_scale: float) -> list[Arrival]:
    """A trace that takes another time, with other lengths.

    Args:
        arrivals: it.
        time_scale: seconds for each of its seconds; 0.5 sends twice as fast.
        length_scale: tokens for each of its tokens.

    Raises:
        UsageError: one is not above 0.
    """
    for name, value in (("time", time_scale), ("length", length_scale)):
        if not 0 < value < math.inf:
            raise UsageError(f"--{name}-scale {value}: above 0", f"--{name}-scale 1 leaves it as it is")
    return [
        Arrival(
            each.seconds * time_scale,
            max(1, round(each.prompt * length_scale)),
            max(1, round(each.answer * length_scale)),
        )
        for each in arrivals
    ]


def shares(prompts: Sequence[int]) -> list[float]:
    """Percent of prompts in each of `BUCKETS`."""
    ends = (*BUCKETS[1:], math.inf)
    return [
        100 * sum(low <= prompt < high for prompt in prompts) / max(1, len(prompts))
        for low, high in zip(BUCKETS, ends, strict=True)
    ]
