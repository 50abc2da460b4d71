"""Log-probabilities of given tokens under a model: the one place where an evaluation has a model score.

Rows of a batch are padded on the right. A causal model cannot look ahead, so that padding changes no position before
it, and padded positions are never read: every batch size gives the same numbers up to rounding.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lapcli.errors import ModelError
from lapcli.evaluation.rows import Rows
from lapcli.parallel import ALONE, Processes
from lapcli.reporting import Reporter

# On a GPU, logits of one pass in elements: 1 GB in fp32. On a CPU, tokens of one pass: more of them fall out of the
# caches, and a model of 6 M parameters gets a fifth slower.
_MAX_LOGITS = 1 << 28
_MAX_ROWS = 64
_MAX_CPU_TOKENS = 4096


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
    """

    model: Any
    tokenizer: Any
    name: str
    processes: Processes = ALONE


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
            batch = order[position : position + runner.rows(len(requests[order[position]].tokens) - 1)]
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
        self._rows = Rows(loaded.name, batch_size, self._suits, reporter)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._keeps = "logits_to_keep" in parameters
        self._vocabulary = _vocabulary(loaded.model.config)

    def rows(self, length: int) -> int:
        return self._rows.at(length)

    def run(self, batch: list[Request]) -> list[Scored]:
        """Score the first requests of the batch: all of it, or as many as memory takes."""
        return self._rows.run(batch, self._forward)

    def _suits(self, length: int) -> int:
        if self._loaded.model.device.type == "cpu":
            return max(1, _MAX_CPU_TOKENS // length)
        return min(_MAX_ROWS, max(1, _MAX_LOGITS // (length * self._vocabulary)))

    def _forward(self, batch: Sequence[Request]) -> list[Scored]:
        model = self._loaded.model
        width = max(len(request.tokens) for request in batch) - 1
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, : len(request.tokens) - 1] = torch.tensor(request.tokens[:-1])
        # Position p predicts token p + 1; nothing before the first scored position of any row is needed.
        first = min(len(request.tokens) - 1 - request.scored for request in batch)
        keep = {"logits_to_keep": width - first} if self._keeps and first > 0 else {}
        logits = model(input_ids=ids.to(model.device), use_cache=False, **keep).logits
        offset = width - logits.shape[1]
        return [self._row(logits[row], offset, request) for row, request in enumerate(batch)]

    def _row(self, logits: torch.Tensor, offset: int, request: Request) -> Scored:
        end = len(request.tokens) - 1 - offset
        scored = logits[end - request.scored : end].float()  # [scored, vocabulary]
        targets = torch.tensor(request.tokens[-request.scored :], device=scored.device)
        chosen = scored.gather(1, targets[:, None]).squeeze(1)
        total = float((chosen.double() - scored.logsumexp(1).double()).sum())
        if not math.isfinite(total):
            raise not_numbers(self._loaded.name)
        return Scored(total, bool((scored.argmax(1) == targets).all()))


def _vocabulary(config: Any) -> int:
    text = getattr(config, "text_config", None) or config
    return int(text.vocab_size)
