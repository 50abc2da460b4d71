"""Greedy decoding with the model's cache: the one place where an evaluation has a model write.

A prompt goes through the model once. What it leaves behind (recurrent states, keys and values) is kept, and each
further token costs a pass over that token alone. Prompts of unlike lengths share a batch: the short ones are padded
and masked. A row ends by its own rule, and a batch with its last row. Where steps can be captured, `captured` does all
this; else the model's own generation does.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.evaluation.rows import Rows
from lapcli.evaluation.scoring import LoadedModel, not_numbers
from lapcli.reporting import Reporter

# A step of decoding costs a CPU little more for sixteen rows than for one; more make the prompts' pass slower. The
# tokens of a pass bound what a prompt's pass holds at once.
_CPU_ROWS = 16
_CPU_TOKENS = 1 << 15
_GPU_ROWS = 64
_GPU_TOKENS = 1 << 18


class Writing(NamedTuple):
    """A prompt to be continued.

    Attributes:
        tokens: of the prompt, at least one.
        limit: most tokens to write, at least one.
        ends: whether a row may end with what it has written so far, and then with anything that goes on from there;
            `None`: only at the limit or a stop token.
    """

    tokens: Sequence[int]
    limit: int
    ends: Callable[[list[int]], bool] | None = None


def write_greedily(
    loaded: LoadedModel,
    writings: Sequence[Writing],
    *,
    stop: Collection[int] = (),
    batch_size: int | None,
    reporter: Reporter,
    description: str,
) -> list[list[int]]:
    """Continue prompts with the most probable token each time. The model's own generation defaults play no part.

    Args:
        loaded: the model. Its `processes` are not looked at: the caller deals out the prompts.
        writings: the prompts, of any lengths.
        stop: tokens that end a row; they are not part of what is returned.
        batch_size: rows per pass; `None`: as many as suit the device. Halved where memory runs out.
        reporter: progress goes here, in prompts.
        description: of the progress.

    Returns:
        The tokens written after each prompt, in the order of the prompts.

    Raises:
        ModelError: the logits are not numbers, or memory runs out on a single row.
    """
    on_cpu = loaded.model.device.type == "cpu"
    most, tokens = (_CPU_ROWS, _CPU_TOKENS) if on_cpu else (_GPU_ROWS, _GPU_TOKENS)
    rows = Rows(loaded.name, batch_size, reporter)
    order = sorted(range(len(writings)), key=lambda index: -len(writings[index].tokens))
    written: list[list[int]] = [[] for _ in writings]
    position = 0
    with reporter.task(description, total=len(writings), unit="prompts") as progress:
        if loaded.writer is not None and writings:
            found = loaded.writer.write(
                loaded, writings, stop=stop, batch_size=batch_size, reporter=reporter, done=progress.advance
            )
            if found is not None:
                return found
        while position < len(order):
            suits = min(most, tokens // len(writings[order[position]].tokens))
            batch = order[position : position + rows.at(suits)]
            answers = rows.run([writings[index] for index in batch], lambda part: _write(loaded, part, stop))
            for index, answer in zip(batch, answers, strict=False):
                written[index] = answer
                position += 1
                progress.advance(1)
    return written


def stop_tokens(loaded: LoadedModel) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and those that the model's generation config names."""
    named = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    found = [loaded.tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])]
    return frozenset(token for token in found if token is not None)


def _write(loaded: LoadedModel, writings: Sequence[Writing], stop: Collection[int]) -> list[list[int]]:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    model = loaded.model
    pad = _pad_token(loaded)
    width = max(len(writing.tokens) for writing in writings)
    ids = torch.full((len(writings), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, writing in enumerate(writings):
        ids[row, width - len(writing.tokens) :] = torch.tensor(writing.tokens)
        mask[row, width - len(writing.tokens) :] = 1
    ends = _Ends(writings, stop)
    limit = max(writing.limit for writing in writings)
    config = GenerationConfig(do_sample=False, max_new_tokens=limit, pad_token_id=pad, use_cache=True)
    with _generation_defaults(model, config), torch.inference_mode():
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            logits_processor=LogitsProcessorList([_Numbers(loaded.name)]),  # pyright: ignore[reportArgumentType]
            stopping_criteria=StoppingCriteriaList([ends]),  # pyright: ignore[reportArgumentType] -- called like one
        )
    return ends.written


class _Numbers:
    """Refuses logits that are not numbers."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool(scores.isnan().any()):
            raise not_numbers(self._name)
        return scores


class _Ends:
    """Says after each step which rows are done, and keeps what each wrote until then."""

    def __init__(self, writings: Sequence[Writing], stop: Collection[int]):
        self.written: list[list[int]] = [[] for _ in writings]
        self._writings = writings
        self._stop = frozenset(stop)
        self._done = [False] * len(writings)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._done[row]:
                self._done[row] = self._take(row, token)
        return torch.tensor(self._done, device=input_ids.device)

    def _take(self, row: int, token: int) -> bool:
        if token in self._stop:
            return True
        written, writing = self.written[row], self._writings[row]
        written.append(token)
        return len(written) >= writing.limit or (writing.ends is not None and writing.ends(written))


@contextmanager
def _generation_defaults(model: Any, config: Any) -> Iterator[None]:
    """Puts a generation config in place of the model's own for a while: sampling and penalties must not leak in."""
    saved = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = saved


def _pad_token(loaded: LoadedModel) -> int:
    for token in (loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0  # masked, so that any token does
