"""Cases of the product of few rows, against the same in fp64."""

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels._triton import is_interpreted
from lapkernels.few_linear import few_linear, few_swiglu
from lapkernels.few_linear.configs import choose
from lapkernels.norm import swiglu
from lapkernels.testing import poisoned

SHAPES = {
    "16 rows": (16, 640, 256),
    "64 rows, odd": (64, 1352, 131),
    "5 rows, short": (5, 8, 3),
    "33 rows, deep": (33, 2600, 200),
}
"""Rows, D and N."""


def _drawn(dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """What draws a tensor of a size: a view into a larger one of NaN."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        around = torch.full([each + 8 for each in size], torch.nan, dtype=dtype, device=device)
        inside = around[tuple(slice(each) for each in size)]
        return inside.copy_(torch.randn(*size, generator=generator, dtype=torch.float64))

    return draw


def check(shape: str, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare the product with and without bias, whole and in parts, twice, with NaN around all that it may read."""
    rows, width, outputs = SHAPES[shape]
    draw = _drawn(dtype, device)
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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, impl: str) -> Tensor:
    if not is_interpreted() or impl != "triton":
        return few_linear(x, weight, bias, impl=impl)
    from lapkernels.few_linear.triton_few import few_linear_triton

    config = choose("triton", len(weight), weight.shape[1], gated=True)
    return few_linear_triton(x, weight, bias, 1.0, False, config._replace(outputs=config.outputs // 2))


def check_gated(shape: str, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare the product with its activation, with and without bias: with the two kernels to the bit, and with fp64.

    Tensor cores add in the same order whatever a step's depth is, the interpreter does not: there depths are the same.
    """
    rows, width, outputs = SHAPES[shape]
    draw = _drawn(dtype, device)
    x, weight, bias = draw(rows, width), draw(2 * outputs, width), draw(2 * outputs)
    weight *= width**-0.5
    # Gates from where the activation is 0 on.
    bias[:outputs] *= 30
    for added in (None, bias):
        with poisoned():
            found, again = (few_swiglu(x, weight, added, ready=ready, impl=impl) for ready in (False, True))
            both = _product(x, weight, added, impl)
        assert torch.equal(found, again)
        assert found.dtype == dtype
        assert found.shape == (rows, outputs)
        assert torch.equal(found, swiglu(both, impl="reference" if impl == "reference" else "triton"))
        gate, up = F.linear(x.double(), weight.double(), None if added is None else added.double()).chunk(2, 1)
        wanted = F.silu(gate) * up
        # Gate and up are off by what the product's test allows; SiLU is no steeper than 1.1, and the result is rounded.
        own, wide = (torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32)))
        off = [10 * wide * float(each.abs().max()) * width**0.5 + own * each.abs() for each in (gate, up)]
        bound = 1.1 * off[0] * (up.abs() + off[1]) + gate.abs() * off[1] + own * wanted.abs() + own**2
        assert bool(((found.double() - wanted).abs() <= bound).all())
