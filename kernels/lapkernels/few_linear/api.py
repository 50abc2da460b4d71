"""The public functions, and the choice of what computes it."""

import os
from functools import cache

import torch
from torch import Tensor

from lapkernels import verdicts
from lapkernels._triton import is_interpreted, kernels_can_run, runs_on_hopper, triton_version
from lapkernels.delta_rule.api import Choice
from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.few_linear.configs import MOST_ROWS, beats_cublas
from lapkernels.few_linear.reference import few_linear_reference, few_swiglu_reference
from lapkernels.few_linear.validation import check_arguments

IMPLEMENTATIONS = ("auto", "reference", "triton", "gluon")
VARIABLE = "LAPKERNELS_FEW_LINEAR"
"""In the environment: `cublas` for no product by these kernels of those that ask `is_faster`, `triton` for none in
Gluon."""

_MOST_OUTPUTS = 2**24
"""Rows of a matrix, so that 32 bits are enough for places in a result."""


def why_not(
    impl: str, device: torch.device | str, dtype: torch.dtype, rows: int = MOST_ROWS, width: int = 64
) -> str | None:
    """Say why an implementation asked for by name cannot run such a call; else `None`.

    Args:
        impl: its name.
        device: where the tensors lie.
        dtype: of x and the matrix.
        rows: B.
        width: D.

    Raises:
        InvalidInput: there is no such implementation.
    """
    if impl not in IMPLEMENTATIONS:
        raise InvalidInput(f"impl is '{impl}'; the product of few rows has {', '.join(IMPLEMENTATIONS)}")
    if impl in ("auto", "reference"):
        return None
    device = torch.device(device)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels multiply bf16 and fp16, not {dtype}; use impl='reference'"
    if rows > MOST_ROWS:
        return f"its kernels take {MOST_ROWS} rows at most, not {rows}"
    if width % 8:
        return f"D = {width} is no multiple of 8, so rows are not aligned in memory"
    if not kernels_can_run(device):
        return (
            "it needs triton and a CUDA device; on a CPU use impl='reference', or set TRITON_INTERPRET=1 before "
            "triton is imported to test the kernel in Triton there"
        )
    if not runs_on_hopper(device):
        return "it needs an NVIDIA Hopper (compute capability 9), for which its kernels are cut"
    if impl == "gluon" and (missing := _no_gluon()) is not None:
        return missing
    return verdicts.why_wrong("few_linear", impl, device)


@cache
def _no_gluon() -> str | None:
    """Why there is no Gluon here, or `None`."""
    if is_interpreted():
        return "Gluon's kernels cannot be interpreted; unset TRITON_INTERPRET"
    version = triton_version()
    if version is None or not (3, 6) <= version[:2] <= (3, 7):
        # The language below Triton's is experimental, and what it means may change.
        return f"its kernel in Gluon was tried with triton 3.6 and 3.7, not {'.'.join(map(str, version or ('none',)))}"
    try:
        from lapkernels.few_linear import gluon_few  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except (ImportError, AttributeError) as error:
        return f"triton's Gluon cannot be imported: {error}"
    return None


def select_impl(device: torch.device | str, dtype: torch.dtype, rows: int = MOST_ROWS, width: int = 64) -> Choice:
    """Say what `impl="auto"` runs for such a call, and why. Arguments as for `why_not`."""
    if torch.device(device).type == "cpu":
        return Choice("reference", "on a CPU PyTorch is the faster way")
    if os.environ.get(VARIABLE) != "triton" and why_not("gluon", device, dtype, rows, width) is None:
        return Choice("gluon", "the matrix is under way before the kernel before has ended")
    why = why_not("triton", device, dtype, rows, width)
    return (
        Choice("triton", "tiles that read the matrix once") if why is None else Choice("reference", f"by torch: {why}")
    )


def is_faster(x: Tensor, weight: Tensor, *, apart: bool = False, gated: bool = False) -> bool:
    """Whether such a product is of a kind that was measured to be faster than cuBLAS; see `configs`.

    Args:
        x: `[B, D]`.
        weight: `[N, D]`.
        apart: whether its reader makes the sum over parts of D.
        gated: whether it is `few_swiglu`'s.
    """
    (rows, width), outputs = x.shape, len(weight)
    if not x.is_cuda or rows > MOST_ROWS or not _aligned(x, weight) or os.environ.get(VARIABLE) == "cublas":
        return False
    impl = select_impl(x.device, weight.dtype, rows, width).name
    return impl != "reference" and beats_cublas(impl, rows, outputs, width, apart, gated=gated)


def few_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    apart: bool = False,
    ready: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`scale (x W^T + bias)`, products and sums in fp32 (fp64 for fp64), or parts whose sum that is.

    Args:
        x: `[B, D]`, the last axis contiguous.
        weight: `[N, D]`, likewise, in x's dtype.
        bias: `[N]`.
        scale: factor on the result.
        apart: whether what programs have summed over their parts of D is left as it is.
        ready: whether matrix and bias were there before the kernel that was launched last, as a model's are: then they
            may be read while that one still runs.
        impl: `auto` (see `select_impl`), `reference`, `triton` or `gluon`.

    Returns:
        `[B, N]` in the matrix's dtype, rounded once; with `apart` `[splits, B, N]` in fp32 (fp64 for fp64), whose sum
        over the first axis in its order, as `lapkernels.norm.rms_norm` makes it, is the result. How many splits there
        are depends on the implementation and the shape alone.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_arguments(x, weight, bias)
    impl = _chosen(impl, x, weight)
    # Here, since they import triton.
    if impl == "gluon":
        from lapkernels.few_linear.gluon_few import few_linear_gluon

        return few_linear_gluon(x, weight, bias, scale, apart, ready)
    if impl == "triton":
        from lapkernels.few_linear.triton_few import few_linear_triton

        return few_linear_triton(x, weight, bias, scale, apart)
    return few_linear_reference(x, weight, bias, scale, apart)


def few_swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, ready: bool = False, impl: str = "auto"
) -> Tensor:
    """`silu(gate) * up` of `[gate, up] = x W^T + bias`: `lapkernels.norm.swiglu` of `few_linear`, in one kernel.

    Gate and up are rounded to the matrix's dtype before the activation, as where they are written and read again: the
    result is that of the two kernels to the bit, where both are cut along D alike.

    Args:
        x: `[B, D]`, the last axis contiguous.
        weight: `[2 F, D]`, likewise, in x's dtype: the rows of gate, then those of up.
        bias: `[2 F]`.
        ready: as for `few_linear`.
        impl: likewise.

    Returns:
        `[B, F]` in the matrix's dtype.

    Raises:
        InvalidInput: a shape, dtype, stride or device that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.
    """
    check_arguments(x, weight, bias, gated=True)
    impl = _chosen(impl, x, weight)
    # Here, since they import triton.
    if impl == "gluon":
        from lapkernels.few_linear.gluon_few import few_swiglu_gluon

        return few_swiglu_gluon(x, weight, bias, ready)
    if impl == "triton":
        from lapkernels.few_linear.triton_few import few_swiglu_triton

        return few_swiglu_triton(x, weight, bias)
    return few_swiglu_reference(x, weight, bias)


def _chosen(impl: str, x: Tensor, weight: Tensor) -> str:
    """What runs a call whose arguments are checked."""
    (rows, width), aligned = x.shape, _aligned(x, weight)
    if impl == "auto":
        return select_impl(x.device, x.dtype, rows, width).name if aligned else "reference"
    if (why := why_not(impl, x.device, x.dtype, rows, width)) is not None:
        raise KernelUnavailable(f"impl='{impl}' for the product of few rows: {why}")
    if impl != "reference" and not aligned:
        raise KernelUnavailable(
            f"impl='{impl}' for the product of few rows: rows of x (strides {x.stride()}) and of the matrix (shape "
            f"{list(weight.shape)}, strides {weight.stride()}) should begin at multiples of 16 bytes, and the matrix "
            f"have {_MOST_OUTPUTS} rows at most"
        )
    return impl


def _aligned(x: Tensor, weight: Tensor) -> bool:
    """Whether a tensor memory accelerator can read both."""
    return len(weight) <= _MOST_OUTPUTS and all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1
        for tensor in (x, weight)
    )
