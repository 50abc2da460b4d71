"""What tests of decoding share: prompts, the logits of one pass over everything, how far others are, and NaN."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.runtime.batch import Batch
from lapcli.runtime.engine import Engine
from lapcli.runtime.prefill import cache_argument


def prompts_of(*lengths: int, seed: int = 0, low: int = 3, high: int = 259) -> list[list[int]]:
    """Prompts of these lengths, of tokens from `low` to `high - 1`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (length,), generator=generator).tolist() for length in lengths]


def full_logits(model: Any, tokens: Sequence[int], last: int | None = None) -> Tensor:
    """The model's own single pass, without a cache: logits `[vocabulary]` after the last token.

    Or, with `last`, `[last, vocabulary]` after each of so many.
    """
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)], device=model.device)).logits[0]
    return logits[-1] if last is None else logits[-last:]


def greedy_by_whole_passes(model: Any, prompt: Sequence[int], limit: int) -> list[int]:
    """So many most probable tokens after a prompt, one whole pass without a cache for each."""
    tokens = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; infinite where anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def cached_logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The library's own decoding: after a prompt, the logits `[tokens, vocabulary]` after each further token."""
    name, found = cache_argument(model.forward), []
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(prompt)], device=model.device), use_cache=True)
        for number, token in enumerate(tokens, len(prompt)):
            # Bamba has to be told its positions.
            where = {"position_ids": torch.tensor([[number]], device=model.device)}
            output = model(
                input_ids=torch.tensor([[token]], device=model.device), use_cache=True, **{name: output[name]}, **where
            )
            found.append(output.logits[0, -1])
    return torch.stack(found)


def held_tensors(engine: Engine) -> list[Tensor]:
    """All that an engine keeps of rows: states and inputs of convolutions, `[slots, ..]` each, then all pages."""
    recurrent = [tensor for pool in engine.plan.recurrent.values() for tensor in pool.tensors()]
    return [*recurrent, engine.pages.content]


def spoil(engine: Engine, kept: Collection[int]) -> None:
    """Put NaN wherever rows in these slots have nothing: other slots and pages, and behind the rows' last tokens."""
    rows = {slot: engine.slots.positions[slot] for slot in kept}
    places = [
        (engine.plan.attention[layer], slot, rows[slot]) for slot in rows for layer in engine.pages.layers_of(slot)
    ]
    held = [(pool, slot, at, pool.read(slot, at)) for pool, slot, at in places]
    paged = [
        (pool, slot, rows[slot], pool.read(slot, rows[slot]))
        for pool in engine.pages.states.values()
        for slot in rows
        if slot in pool.blocks
    ]
    *recurrent, pages = held_tensors(engine)
    pages.fill_(torch.nan)
    for pool, slot, at, (state, past) in paged:
        pool.write(slot, at, state, past)
    for pool, slot, at, (keys, values) in held:
        pool.write(slot, at, keys, values)
    for tensor in recurrent:
        tensor[[slot for slot in range(engine.max_rows) if slot not in rows]] = torch.nan


class Worked(NamedTuple):
    """What a batch did until nothing was left of it.

    Attributes:
        steps: that its engine ran.
        ends: its rows, in the order in which they ended.
    """

    steps: int
    ends: list[int]


def work_off(batch: Batch) -> Worked:
    """Advance a batch until all its rows have ended."""
    steps, ends, run = 0, [], batch.engine.steps.run

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(*arguments, **options)

    batch.engine.steps.run = counting
    try:
        while batch.unfinished:
            ends += [event.row for event in batch.advance() if event.reason]
    finally:
        batch.engine.steps.run = run
    return Worked(steps, ends)
