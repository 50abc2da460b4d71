"""The public functions, and the choice of what computes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference, gradient_wanted
from lapkernels.errors import KernelUnavailable
from lapkernels.norm.reference import rms_norm_reference, swiglu_reference
from lapkernels.norm.validation import check_gated, check_norm

_WIDEST = 65536
"""Numbers of a row that one program can hold."""
_WIDEST_WITH_GRADIENT = 8192
"""Likewise, with all that a gradient needs."""


class NormOutput(NamedTuple):
    """What `rms_norm` returns.

    Attributes:
        output: normed, `[.., D]`, in x's dtype or the one asked for.
        residual: what was normed: x, or its sum with the residual in the residual's dtype.
    """

    output: Tensor
    residual: Tensor


_CHOICE = KernelOrReference("norm", "norm", "one kernel that reads its input once", "in PyTorch")
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    shares: bool = False,
    dtype: torch.dtype | None = None,
    ready: bool = False,
    impl: str = "auto",
) -> NormOutput:
    """`s / rms(s) * (weight + offset) * f(gate)`, where `s` is x or `residual + x`, in fp32 (fp64 for fp64) inside.

    The sum is rounded to the residual's dtype before it is normed, as where the two are apart. Gradients of x, weight,
    residual and gate are there once; theirs, of the kernel, are not. For them the sum, weight and gate are kept. The
    weight's is added up in one order, whatever runs beside.

    Args:
        x: `[.., D]`, the last axis contiguous; with `shares` `[S, .., D]`.
        weight: `[D]`.
        eps: added to the mean square.
        residual: `[.., D]`, of a dtype of its own; `None` for none.
        offset: 1 for the families that keep the weight less one (Qwen3-Next, Qwen3.5).
        gate: `[.., D]`, of a dtype of its own; `None` for none.
        gate_activation: f: `silu`, `swish` (the same) or `sigmoid`.
        shares: whether x is what a product along D, split, has left (`lapkernels.few_linear`): its first axis is
            summed in fp32, the kernel in the axis' order, and only the sum with the residual, which there must be, is
            rounded.
        dtype: of the output; `None` for x's.
        ready: whether the weight was there before the kernel that was launched last, as a model's are: then it may be
            read while that one still runs.
        impl: `auto` (see `select_impl`; inside `torch.compile` never the kernel), `reference` or `triton`.

    Returns:
        A `NormOutput`. Nothing is written in place.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_norm(x, weight, residual, gate, gate_activation, shares)
    sigmoid = gate_activation == "sigmoid"
    wanted = gradient_wanted(x, weight, residual, gate)
    if _chosen(impl, x, wanted) == "triton":
        widest = _WIDEST_WITH_GRADIENT if wanted else _WIDEST
        if x.shape[-1] > widest and impl == "triton":
            with_ = ", with gradients," if wanted else ""
            raise KernelUnavailable(
                f"impl='triton' for the norm: a program{with_} holds rows of {widest}, not {x.shape[-1]}"
            )
        # Here, since they import triton.
        if x.shape[-1] <= widest and wanted:
            from lapkernels.norm.triton_autograd import rms_norm_with_gradients

            return NormOutput(*rms_norm_with_gradients(x, weight, eps, residual, offset, gate, sigmoid, shares, dtype))
        if x.shape[-1] <= widest:
            from lapkernels.norm.triton_norm import rms_norm_triton

            return NormOutput(*rms_norm_triton(x, weight, eps, residual, offset, gate, sigmoid, shares, dtype, ready))
    return NormOutput(*rms_norm_reference(x, weight, eps, residual, offset, gate, sigmoid, shares, dtype))


def swiglu(x: Tensor, up: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """`silu(gate) * up`, in fp32 (fp64 for fp64) inside; gradients are there once, theirs, of the kernel, are not.

    Args:
        x: `[.., 2 F]`, gate and up side by side, the last axis contiguous; with `up` the gate alone, `[.., F]`.
        up: `[.., F]`, where it lies apart.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[.., F]` in x's dtype.

    Raises:
        InvalidInput: a shape, dtype or stride that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_gated(x, up)
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    wanted = gradient_wanted(gate, up)
    if _chosen(impl, x, wanted) == "reference":
        return swiglu_reference(gate, up)
    # Here, since they import triton.
    if wanted:
        from lapkernels.norm.triton_autograd import swiglu_with_gradients

        return swiglu_with_gradients(gate, up)
    from lapkernels.norm.triton_norm import swiglu_triton

    return swiglu_triton(gate, up)


def _chosen(impl: str, x: Tensor, needs_gradient: bool) -> str:
    """What runs, `reference` or `triton`."""
    if impl == "auto" and torch.compiler.is_compiling():
        return "reference"
    return _CHOICE.chosen(impl, x.device, x.dtype, needs_gradient=needs_gradient)
