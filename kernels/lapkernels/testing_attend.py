"""Inputs of the attention step with NaN wherever nothing may be read, and attention over each row alone in fp64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapkernels.attend_step import attend_step

CASES: dict[str, tuple[int, int, int, int, int, list[int], list[int], int | None]] = {
    "grouped heads, a padding row": (2, 4, 16, 16, 200, [0, 199, 70], [4, 1, -1], None),
    "widths of no power of two": (1, 1, 24, 40, 130, [129, 5], [0, 2], None),
    "three query heads a key head": (2, 3, 80, 64, 96, [64, 63, 65], [2, 0, 1], None),
    "a window": (2, 2, 16, 16, 300, [299, 10, 50], [0, 1, 2], 50),
    "a window of one": (1, 2, 8, 8, 9, [8, 0], [1, 0], 1),
    "nothing but padding": (1, 2, 8, 8, 5, [0, 0], [-1, -3], None),
}
"""Key heads, query heads for each, K, V, L, positions, slots, window."""


def case(
    name: str, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor], dict[str, Any]]:
    """Arguments, with NaN wherever nothing may be read."""
    heads, group, key_width, value_width, length, positions, slots, window = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    pools = draw(6, heads, length, key_width), draw(6, heads, length, value_width)
    for slot in range(6):
        seen = positions[slots.index(slot)] if slot in slots else 0
        for pool in pools:
            pool[slot, :, seen:] = float("nan")
    rows = len(slots)
    new = draw(rows, heads * group, key_width), draw(rows, heads, key_width), draw(rows, heads, value_width)
    where = {
        "position": torch.tensor(positions, device=device),
        "slots": torch.tensor(slots, dtype=torch.int32, device=device),
        "window": window,
    }
    return new, pools, where


def oracle(new: Sequence[Tensor], pools: Sequence[Tensor], where: dict[str, Any]) -> Tensor:
    """Row by row, over a plain list of its tokens."""
    query, key, value = (x.double() for x in new)
    heads, found = key.shape[1], torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
    for row, slot in enumerate(where["slots"].tolist()):
        at = where["position"][row].item()
        if slot < 0:
            continue
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // heads)
            keys = torch.cat((pools[0][slot, shared, :at].double(), key[row, shared].unsqueeze(0)))
            values = torch.cat((pools[1][slot, shared, :at].double(), value[row, shared].unsqueeze(0)))
            if where["window"]:
                keys, values = keys[-where["window"] :], values[-where["window"] :]
            scores = keys @ query[row, head] * query.shape[-1] ** -0.5
            found[row, head] = scores.softmax(dim=0) @ values
    return found


def check(name: str, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare, and see that only the new token's place was written."""
    (query, key, value), pools, where = case(name, dtype, device)
    new = (query, key, value)
    wanted = oracle([x.cpu() for x in new], [x.cpu() for x in pools], {**where, "slots": where["slots"].cpu()})
    before = [pool.clone() for pool in pools]
    found = attend_step(query, key, value, *pools, **where, impl=impl).double().cpu()
    # Weights sum to 1 and values are 4 at most, so an error of the weights or of the result counts fourfold: each is
    # rounded to the dtype once, and the weights are as wrong as the scores, sums of K products in the wider dtype.
    own, wide = (torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32)))
    assert bool(found.isfinite().all())
    assert float((found - wanted).abs().max()) <= 4 * (own + 16 * wide * new[0].shape[-1] ** 0.5)
    for pool, old, tokens in zip(pools, before, new[1:], strict=True):
        for row, slot in enumerate(where["slots"].tolist()):
            if slot >= 0:
                old[slot, :, int(where["position"][row])] = tokens[row]
        assert torch.equal(pool.nan_to_num(7.0), old.nan_to_num(7.0))
