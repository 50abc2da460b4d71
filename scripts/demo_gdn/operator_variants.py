"""Other ways to the inverse inside the chunked delta rule, for the training step alone.

`(I + A)^-1` of a strictly lower triangular `A` is the one part of the chunked form that is no matrix product.
With `T` the inverse of the diagonal blocks of some size and `A'` the part of `A` that joins each two of them,
`T - T A' T` is the inverse of the blocks of twice the size: forward substitution in another order, and as stable.
The backward pass is two products, since `d(X^-1) = -X^-1 dX X^-1`.
"""

from typing import Any

import torch
from torch import Tensor

from demo_gdn.inverse_kernel import unit_lower_inverse_kernel
from lapcli.models import GatedDeltaNetForCausalLM
from lapkernels.delta_rule import chunked

_kernel: Any = unit_lower_inverse_kernel

VARIANTS = ("chunked", "products", "triton", "fla")
"""`chunked` as lapkernels has it; `products` and `triton` with another inverse; fla's kernels."""

_operator: Any = chunked
_by_solving = chunked._InverseOfUnitLower


def use_operator(model: GatedDeltaNetForCausalLM, name: str) -> None:
    """Choose one of `VARIANTS` for the model."""
    _operator._InverseOfUnitLower = {"products": _ByProducts, "triton": _ByTriton}.get(name, _by_solving)
    model.set_kernel("fla" if name == "fla" else "chunked")


def inverse_by_products(a: Tensor) -> Tensor:
    """`(I + A)^-1` of `[..., C, C]`, C a power of two, in a few batched products."""
    width = a.shape[-1]
    row = torch.arange(width, device=a.device)
    inverse = torch.eye(width, dtype=a.dtype, device=a.device)
    size = 1
    while size < width:
        pair = (row.unsqueeze(1) // (2 * size)) == (row.unsqueeze(0) // (2 * size))
        joins = pair & ((row.unsqueeze(1) // size) > (row.unsqueeze(0) // size))
        joined = a.masked_fill(~joins, 0.0)
        inverse = inverse - (joined if size == 1 else inverse @ joined @ inverse)
        size *= 2
    return inverse.expand_as(a)


def inverse_by_triton(a: Tensor) -> Tensor:
    """The same for contiguous fp32 `[..., C, C]` on a GPU, each matrix inverted on chip."""
    inverse = torch.empty_like(a)
    width = a.shape[-1]
    _kernel[(a.numel() // (width * width),)](a, inverse, C=width, LEVELS=width.bit_length() - 1)
    return inverse


class _ByProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        inverse = inverse_by_products(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradient(ctx.saved_tensors[0], gradient)


class _ByTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        inverse = inverse_by_triton(a.contiguous())
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradient(ctx.saved_tensors[0], gradient)


def _gradient(inverse: Tensor, gradient: Tensor) -> Tensor:
    return -(inverse.mT @ gradient @ inverse.mT).tril(-1)
