"""What tests of decoding share: prompts, the logits of one pass over everything, and how far others are from them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
