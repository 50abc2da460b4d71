"""The public function, and the choice of what computes it."""

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference
from lapkernels.short_conv.reference import short_conv_reference
from lapkernels.short_conv.validation import check_arguments

_CHOICE = KernelOrReference(
    "short_conv", "short convolution", "one kernel that reads its input once", "a tap at a time in PyTorch"
)
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


@torch.no_grad()
def short_conv(
    x: Tensor, weight: Tensor, state: Tensor | None = None, *, silu: bool = True, impl: str = "auto"
) -> Tensor:
    """`y[t] = f(sum_j weight[W - 1 - j] x[t - j])` for each channel, `f` being SiLU or nothing; sums in fp32 or fp64.

    Nothing is kept for a backward pass.

    Args:
        x: `[B, T, C]`, the last axis contiguous.
        weight: `[C, W]`, any strides; the last tap meets the current token.
        state: `[B, W - 1, C]`, the inputs before the first, the last axis contiguous; `None` for zeros.
        silu: whether SiLU follows.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[B, T, C]` in x's dtype, contiguous.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_arguments(x, weight, state)
    if _CHOICE.chosen(impl, x.device, x.dtype) == "triton":
        # Here, since it imports triton.
        from lapkernels.short_conv.triton_conv import short_conv_triton

        return short_conv_triton(x, weight, state, silu)
    return short_conv_reference(x, weight, state, silu)
