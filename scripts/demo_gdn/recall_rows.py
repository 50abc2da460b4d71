"""Rows of recall documents, made in worker processes while the GPU's code is compiled.

A row is `[length + 1]` tokens: whole documents each followed by the boundary token, and running text in what is left.
Half of the rows begin with the boundary token too, as a prompt may or may not. Tokens of an asked-for value carry
`FLAG`, so that the loss can weigh them.
"""

import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool
from typing import NamedTuple

import numpy as np

from demo_gdn.vocabulary import BOUNDARY, load_tokenizer_json
from lapcli.data.documents import Document
from lapcli.data.recall import Haystack, RecallDocument, RecallMix, recall_documents

FLAG = 1 << 14
"""Added to the ids of answer tokens in rows of training data; the vocabulary is smaller."""

_CHARACTERS_PER_TOKEN = (2.3, 3.6)
"""Code takes many tokens, novels few; a document's size is drawn in between, so that both reach the row's length."""
_LONGEST_SENTENCE = 1500
"""In characters. Documentation holds tables and code, which count as one long sentence each."""
_ROWS_PER_JOB = 256


class Stage(NamedTuple):
    """One step of the curriculum.

    Attributes:
        lengths: of the documents, in tokens, with weights.
        mix: which layouts.
        rows: how many are made, relative to the first stage: the last one is drawn from for most of the run.
    """

    lengths: dict[int, float]
    mix: RecallMix
    rows: int = 1


STAGES = (
    Stage({256: 1.0}, RecallMix(list=0.45, text=0.25, ruler=0.3, single=0.15, max_entries=8)),
    Stage({256: 0.25, 512: 0.75}, RecallMix(list=0.3, text=0.3, ruler=0.4, single=0.2, max_entries=10)),
    Stage({256: 0.08, 512: 0.12, 1024: 0.8}, RecallMix(list=0.12, text=0.28, ruler=0.6, single=0.45), rows=3),
)


class RowMaker:
    """Makes rows in processes of its own.

    Construct it before CUDA is initialised: the processes are forked.

    Args:
        tokenizer_json: the tokenizer.
        haystack: running text.
        filler: tokens of running text.
        length: tokens of a row, without the last target.
        workers: processes.
    """

    def __init__(self, tokenizer_json: str, haystack: list[str], filler: np.ndarray, length: int, workers: int):
        global _shared
        _shared = _Shared(tokenizer_json, Haystack(haystack, _LONGEST_SENTENCE), filler, length)
        self._pool: Pool = multiprocessing.get_context("fork").Pool(workers)
        self._jobs: list[list[AsyncResult[np.ndarray]]] = []

    def start(self, rows: int, seed: int) -> None:
        """Begin to make `rows` rows for the first stage and `rows_of_stage` for the others, the first stage first."""
        self._jobs = [
            [
                self._pool.apply_async(_make_rows, (stage, seed * 100_003 + stage * 10_007 + job, _ROWS_PER_JOB))
                for job in range(rows_of_stage(stage, rows) // _ROWS_PER_JOB)
            ]
            for stage in range(len(STAGES))
        ]

    def needles(
        self, texts: dict[str, list[str]], lengths: tuple[int, ...], count: int, seed: int
    ) -> dict[str, "AsyncResult[tuple[np.ndarray, float]]"]:
        """Begin to make evaluation prompts (`single_needle_rows`), named by running text and length.

        Args:
            texts: running text by kind; RULER's repeated sentences, which need none, are added as `noise`.
            lengths: of the prompts, in tokens.
            count: prompts of each kind and length.
            seed: of keys, numbers, places.
        """
        kinds = {**texts, "noise": next(iter(texts.values()))}
        return {
            f"niah_{kind}_{length}": self._pool.apply_async(
                single_needle_rows,
                (_shared.tokenizer_json, found),
                {"length": length, "count": count, "noise": kind == "noise", "seed": seed},
            )
            for length in lengths
            for kind, found in kinds.items()
        }

    def stage(self, index: int) -> np.ndarray:
        """The rows of one stage `[rows, length + 1]`; waits for them."""
        return np.concatenate([job.get() for job in self._jobs[index]])

    def close(self) -> None:
        """End the processes."""
        self._pool.terminate()
        self._pool.join()


def rows_of_stage(stage: int, rows: int) -> int:
    """How many rows a stage gets where `rows` are asked for: whole jobs."""
    return STAGES[stage].rows * _ROWS_PER_JOB * max(1, -(-rows // _ROWS_PER_JOB))


class _Shared(NamedTuple):
    tokenizer_json: str
    haystack: Haystack
    filler: np.ndarray
    length: int


_shared: _Shared


def encode(tokenizer_json: str, documents: list[RecallDocument]) -> list[np.ndarray]:
    """The tokens of each document, those of answers flagged."""
    tokenizer = load_tokenizer_json(tokenizer_json)
    encoded: list[np.ndarray] = []
    for document in documents:
        result = tokenizer.encode(document.text, add_special_tokens=False)
        ids = np.asarray(result.ids, dtype=np.int16)
        # Byte-level tokens lie in order without gaps: a token answers if it overlaps an answer's span.
        starts, ends = np.asarray(result.offsets).T
        for start, end in document.answers:
            ids[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end)] += FLAG
        encoded.append(ids)
    return encoded


def _make_rows(stage: int, seed: int, count: int) -> np.ndarray:
    tokenizer_json, haystack, filler, length = _shared
    lengths, mix, _ = STAGES[stage]
    boundary = load_tokenizer_json(tokenizer_json).token_to_id(BOUNDARY)
    rng = random.Random(seed)

    def draw_size(chance: random.Random) -> int:
        tokens = min(chance.choices(list(lengths), list(lengths.values()))[0], length)
        return max(500, int(tokens * chance.uniform(*_CHARACTERS_PER_TOKEN)))

    documents = _tokens_of(recall_documents(haystack, seed=seed, size=draw_size, mix=mix), tokenizer_json)
    rows = np.full((count, length + 1), boundary, dtype=np.int16)
    waiting = next(documents)
    for row in rows:
        used = rng.randrange(2)
        while len(waiting) <= length - used:
            row[used : used + len(waiting)] = waiting
            used += len(waiting) + 1
            waiting = next(documents)
        while len(waiting) > length - 1:  # fits in no row
            waiting = next(documents)
        missing = len(row) - used
        if missing > 0:
            start = rng.randrange(max(1, len(filler) - missing))
            row[used:] = filler[start : start + missing].astype(np.int16)
    return rows


def _tokens_of(documents: Iterator[RecallDocument], tokenizer_json: str) -> Iterator[np.ndarray]:
    while True:
        yield from encode(tokenizer_json, [next(documents) for _ in range(16)])


def single_needle_rows(
    tokenizer_json: str, texts: list[str], *, length: int, count: int, noise: bool, seed: int
) -> tuple[np.ndarray, float]:
    """The prompts of `lapcli eval niah`, with their answers, padded on the right.

    Args:
        tokenizer_json: the tokenizer.
        texts: held-out running text.
        length: tokens of a whole prompt with its answer, at most.
        count: prompts.
        noise: RULER's repeated sentences instead of running text.
        seed: of keys, numbers, places; depths are spread evenly.

    Returns:
        Rows `[count, length]` with flagged answers, and their mean length.
    """
    from transformers import PreTrainedTokenizerFast

    from lapcli.evaluation.niah import Haystack as NiahHaystack
    from lapcli.evaluation.niah import make_prompts, noise_documents

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer_json(tokenizer_json))
    documents = noise_documents() if noise else [Document(str(index), text) for index, text in enumerate(texts)]
    haystack = NiahHaystack(documents, tokenizer, "\n" if noise else " ")
    prompts = make_prompts(haystack, tokenizer, length=length, samples=count, seed=seed, start=None)
    boundary = load_tokenizer_json(tokenizer_json).token_to_id(BOUNDARY)
    rows = np.full((count, length), boundary, dtype=np.int16)
    for row, prompt in zip(rows, prompts, strict=True):
        begin, end = len(prompt.tokens), len(prompt.tokens) + len(prompt.answer)
        row[:begin] = prompt.tokens
        row[begin:end] = prompt.answer
        row[begin:end] += FLAG
    return rows, sum(len(prompt.tokens) + len(prompt.answer) for prompt in prompts) / count
