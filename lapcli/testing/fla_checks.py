"""What a slice of a model that fla runs must satisfy, measured wherever fla runs: on a GPU, or interpreted on a CPU.

Up to 64 tokens and without gradients, fla takes a step at a time, in fp32 throughout; beyond, its chunked kernels,
which multiply in TF32 or bf16 and which Triton 3.6 cannot interpret.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.families.base import StatefulLayer, Tap
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.stages.observation import observe
from lapcli.testing.oracle import masked, relative_error, seen_by_the_recurrence
from lapcli.testing.slices import layers_of, random_kept, sliced_by

STEPWISE = 60
"""A length that fla runs a step at a time."""


def tokens(length: int, rows: int = 2) -> Tensor:
    """Ids `[rows, length]` of the byte tokenizer, no special ones."""
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Of one pass without a cache."""
    with torch.no_grad():
        return model(input_ids=ids.to(model.device), use_cache=False, **options).logits


def logits_in_parts(model: Any, ids: Tensor, *lengths: int) -> Tensor:
    """Of a cached pass over parts of these lengths."""
    parts, cache = [], None
    with torch.no_grad():
        for part in ids.to(model.device).split(list(lengths), 1):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    return torch.cat(parts, 1)


def stepwise_errors(folder: Path, work: Path, device: str, length: int, kept_width: int = 11) -> dict[str, float]:
    """Measure a model in fp32, a step at a time.

    Args:
        folder: the model.
        work: where its slice goes.
        device: where it runs.
        length: of the text, from 8 to 64.
        kept_width: of the slice, which keeps channels at random.

    Returns:
        Relative errors: `oracle`, sliced against masked; `decode`, the sliced model's cached against its one pass;
        `gram_query` and `gram_key`, what calibration sums up with left padding against what the recurrence gets. And
        `cut`, unmasked against masked, which must not be small.
    """
    base = resolve_model(str(folder))
    kept, layers, family = random_kept(base, kept_width), layers_of(base), family_for(base.config)
    whole = load_model(base, device=device)
    small = load_model(sliced_by(base, kept, work), device=device)
    ids = tokens(length)
    with masked(whole, family, layers, kept):
        wanted = logits(whole, ids)
    found = logits(small, ids)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    observation = observe(layers)
    with observation.attached(family, whole), seen_by_the_recurrence(whole, layers) as seen:
        uncut = logits(whole, ids, attention_mask=mask.to(device))
    errors = {
        "oracle": relative_error(found, wanted),
        # Of the row without padding.
        "cut": relative_error(uncut[1], wanted[1]),
        "decode": relative_error(logits_in_parts(small, ids, length - 3, 2, 1), found),
        "gram_query": 0.0,
        "gram_key": 0.0,
    }
    for sums in observation.layers:
        layer = sums.layer
        queries, keys = seen[layer.index]
        for name, tap, values in (("gram_query", layer.queries, queries), ("gram_key", layer.keys, keys)):
            assert tap is not None
            error = relative_error(getattr(sums, name), _gram(values, tap, layer))
            errors[name] = max(errors[name], error)
    return errors


def _gram(values: Tensor, tap: Tap, layer: StatefulLayer) -> Tensor:
    """By key head, over what the recurrence got: `[1, N, heads, K]` without padding, key heads repeated for readers."""
    heads = values.double().flatten(0, 1).transpose(0, 1)
    grams = (heads.mT @ heads).unflatten(0, (layer.heads, -1))
    return grams.sum(1) / max(1, grams.shape[1] // tap.copies)


def chunked_errors(
    folder: Path, work: Path, device: str, dtype: torch.dtype, length: int = 150, kept_width: int = 8
) -> dict[str, float]:
    """Measure a model through fla's chunked kernels, against the same function in fp32, a step at a time.

    Args:
        folder: the model.
        work: where its slice goes.
        device: a GPU.
        dtype: of the weights in the chunked passes; they are rounded to it in the truth too.
        length: of the text, above 64.
        kept_width: of the slice, which keeps channels at random.

    Returns:
        Relative errors: `masked`, the unsliced model with masked keys and queries; `sliced`, the sliced one.
    """
    base = resolve_model(str(folder))
    kept, layers, family = random_kept(base, kept_width), layers_of(base), family_for(base.config)
    small = sliced_by(base, kept, work)
    ids = tokens(length)
    parts = [STEPWISE] * (length // STEPWISE) + [length % STEPWISE]
    # Rounded first, so that truth and chunked passes have the same weights.
    exact = load_model(small, device=device, dtype=dtype).float()
    truth = logits_in_parts(exact, ids, *parts)
    whole = load_model(base, device=device, dtype=dtype)
    with masked(whole, family, layers, kept):
        wanted = logits(whole, ids)
    return {
        "masked": relative_error(wanted.float(), truth),
        "sliced": relative_error(logits(load_model(small, device=device, dtype=dtype), ids).float(), truth),
    }
