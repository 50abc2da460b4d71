"""Awkward rows for the choice of the likeliest token, against a search over Python's numbers."""

import math

import torch
from torch import Tensor

from lapkernels.greedy_token import greedy_token


def rows_of(width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """`[B, width]`, a view into a wider tensor of NaN: equal numbers, zeros of both signs, infinities, NaN of both."""
    generator = torch.Generator().manual_seed(width)
    drawn = torch.randn(16, width, generator=generator, dtype=torch.float64)
    # Rounded so that many are equal, the largest too.
    drawn[1:4] = (drawn[1:4] * 2).round().clamp(max=1)
    drawn[4], drawn[5], drawn[6] = -math.inf, 0.0, -0.0
    drawn[5, ::2] = -0.0
    drawn[6, width // 2 :] = 0.0
    drawn[7] = -math.inf
    drawn[7, -1] = torch.finfo(dtype).min
    drawn[8, width // 2], drawn[9, -1] = math.inf, math.inf
    drawn[10, width // 3 :: 3] = math.nan
    drawn[11, -1] = -math.nan
    drawn[12] = math.nan
    drawn[13, 0], drawn[13, -1] = math.inf, -math.nan
    drawn[14, 0] = 1000.0
    drawn[15, -1] = 1000.0
    around = torch.full((16, width + 8), math.nan, dtype=dtype, device=device)
    inside = around[:, :width]
    return inside.copy_(drawn)


def first_largest(row: list[float]) -> int:
    """Of the largest number in a row, or of NaN where there is one, where it is first."""
    for number, each in enumerate(row):
        if math.isnan(each):
            return number
    return row.index(max(row))


def check_greedy(width: int, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Choose from such rows, some of which have no slot."""
    logits = rows_of(width, dtype, device)
    count = len(logits)
    slots = torch.tensor([-1 if row % 3 == 1 else row for row in range(count)], dtype=torch.int32, device=device)
    positions = torch.arange(count, device=device) * 7
    # Of more rows than the step has, the others stay.
    tokens = torch.full((count + 1,), -5, device=device)
    greedy_token(logits, tokens[:count], positions, slots, impl=impl)
    assert tokens.tolist() == [*map(first_largest, logits.double().tolist()), -5]
    assert positions.tolist() == [7 * row + (row % 3 != 1) for row in range(count)]
