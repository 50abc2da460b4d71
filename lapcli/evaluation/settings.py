"""What the numbers of an evaluation depend on, and apart from it what only its speed depends on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lapcli.errors import UsageError
from lapcli.parallel import ALONE, Processes

DEFAULT_MAX_LENGTH = 2048
MIN_MAX_LENGTH = 2
DEFAULT_RULER_LENGTHS = (1024, 2048, 4096)

Bos = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of the measurement; each number is stored with those that it depends on.

    Attributes:
        max_length: tokens of a window of text, or of a request to lm-eval. `None`: 2048, or what the shortest of
            the models takes.
        stride: tokens that each window scores anew, the rest being context. `None`: all of them, each window
            after a text's first seeing one token before it, as lm-eval's rolling windows do.
        bos: `auto`: a text is scored from the tokenizer's BOS (or else EOS) token, and prompts begin with one where
            the tokenizer itself adds it. `always`: prompts too. `never`: a text's first token is context only.
        limit: items per task: windows of text (drawn with the seed), documents of an lm-eval task (the first),
            prompts of each length of NIAH and of RULER's tasks. `None`: all, and `niah_samples`.
        niah_lengths: tokens of a NIAH prompt with its answer, at most.
        niah_samples: prompts of each length of NIAH and of RULER's tasks.
        niah_haystack: text or JSONL file of essays to hide needles in; `None`: the held-out part of `builtin`.
        ruler_lengths: tokens of a prompt of RULER's tasks with what is written after it, at most. `None`: 1024, 2048
            and 4096, of these what the shortest of the models takes.
        seed: of every draw.
    """

    max_length: int | None = None
    stride: int | None = None
    bos: Bos = "auto"
    limit: int | None = None
    niah_lengths: tuple[int, ...] = (512, 1024, 2048)
    niah_samples: int = 25
    niah_haystack: Path | None = None
    ruler_lengths: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bos not in ("auto", "always", "never"):
            raise UsageError(f"bos is {self.bos!r}; it is auto, always or never")
        if self.max_length is not None and self.max_length < MIN_MAX_LENGTH:
            raise UsageError(
                f"a window of {self.max_length} tokens is too short; --max-length is at least {MIN_MAX_LENGTH}"
            )
        if self.stride is not None and self.stride < 1:
            raise UsageError(f"a stride of {self.stride} tokens does not move; it is at least 1")
        if self.stride is not None and self.max_length is not None and self.stride > self.max_length:
            raise UsageError(
                f"a stride of {self.stride} tokens would skip text between windows of {self.max_length}",
                "give a stride of at most --max-length",
            )
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit} leaves nothing to evaluate; give at least 1")
        if self.niah_samples < 1:
            raise UsageError(f"{self.niah_samples} NIAH prompts measure nothing; give at least 1")
        for name, lengths in (("NIAH", self.niah_lengths), ("RULER", self.ruler_lengths)):
            if lengths is not None and (not lengths or min(lengths) < 1):
                raise UsageError(f"the {name} lengths are {lengths}; give one or more, in tokens")


@dataclass(frozen=True)
class EvaluationOptions:
    """What the numbers do not depend on.

    Attributes:
        task_data: folder with local copies of task data (see `lapcli.evaluation.local_data`).
        batch_size: rows per forward pass; `None`: as many as suit the device.
        processes: those that evaluate together, each its share of the requests; all call `evaluate` alike.
    """

    task_data: Path | None = None
    batch_size: int | None = None
    processes: Processes = ALONE

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size}: give at least 1")
        if self.task_data is not None and not self.task_data.is_dir():
            raise UsageError(f"--task-data {self.task_data} is no folder", "name the folder that holds the copies")
