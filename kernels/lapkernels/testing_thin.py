"""Cases of the thin linear layer, and the layers apart in fp64."""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.thin_linear import Normed, thin_linear

SHAPES = {"1 row": (1, 64, 40), "2 rows, odd": (2, 100, 9), "3 rows, long": (3, 2050, 17), "8 rows": (8, 24, 64)}
"""Rows, D and N."""


def layers_apart(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Normed | None, gated: bool, residual: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """The result in fp64, from torch's own layers."""
    x, wide = x.double(), weight.double()
    if norm is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm.weight.double() + norm.offset, norm.eps)
    if gated:
        half = x.shape[-1] // 2
        x = F.silu(x[:, :half]) * x[:, half:]
    y = scale * F.linear(x, wide, None if bias is None else bias.double())
    return y if residual is None else residual.double() + y


def check(shape: str, impl: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare all kinds of a layer with the layers apart."""
    rows, width, outputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)

    own, wide = (torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32)))
    for before, behind in product(("plain", "norm", "gated"), (False, True)):
        # Views, as of a fused projection.
        x = draw(rows, 2 * width + 8)[:, : 2 * width if before == "gated" else width]
        weight = draw(outputs, width) * width**-0.5
        parts: dict[str, Any] = {
            "bias": draw(outputs) if behind else None,
            "norm": Normed(draw(width), 1e-6, 1.0) if before == "norm" else None,
            "gated": before == "gated",
            "residual": draw(rows, outputs) if behind else None,
            "scale": 0.7,
        }
        found = thin_linear(x, weight, impl=impl, **parts)
        wanted = layers_apart(x, weight, **parts)
        assert bool(found.isfinite().all())
        # A sum of `width` terms whose factors are rounded once (terms of size s / width^0.5, errors of either sign),
        # and the result rounded once; ten times the standard deviation, which no seed here comes near.
        size = float(wanted.abs().max())
        assert float((found.double() - wanted).abs().max()) <= 10 * own * size + 10 * wide * size * width**0.5
