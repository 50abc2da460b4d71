"""Cases of the product of few rows, against the same in fp64."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.few_linear import few_linear

SHAPES = {
    "16 rows": (16, 640, 256),
    "64 rows, odd": (64, 1352, 131),
    "5 rows, short": (5, 8, 3),
    "33 rows, deep": (33, 2600, 200),
}
"""Rows, D and N."""


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated is full of NaN, so that nothing that was not written passes for a result."""
    was = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was)


def check(shape: str, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare the product with and without bias, whole and in parts, twice, with NaN around all that it may read."""
    rows, width, outputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        """Of `size`, a view into a larger tensor of NaN."""
        around = torch.full([each + 8 for each in size], torch.nan, dtype=dtype, device=device)
        inside = around[tuple(slice(each) for each in size)]
        return inside.copy_(torch.randn(*size, generator=generator, dtype=torch.float64))

    own, wide = (torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32)))
    x, weight, bias = draw(rows, width), draw(outputs, width), draw(outputs)
    weight *= width**-0.5
    for apart, added in product((False, True), (None, bias)):
        with poisoned():
            found, again = (
                few_linear(x, weight, added, scale=0.7, apart=apart, ready=ready, impl=impl) for ready in (False, True)
            )
        assert torch.equal(found, again)
        assert found.dtype == (torch.promote_types(dtype, torch.float32) if apart else dtype)
        assert found.shape[-2:] == (rows, outputs)
        assert found.ndim == (3 if apart else 2)
        wanted = 0.7 * F.linear(x.double(), weight.double(), None if added is None else added.double())
        size = float(wanted.abs().max())
        # A sum of `width` terms (of size s / width^0.5, errors of either sign), and, where it is whole, one rounding;
        # ten times the standard deviation, which no seed here comes near.
        bound = 10 * wide * size * width**0.5 + (0 if apart else own * size)
        total = found.double().sum(0) if apart else found.double()
        assert float((total - wanted).abs().max()) <= bound
