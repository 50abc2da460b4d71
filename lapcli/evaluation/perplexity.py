"""Perplexity of texts in rolling windows, per token and per word.

A text is scored token by token. Its first window predicts up to `max_length` tokens, the first of them from a start
token (see `tokenization.text_start`); each later window predicts the next `stride` tokens with as much of the text
before them as fits. With the default stride these are the windows of lm-eval's `loglikelihood_rolling`. Windows are the
items of the standard error (delta method), which takes them for independent.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lapcli.data.builtin import documents_digest
from lapcli.data.documents import Document
from lapcli.errors import DataError
from lapcli.evaluation.draws import draw
from lapcli.evaluation.estimates import perplexity
from lapcli.evaluation.results import Score
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.tokenization import encode, text_start, token_name
from lapcli.reporting import Reporter


class Window(NamedTuple):
    """One window of one text.

    Attributes:
        request: its tokens, and how many of them it scores.
        words: its share of the text's words, by tokens; over all windows of a text they sum to its words.
    """

    request: Request
    words: float


def rolling_windows(tokens: Sequence[int], start: int | None, max_length: int, stride: int) -> Iterator[Request]:
    """Cut one text into windows that score each of its tokens once (but the first, without a start token).

    Args:
        tokens: the text.
        start: the token that the first one is predicted from, or `None`.
        max_length: most tokens that go into the model at once.
        stride: most tokens that a window after the first scores, at most `max_length`.
    """
    tokens = list(tokens) if start is None else [start, *tokens]
    last = len(tokens) - 1  # the model never reads the last token
    scored = 0
    while scored < last:
        new = min(max_length if scored == 0 else stride, last - scored)
        scored += new
        yield Request(tokens[max(0, scored - max_length) : scored + 1], new)


def text_windows(
    documents: Sequence[Document], tokenizer: object, *, start: int | None, max_length: int, stride: int
) -> list[Window]:
    """The windows of all documents, in order. Words are what stands between white space."""
    windows: list[Window] = []
    for document in documents:
        requests = list(rolling_windows(encode(tokenizer, document.text), start, max_length, stride))
        tokens = sum(request.scored for request in requests)
        words = len(document.text.split())
        windows += [Window(request, words * request.scored / tokens) for request in requests]
    return windows


def measure_perplexity(
    task: str,
    documents: Sequence[Document],
    loaded: LoadedModel,
    settings: EvaluationSettings,
    *,
    max_length: int,
    batch_size: int | None,
    reporter: Reporter,
) -> list[Score]:
    """Token and word perplexity of documents, each scored by itself.

    Args:
        task: its name, for the scores.
        documents: the texts.
        loaded: the model.
        settings: `stride`, `bos`, `limit` (windows, drawn with `seed`) are read.
        max_length: tokens of a window.
        batch_size: rows per pass, `None` for automatic.
        reporter: progress goes here.

    Raises:
        DataError: the documents hold no token to score.
    """
    stride = min(settings.stride or max_length, max_length)
    start = text_start(loaded.tokenizer, settings.bos)
    windows = text_windows(documents, loaded.tokenizer, start=start, max_length=max_length, stride=stride)
    windows = draw(windows, settings.limit, settings.seed)
    if not windows or not any(window.words for window in windows):
        raise DataError(f"{task} holds no text to score")
    answers = score(
        loaded,
        [window.request for window in windows],
        batch_size=batch_size,
        reporter=reporter,
        description=f"{task} on {loaded.name}",
    )
    log_likelihoods = [answer.log_probability for answer in answers]
    tokens = [window.request.scored for window in windows]
    words = [window.words for window in windows]
    shared = {
        "max_length": max_length,
        "stride": stride,
        "bos": settings.bos,
        "start_token": token_name(loaded.tokenizer, start),
        "limit": settings.limit,
        "seed": None if settings.limit is None else settings.seed,
        "data": documents_digest(list(documents)),
        "tokenizer": loaded.tokenizer_digest,
    }
    counts = {"windows": len(windows), "tokens": sum(tokens), "words": round(sum(words))}
    return [
        Score(task, "token_perplexity", False, perplexity(log_likelihoods, tokens), shared, counts=counts),
        Score(task, "word_perplexity", False, perplexity(log_likelihoods, words), shared, counts=counts),
    ]
