"""Log-probabilities of given tokens under a model: the one place where an evaluation has a model score.

Rows of a batch are padded on the right. A causal model cannot look ahead, so that padding changes no position before
it, and padded positions are never read: every batch size gives the same numbers up to rounding.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lapcli.errors import ModelError
from lapcli.evaluation.counting import WordCounter
from lapcli.evaluation.rows import Rows, logits_of_a_pass, tokens_of_a_pass, vocabulary_of
from lapcli.evaluation.tokenization import tokenizer_digest
from lapcli.parallel import ALONE, Processes
from lapcli.reporting import Reporter

if TYPE_CHECKING:
    from lapcli.evaluation.captured import CapturedWriter

# Rows of one pass, and logits of it that are looked at together on a GPU, in elements: 1 GB in fp32.
_MAX_ROWS = 1024
_MAX_LOGITS = 1 << 28


class Request(NamedTuple):
    """Tokens, the last `scored` of which are to be scored, each from all before it.

    Attributes:
        tokens: at least `scored + 1`.
        scored: at least 1.
    """

    tokens: Sequence[int]
    scored: int


class Scored(NamedTuple):
    """The answer to a `Request`.

    Attributes:
        log_probability: natural, summed over the scored tokens in fp64.
        greedy: whether each scored token is the most probable one, so that greedy decoding from the tokens before
            them would have given exactly these.
    """

    log_probability: float
    greedy: bool


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer in memory.

    Attributes:
        model: a causal language model in eval mode, on its device.
        tokenizer: fits the model.
        name: for messages.
        processes: those that hold this model and score it together, each its share; all of them call `score` alike.
        writer: what continues prompts faster than the model's own generation, where something does.
    """

    model: Any
    tokenizer: Any
    name: str
    processes: Processes = ALONE
    writer: "CapturedWriter | None" = None

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer's vocabulary and rules, hexadecimal."""
        return tokenizer_digest(self.tokenizer)

    @cached_property
    def words(self) -> WordCounter:
        """Guesses the tokens of texts."""
        return WordCounter(self.tokenizer)

    @cached_property
    def tokenizer_copy(self) -> Any:
        """A tokenizer that may be given a padding token."""
        return copy.deepcopy(self.tokenizer)


def score(
    loaded: LoadedModel,
    requests: Sequence[Request],
    *,
    batch_size: int | None,
    reporter: Reporter,
    description: str,
) -> list[Scored]:
    """Score requests, in any order of lengths.

    Args:
        loaded: the model.
        requests: what to score.
        batch_size: rows per pass; `None`: as many as suit the device. Halved where memory runs out.
        reporter: progress goes here, in tokens.
        description: of the progress.

    Returns:
        One answer a request, in the order of the requests.

    Raises:
        ModelError: the logits are not numbers, or memory runs out on a single row.
        LapcliError: another process ended.
    """
    found = torch.zeros(len(requests), 2, dtype=torch.float64)  # log-probability, greedy
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    order = order[loaded.processes.rank :: loaded.processes.size]
    runner = _Runner(loaded, batch_size, reporter)
    total = sum(len(requests[index].tokens) - 1 for index in order)
    with reporter.task(description, total=total, unit="tokens") as progress, torch.inference_mode():
        position = 0
        while position < len(order):
            batch = order[
                position : position + runner.rows([requests[index] for index in order[position : position + _MAX_ROWS]])
            ]
            answers = runner.run([requests[index] for index in batch])
            for index, answer in zip(batch, answers, strict=False):
                found[index] = torch.tensor(answer, dtype=torch.float64)
                position += 1
                progress.advance(len(requests[index].tokens) - 1)
    # Each row was filled by one process and is zeros elsewhere.
    loaded.processes.add([found])
    return [Scored(total, bool(greedy)) for total, greedy in found.tolist()]


def not_numbers(name: str) -> ModelError:
    """The error for a model whose logits are NaN."""
    return ModelError(
        f"{name} gives logits that are not numbers", "inspect its weights; in fp16, try --dtype bfloat16 or float32"
    )


class _Runner:
    """Runs one batch."""

    def __init__(self, loaded: LoadedModel, batch_size: int | None, reporter: Reporter):
        self._loaded = loaded
        self._rows = Rows(loaded.name, batch_size, reporter)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._keeps = "logits_to_keep" in parameters
        self._on_cpu = loaded.model.device.type == "cpu"
        self._most_tokens, self._most_logits = tokens_of_a_pass(loaded.model), logits_of_a_pass(loaded.model)

    def rows(self, waiting: Sequence[Request]) -> int:
        """How many of the requests, the longest of which comes first, make one batch."""
        width = len(waiting[0].tokens) - 1
        vocabulary = vocabulary_of(self._loaded.model.config)
        first = width
        for count, request in enumerate(waiting, 1):
            first = min(first, self._first([request]))
            if count * width > self._most_tokens or count * (width - first) * vocabulary > self._most_logits:
                return self._rows.at(count - 1)
        return self._rows.at(len(waiting))

    def run(self, batch: list[Request]) -> list[Scored]:
        """Score the first requests of the batch: all of it, or as many as memory takes."""
        return self._rows.run(batch, self._forward)

    def _first(self, batch: Sequence[Request]) -> int:
        """The first position whose logits are needed. Position p predicts token p + 1."""
        return min(len(request.tokens) - 1 - request.scored for request in batch) if self._keeps else 0

    def _forward(self, batch: Sequence[Request]) -> list[Scored]:
        model = self._loaded.model
        width = max(len(request.tokens) for request in batch) - 1
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, : len(request.tokens) - 1] = torch.tensor(request.tokens[:-1])
        first = self._first(batch)
        keep = {"logits_to_keep": width - first} if first > 0 else {}
        logits = model(input_ids=ids.to(model.device), use_cache=False, **keep).logits
        offset = width - logits.shape[1]
        if self._on_cpu:
            return [self._row(logits[row], offset, request) for row, request in enumerate(batch)]
        return self._together(logits, offset, batch)

    def _row(self, logits: torch.Tensor, offset: int, request: Request) -> Scored:
        """The answer to one request, from logits `[T, vocabulary]` of the positions from `offset` on."""
        end = len(request.tokens) - 1 - offset
        scored = logits[end - request.scored : end].float()  # [scored, vocabulary]
        targets = torch.tensor(request.tokens[-request.scored :], device=scored.device)
        chosen = scored.gather(1, targets[:, None]).squeeze(1)
        total = float((chosen.double() - scored.logsumexp(1).double()).sum())
        return self._scored(total, bool((scored.argmax(1) == targets).all()))

    def _together(self, logits: torch.Tensor, offset: int, batch: Sequence[Request]) -> list[Scored]:
        """The answers to all requests of a batch, for which the host waits once; the arithmetic is `_row`'s."""
        counts = torch.tensor([request.scored for request in batch])
        ends = torch.tensor([len(request.tokens) - 1 - offset for request in batch])
        row = torch.repeat_interleave(torch.arange(len(batch)), counts)
        place = (ends - counts.cumsum(0))[row] + torch.arange(len(row))
        targets = torch.tensor([token for request in batch for token in request.tokens[-request.scored :]])
        parts: list[torch.Tensor] = []
        where = torch.stack([row, place, targets]).to(logits.device)
        for rows, places, wanted in (part.unbind() for part in where.split(max(1, _MAX_LOGITS // logits.shape[-1]), 1)):
            scored = logits[rows, places].float()
            chosen = scored.gather(1, wanted[:, None]).squeeze(1)
            greedy = scored.argmax(1) == wanted
            parts.append(torch.stack([chosen.double() - scored.logsumexp(1).double(), greedy.double()]))
        tokens = torch.cat(parts, 1).cpu().split(counts.tolist(), 1)
        return [self._scored(float(each[0].sum()), bool(each[1].all())) for each in tokens]

    def _scored(self, total: float, greedy: bool) -> Scored:
        if not math.isfinite(total):
            raise not_numbers(self._loaded.name)
        return Scored(total, greedy)
