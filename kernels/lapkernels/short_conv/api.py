"""The public function, and the choice of what computes it."""

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference, gradient_wanted
from lapkernels.short_conv.reference import short_conv_reference
from lapkernels.short_conv.validation import check_arguments

_CHOICE = KernelOrReference(
    "short_conv", "short convolution", "one kernel that reads its input once", "a tap at a time in PyTorch"
)
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
    impl: str = "auto",
) -> Tensor:
    """`y[t] = f(sum_j weight[W - 1 - j] x[t - j])` for each channel, `f` being SiLU or nothing; sums in fp32 or fp64.

    Gradients of x, the weight and the state are there once; theirs are not. For them the arguments are kept and
    nothing else: the sums are made again. Those of the weight are added up in one order, whatever runs beside.

    Args:
        x: `[B, T, C]`, the last axis contiguous.
        weight: `[C, W]`, any strides; the last tap meets the current token.
        state: `[B or sequences, W - 1, C]`, the inputs before the first, the last axis contiguous; `None` for zeros.
        cu_seqlens: `[sequences + 1]`, int32 or int64 boundaries, beside x, of sequences packed in one row (then B is
            1), which do not see one another. They rise strictly from 0 to T, which is checked on a CPU alone.
        silu: whether SiLU follows.
        impl: `auto` (see `select_impl`; inside `torch.compile` never the kernel), `reference` or `triton`.

    Returns:
        `[B, T, C]` in x's dtype, contiguous.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_arguments(x, weight, state, cu_seqlens)
    wanted = gradient_wanted(x, weight, state)
    if impl == "auto" and torch.compiler.is_compiling():
        impl = "reference"
    if _CHOICE.chosen(impl, x.device, x.dtype, needs_gradient=wanted) == "reference":
        return short_conv_reference(x, weight, state, cu_seqlens, silu)
    # Here, since they import triton.
    if wanted:
        from lapkernels.short_conv.triton_autograd import short_conv_with_gradients

        return short_conv_with_gradients(x, weight, state, cu_seqlens, silu)
    from lapkernels.short_conv.triton_conv import short_conv_triton

    return short_conv_triton(x, weight, state, cu_seqlens, silu)
