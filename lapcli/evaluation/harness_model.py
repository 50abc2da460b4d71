"""lm-eval's view of a model in memory. Imports lm-eval; only `harness` imports this."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lapcli.errors import DataError
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.evaluation.settings import Bos
from lapcli.parallel import Processes
from lapcli.reporting import Reporter

# The decorator that registers it hides the class from type checkers.
_HFLM: Any = HFLM

Audible = Callable[[], contextlib.AbstractContextManager[None]]


class InMemoryModel(_HFLM):
    """lm-eval's Hugging Face model, with requests scored by `lapcli.evaluation.scoring`.

    Tokenisation, truncation and windows are lm-eval's. Scoring is ours: progress goes to a `Reporter`, and a window of
    a large vocabulary needs no second copy of its logits.
    """

    def attach(
        self, loaded: LoadedModel, task: str, batch_size: int | None, reporter: Reporter, audible: Audible
    ) -> None:
        """Say what to score with and where progress goes."""
        self._loaded = loaded
        self._task = task
        self._rows = batch_size
        self._reporter = reporter
        self._audible = audible

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval's, without its progress bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts in lm-eval's windows, each with one token of context or more."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        answers = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(answers)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """As lm-eval's, without its progress bar."""
        longest = max((request.args[1].get("max_gen_toks", self.max_gen_toks) for request in requests), default=0)
        if longest >= self.max_length:
            raise DataError(
                f"{self._task} has the model write up to {longest} tokens; a request holds {self.max_length} in all",
                f"give a --max-length above {longest}",
            )
        ours = self._loaded.processes
        # Long prompts lie beside long ones, so that every process has as many of them.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].args[0]))
        mine = order[ours.rank :: ours.size]
        written = super().generate_until([requests[index] for index in mine], disable_tqdm=True)
        return _gathered(ours, len(requests), dict(zip(mine, written, strict=True)))

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        for _, _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(
                    f"{self._task} asks for {len(continuation)} tokens; a request holds 1 to {self.max_length}",
                    "give a larger --max-length",
                )
        wanted = [
            # Too long a context loses its beginning, as in lm-eval.
            Request([*context, *continuation][-(self.max_length + 1) :], len(continuation))
            for _, context, continuation in requests
        ]
        with self._audible():
            answers = score(
                self._loaded,
                wanted,
                batch_size=self._rows,
                reporter=self._reporter,
                description=f"{self._task} on {self._loaded.name}",
            )
        return [(answer.log_probability, answer.greedy) for answer in answers]


def _gathered(processes: Processes, count: int, texts: Mapping[int, str]) -> list[str]:
    """The texts of all processes, each of which has those of its numbers."""
    if processes.size == 1:
        return [texts[index] for index in range(count)]
    sizes = torch.zeros(count, dtype=torch.int64)
    for index, text in texts.items():
        sizes[index] = len(text.encode())
    processes.add([sizes])
    letters = torch.zeros(count, max(sizes.tolist(), default=0), dtype=torch.uint8)
    for index, text in texts.items():
        letters[index, : sizes[index]] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    processes.add([letters])
    return [bytes(row[:size].tolist()).decode() for row, size in zip(letters, sizes.tolist(), strict=True)]


def make_model(
    loaded: LoadedModel,
    task: str,
    *,
    max_length: int,
    bos: Bos,
    batch_size: int | None,
    reporter: Reporter,
    audible: Audible,
) -> InMemoryModel:
    """Wrap a model for lm-eval.

    Args:
        loaded: the model; its tokenizer is copied, because lm-eval gives it a padding token.
        task: for the description of the progress.
        max_length: most tokens of a request.
        bos: `auto` leaves BOS to the tokenizer.
        batch_size: rows per pass, `None` for automatic.
        reporter: progress goes here.
        audible: opens the terminal for the progress.
    """
    model = InMemoryModel(
        pretrained=loaded.model,
        tokenizer=copy.deepcopy(loaded.tokenizer),
        backend="causal",
        max_length=max_length,
        batch_size=batch_size or 8,
        add_bos_token={"auto": None, "always": True, "never": False}[bos],
    )
    model.attach(loaded, task, batch_size, reporter, audible)
    return model
