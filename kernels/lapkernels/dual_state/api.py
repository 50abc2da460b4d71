"""The operator's public function, and the choice of what computes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lapkernels import verdicts
from lapkernels.delta_rule.api import Choice
from lapkernels.dual_state import fla_backend
from lapkernels.dual_state.chunked import dual_state_chunked
from lapkernels.dual_state.reference import dual_state_reference
from lapkernels.dual_state.validation import check_arguments
from lapkernels.errors import InvalidInput, KernelUnavailable

IMPLEMENTATIONS = ("auto", "reference", "chunked", "fla")


class DualStateOutput(NamedTuple):
    """What the operator returns.

    Attributes:
        output: `[B, T, HQ, V]`, in v's dtype.
        final_state: `[B or sequences, states, H, K, V]` in fp32 (fp64 for fp64 inputs), or `None` when not asked for.
    """

    output: Tensor
    final_state: Tensor | None


def select_impl(device: torch.device | str, dtype: torch.dtype, *, time: int, needs_gradient: bool = False) -> Choice:
    """Say what `impl="auto"` runs for such a call: the fastest one that is right here.

    Args:
        device: where the tensors lie.
        dtype: of q, k and v.
        time: T.
        needs_gradient: whether a backward pass will follow.
    """
    device = torch.device(device)
    if time == 1:
        return Choice("reference", "one step needs no chunks")
    why = why_not("fla", device, dtype, needs_gradient=needs_gradient) or fla_backend.why_imprecise(dtype)
    if why is None:
        return Choice("fla", "fla's chunked GLA takes all states in one call")
    unsound = why_not("chunked", device, dtype, needs_gradient=needs_gradient)
    if unsound is not None:
        return Choice("reference", f"one step after the other: {why}; chunks: {unsound}")
    return Choice("chunked", f"matrix products over chunks in PyTorch: {why}")


def why_not(impl: str, device: torch.device | str, dtype: torch.dtype, *, needs_gradient: bool = False) -> str | None:
    """Say why an implementation asked for by name cannot run such a call, or is known to be wrong; else `None`.

    Arguments as for `select_impl`.

    Raises:
        InvalidInput: `impl` is no implementation of the operator.
    """
    if impl not in IMPLEMENTATIONS:
        raise InvalidInput(f"impl is '{impl}'; gated states have {', '.join(IMPLEMENTATIONS)}")
    device = torch.device(device)
    if impl == "fla":
        return fla_backend.why_unavailable(device, dtype) or fla_backend.why_wrong(
            device, needs_gradient=needs_gradient
        )
    if impl == "chunked":
        return verdicts.why_wrong("dual_state", impl, device, needs_gradient=needs_gradient)
    return None


def dual_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mixture: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 16,
    impl: str = "auto",
) -> DualStateOutput:
    """Write keys and values to several matrix states that forget at different rates, and read their mixture.

    Each step, key head and state a: `S_a = Diag(exp(g_a)) S_a + k v^T`; `o = sum_a mixture_a S_a^T (scale q)`. Decay
    comes before the write, the write before the read. Each state decays *its own* past; k and v are the same for all.
    The gates are *log* decays, one a key channel, never positive; the mixture is used as given. States and all sums are
    fp32 (fp64 for fp64 inputs) whatever the dtype of the inputs, autocast or not; fla's kernels multiply in the dtype
    of the inputs and add in fp32. With one state and a mixture of 1 this is GLA.

    Args:
        q: `[B, T, HQ, K]`, read directions; HQ is a multiple of H, and query head j reads key head `j // (HQ // H)`.
        k: `[B, T, H, K]`, write directions.
        v: `[B, T, H, V]`.
        g: `[B, T, states, H, K]`, log decays.
        mixture: `[states]`, the share of each state in the output.
        scale: factor on q; `None` for `K ** -0.5`.
        initial_state: `[B or sequences, states, H, K, V]`; `None` for zeros.
        output_final_state: whether to return the states after the last step.
        cu_seqlens: `[sequences + 1]`, int32 or int64 boundaries of sequences packed in one row (then B is 1), on any
            device: host values are read, so boundaries on a GPU make the call wait for it. Each sequence has one token
            at least, its own initial states and its own final states.
        chunk_size: C of the chunked form in PyTorch; sets its speed, not its result. fla has its own.
        impl: `auto` (see `select_impl`; inside `torch.compile` never a kernel), `reference`, `chunked` or `fla`.

    Returns:
        A `DualStateOutput`.

    Raises:
        InvalidInput: a shape, dtype, device or setting that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here or is known to be wrong here.

    Source: GLA arXiv 2312.06635 (eq. 3); DSLA arXiv 2506.09316 (eqs. 4 and 5, where both states are written as if they
    decayed one common past: each decays its own).
    """
    sizes = check_arguments(q, k, v, g, mixture, initial_state, cu_seqlens, chunk_size)
    tensors = (q, k, v, g, mixture, initial_state)
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if impl == "auto" and torch.compiler.is_compiling():
        # What fla can do here is asked of the file system and of its own modules; neither belongs in a graph.
        impl = "reference" if sizes.time == 1 else "chunked"
    elif impl == "auto":
        impl = select_impl(q.device, q.dtype, time=sizes.time, needs_gradient=needs_gradient).name
    elif (why := why_not(impl, q.device, q.dtype, needs_gradient=needs_gradient)) is not None:
        raise KernelUnavailable(f"impl='{impl}' for gated states: {why}")

    factor: float = sizes.key_width**-0.5 if scale is None else scale
    if impl == "fla":
        output, state = fla_backend.dual_state_fla(
            q, k, v, g, mixture, factor, initial_state, output_final_state, cu_seqlens
        )
    elif impl == "chunked":
        output, state = dual_state_chunked(q, k, v, g, mixture, factor, initial_state, cu_seqlens, chunk_size)
    else:
        output, state = dual_state_reference(q, k, v, g, mixture, factor, initial_state, cu_seqlens)
    return DualStateOutput(output.to(v.dtype), state if output_final_state else None)
