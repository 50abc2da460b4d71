"""The public function, and the choice of what computes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference
from lapkernels.delta_rule.api import Choice
from lapkernels.thin_linear.reference import thin_linear_reference
from lapkernels.thin_linear.validation import check_arguments

MOST_ROWS = 8
"""That the kernel takes: more are better served by a matrix product on tensor cores."""


class Normed(NamedTuple):
    """An RMS norm before a layer.

    Attributes:
        weight: `[D]`.
        eps: added to the mean square.
        offset: added to the weight (1 where it is kept less one).
    """

    weight: Tensor
    eps: float
    offset: float = 0.0


_CHOICE = KernelOrReference("thin_linear", "thin layer", "one kernel that reads the matrix once", "in PyTorch")


def why_not(impl: str, device: torch.device | str, dtype: torch.dtype, rows: int = 1) -> str | None:
    """Say why an implementation asked for by name cannot run such a call; else `None`.

    Args:
        impl: its name.
        device: where the tensors lie.
        dtype: of the matrix.
        rows: of the input.

    Raises:
        InvalidInput: there is no such implementation.
    """
    return _CHOICE.why_not(impl, device, dtype, _limit(rows))


def select_impl(device: torch.device | str, dtype: torch.dtype, rows: int = 1) -> Choice:
    """Say what `impl="auto"` runs for such a call, and why. Arguments as for `why_not`."""
    return _CHOICE.select_impl(device, dtype, _limit(rows))


def _limit(rows: int) -> str | None:
    return None if rows <= MOST_ROWS else f"its kernel takes {MOST_ROWS} rows at most, not {rows}"


def thin_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Normed | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scale: float = 1.0,
    ready: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`residual + scale (f(x) W^T + bias)`, where `f` is an RMS norm, SwiGLU or nothing.

    `f(x)` is computed in fp32 (fp64 for fp64) and rounded to the matrix's dtype, as where it is a layer of its own;
    sums are fp32, and the result is rounded once.

    Args:
        x: `[B, D]`, or `[B, 2 D]` of gate and up side by side with `gated`; the last axis contiguous.
        weight: `[N, D]`, the last axis contiguous.
        bias: `[N]`.
        norm: the norm before the layer; not together with `gated`.
        gated: whether `f(x)` is `silu(gate) * up`.
        residual: `[B, N]`, what the result is added to.
        scale: factor on the result.
        ready: whether matrix, bias and the norm's weight were there before the kernel that was launched last, as a
            model's are: then they may be read while that one still runs. Nothing changes on a GPU that cannot begin a
            kernel early.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[B, N]`, in the residual's dtype where there is one, else in the matrix's.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_arguments(x, weight, bias, None if norm is None else norm.weight, gated, residual)
    parts = (None, 0.0, 0.0) if norm is None else norm
    if _CHOICE.chosen(impl, x.device, weight.dtype, _limit(len(x))) == "triton":
        # Here, since it imports triton.
        from lapkernels.thin_linear.triton_thin import thin_linear_triton

        return thin_linear_triton(x, weight, bias, *parts, gated, residual, scale, ready)
    return thin_linear_reference(x, weight, bias, *parts, gated, residual, scale)
