"""lm-eval's view of a model in memory. Imports lm-eval; only `harness` imports this."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lapcli.errors import DataError
from lapcli.evaluation.decoding import Writing, stop_tokens, write_greedily
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.evaluation.settings import Bos
from lapcli.parallel import Processes
from lapcli.reporting import Reporter

# The decorator that registers it hides the class from type checkers.
_HFLM: Any = HFLM

# lm-eval's names for the most tokens to write, the first that is there counting.
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# What a request for greedy text says; whatever else is asked for is left to lm-eval.
_GREEDY = {"until", "do_sample", "temperature", *_LIMITS}

# Texts of which tokens are remembered: those of one question.
_REMEMBERED = 16

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
        # It tokenises the same context again with each of a question's answers.
        self.tok_encode = functools.lru_cache(maxsize=_REMEMBERED)(super().tok_encode)
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            del self.tok_encode

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
        """What the model writes: greedily by `lapcli.evaluation.decoding`, by lm-eval's own means where it samples."""
        longest = max((self._limit(request.args[1]) for request in requests), default=0)
        if longest >= self.max_length:
            raise DataError(
                f"{self._task} has the model write up to {longest} tokens; a request holds {self.max_length} in all",
                f"give a --max-length above {longest}",
            )
        ours = self._loaded.processes
        # Long prompts lie beside long ones, so that every process has as many of them.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].args[0]))
        mine = order[ours.rank :: ours.size]
        if all(_is_greedy(requests[index].args[1]) for index in mine):
            written = self._write([requests[index].args for index in mine])
        else:
            written = super().generate_until([requests[index] for index in mine], disable_tqdm=True)
        return _gathered(ours, len(requests), dict(zip(mine, written, strict=True)))

    def _write(self, asked: list[tuple[str, dict[str, Any]]]) -> list[str]:
        limits = [self._limit(options) for _, options in asked]
        stops = [self._stops(options) for _, options in asked]
        writings = [
            Writing(self._prompt(text, limit), limit, self._ends_with(texts))
            for (text, _), limit, texts in zip(asked, limits, stops, strict=True)
        ]
        with self._audible():
            written = write_greedily(
                self._loaded,
                writings,
                stop=stop_tokens(self._loaded) | {self.eot_token_id},
                batch_size=self._rows,
                reporter=self._reporter,
                description=f"{self._task} on {self._loaded.name}",
            )
        return [_before(self.tok_decode(tokens), texts) for tokens, texts in zip(written, stops, strict=True)]

    def _limit(self, options: Mapping[str, Any]) -> int:
        return int(next((options[name] for name in _LIMITS if options.get(name) is not None), self.max_gen_toks))

    def _stops(self, options: Mapping[str, Any]) -> list[str]:
        """The texts that end what is written; as in lm-eval, the end-of-text token as it is spelled is one."""
        until = options.get("until") or []
        texts = [*([until] if isinstance(until, str) else until), self.tok_decode(self.eot_token_id, False)]
        return [text for text in texts if text]

    def _prompt(self, text: str, new_tokens: int) -> list[int]:
        """The tokens of a prompt; too long a one loses its beginning, as in lm-eval."""
        ids, _ = self.tok_batch_encode([text], left_truncate_len=self.max_length - new_tokens)
        return ids[0].tolist() or [self.prefix_token_id]

    def _ends_with(self, stops: list[str]) -> Callable[[list[int]], bool]:
        def ends(written: list[int]) -> bool:
            text = self.tok_decode(written)
            return any(stop in text for stop in stops)

        return ends

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


def _is_greedy(options: Mapping[str, Any]) -> bool:
    if set(options) - _GREEDY or options.get("do_sample"):
        return False
    return options.get("do_sample") is False or not options.get("temperature")


def _before(text: str, stops: list[str]) -> str:
    """The text up to the first of the texts that end it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


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
        loaded: the model; a copy of its tokenizer is used, because lm-eval gives it a padding token.
        task: for the description of the progress.
        max_length: most tokens of a request.
        bos: `auto` leaves BOS to the tokenizer.
        batch_size: rows per pass, `None` for automatic.
        reporter: progress goes here.
        audible: opens the terminal for the progress.
    """
    model = InMemoryModel(
        pretrained=loaded.model,
        tokenizer=loaded.tokenizer_copy,
        backend="causal",
        max_length=max_length,
        batch_size=batch_size or 8,
        add_bos_token={"auto": None, "always": True, "never": False}[bos],
    )
    model.attach(loaded, task, batch_size, reporter, audible)
    return model
