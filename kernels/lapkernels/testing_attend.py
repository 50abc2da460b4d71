"""Inputs of the attention step with NaN wherever nothing may be read, and attention over each row alone in fp64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapkernels.attend_step import attend_step

CASES: dict[str, tuple[int, int, int, int, int, int, list[int], list[int], int | None]] = {
    "grouped heads, a padding row": (2, 4, 16, 16, 64, 200, [0, 199, 70], [4, 1, -1], None),
    "widths of no power of two": (1, 1, 24, 40, 32, 130, [129, 5], [0, 2], None),
    "three query heads a key head": (2, 3, 80, 64, 64, 96, [64, 63, 65], [2, 0, 1], None),
    "short pages": (1, 2, 8, 8, 16, 160, [15, 16, 17, 144, 159], [3, 0, 5, 1, 2], None),
    "a padding row before a row's first token": (1, 1, 8, 8, 16, 40, [0, 0, 20], [-1, 0, 3], None),
    "a window": (2, 2, 16, 16, 64, 300, [299, 10, 50], [0, 1, 2], 50),
    "a window over pages": (1, 2, 8, 8, 16, 128, [127, 63, 64, 33], [5, 3, -1, 0], 33),
    "a window of one": (1, 2, 8, 8, 16, 9, [8, 0], [1, 0], 1),
    "nothing but padding": (1, 2, 8, 8, 16, 5, [0, 70], [-1, -3], None),
}
"""Key heads, query heads for each, K, V, tokens of a page, of a row at most, positions, slots, window."""
SLOTS = 6


def case(
    name: str, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor], dict[str, Any]]:
    """Arguments, with NaN wherever nothing may be read, and a row's pages in no order among those of others."""
    heads, group, key_width, value_width, size, length, positions, slots, window = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    each = -(-length // size)
    # One page more than all slots have, which nobody has.
    pages = torch.randperm(SLOTS * each + 1, generator=generator)[:-1].view(SLOTS, each)
    pools = [torch.full((SLOTS * each + 1, heads, size, width), torch.nan) for width in (key_width, value_width)]
    pools = [pool.to(device, dtype) for pool in pools]
    for position, slot in zip(positions, slots, strict=True):
        for token in range(position if slot >= 0 else 0):
            for pool in pools:
                pool[pages[slot, token // size], :, token % size] = draw(heads, pool.shape[-1])
    rows = len(slots)
    new = draw(rows, heads * group, key_width), draw(rows, heads, key_width), draw(rows, heads, value_width)
    where = {
        "pages": pages.int().to(device),
        "position": torch.tensor(positions, device=device),
        "slots": torch.tensor(slots, dtype=torch.int32, device=device),
        "window": window,
    }
    return new, (pools[0], pools[1]), where


def oracle(new: Sequence[Tensor], pools: Sequence[Tensor], where: dict[str, Any]) -> Tensor:
    """Row by row, over a plain list of its tokens."""
    query, key, value = (x.double() for x in new)
    heads, found = key.shape[1], torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
    size = pools[0].shape[2]
    for row, slot in enumerate(where["slots"].tolist()):
        if slot < 0:
            continue
        at, pages = where["position"][row].item(), where["pages"][slot].tolist()
        held = [[pool[pages[token // size], :, token % size].double() for token in range(at)] for pool in pools]
        keys, values = (torch.stack([*seen, x[row]], 1) for seen, x in zip(held, (key, value), strict=True))
        if where["window"]:
            keys, values = keys[:, -where["window"] :], values[:, -where["window"] :]
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // heads)
            scores = keys[shared] @ query[row, head] * query.shape[-1] ** -0.5
            found[row, head] = scores.softmax(dim=0) @ values[shared]
    return found


def check(name: str, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare, and see that only the new token's place was written."""
    (query, key, value), pools, where = case(name, dtype, device)
    new = (query, key, value)
    plain = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in where.items()}
    wanted = oracle([x.cpu() for x in new], [x.cpu() for x in pools], plain)
    before = [pool.clone() for pool in pools]
    found = attend_step(query, key, value, *pools, **where, impl=impl).double().cpu()
    # Weights sum to 1 and values are 4 at most, so an error of the weights or of the result counts fourfold: each is
    # rounded to the dtype once, and the weights are as wrong as the scores, sums of K products in the wider dtype.
    own, wide = (torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32)))
    assert bool(found.isfinite().all())
    assert float((found - wanted).abs().max()) <= 4 * (own + 16 * wide * new[0].shape[-1] ** 0.5)
    size = pools[0].shape[2]
    for pool, old, tokens in zip(pools, before, new[1:], strict=True):
        for row, slot in enumerate(where["slots"].tolist()):
            if slot >= 0:
                at = int(where["position"][row])
                old[where["pages"][slot, at // size], :, at % size] = tokens[row]
        assert torch.equal(pool.nan_to_num(7.0), old.nan_to_num(7.0))
