"""The operator's public function, and the choice of what computes it."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels import verdicts
from lapkernels.delta_rule import fla_backend, triton_backend
from lapkernels.delta_rule.chunked import delta_rule_chunked
from lapkernels.delta_rule.gates import GIVEN, RawGates
from lapkernels.delta_rule.reference import compute_dtype, delta_rule_reference, erase_direction
from lapkernels.delta_rule.validation import check_arguments, check_gates
from lapkernels.errors import InvalidInput, KernelUnavailable

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton", "fla")

NORM_EPS = 1e-6
"""Added to the squared length before the root, as in fla."""


class DeltaRuleOutput(NamedTuple):
    """What the operator returns.

    Attributes:
        output: `[B, T, HV, V]`, in v's dtype.
        final_state: `[B or sequences, HV, K, V]` in fp32 (fp64 for fp64 inputs), or `None` when not asked for.
    """

    output: Tensor
    final_state: Tensor | None


class Choice(NamedTuple):
    """Which implementation runs, and why, in one line."""

    name: str
    reason: str


def l2_normalise(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + 1e-6)` over the last axis, computed in fp32 (fp64 for fp64), in x's dtype.

    A row of zeros stays zero and has a finite gradient.
    """
    width = x.shape[-1]
    # The root of the mean square is that of the sum but for a factor, and its norm is one kernel on a GPU.
    return (F.rms_norm(x.to(compute_dtype(x)), (width,), None, NORM_EPS / width) * width**-0.5).to(x.dtype)


def select_impl(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    key_width: int,
    time: int,
    gated: bool,
    erasing: bool = False,
    needs_gradient: bool = False,
    value_width: int | None = None,
    by_channel: bool = False,
) -> Choice:
    """Say what `impl="auto"` runs for such a call: the fastest one that is right here.

    Args:
        device: where the tensors lie.
        dtype: of q, k and v.
        key_width: K.
        time: T.
        gated: whether there is a log decay `g`.
        erasing: whether there is an erase direction of its own, or query feedback.
        needs_gradient: whether a backward pass will follow.
        value_width: V; `None` where it is not known, then not 128.
        by_channel: whether the log decay is of each key channel.
    """
    device = torch.device(device)
    if time == 1 and not (device.type == "cuda" and not erasing and dtype in (torch.bfloat16, torch.float16)):
        return Choice("reference", "one step needs no chunks")
    call: dict[str, Any] = {
        "key_width": key_width, "gated": gated, "erasing": erasing, "needs_gradient": needs_gradient,
        "by_channel": by_channel,
    }  # fmt: skip
    without_fla = why_not("fla", device, dtype, **call) or fla_backend.why_imprecise(dtype)
    without_triton = why_not("triton", device, dtype, **call) or triton_backend.why_untried(by_channel=by_channel)
    if without_fla is None:
        faster = fla_backend.why_faster(device, time, value_width, **call)
        if faster is not None:
            return Choice("fla", faster)
    if without_triton is None:
        return Choice("triton", "lapkernels' chunks are right here and the fastest")
    if without_fla is None:
        return Choice("fla", f"fla's kernels are right here; {without_triton}")
    why = without_fla if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16) else without_triton
    unsound = why_not("chunked", device, dtype, **call)
    if unsound is not None:
        return Choice("reference", f"one step after the other: {why}; chunks: {unsound}")
    return Choice("chunked", f"matrix products over chunks in PyTorch: {why}")


def why_not(
    impl: str,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    key_width: int,
    gated: bool,
    erasing: bool = False,
    needs_gradient: bool = False,
    by_channel: bool = False,
) -> str | None:
    """Say why an implementation asked for by name cannot run such a call, or is known to be wrong; else `None`.

    Arguments as for `select_impl`.

    Raises:
        InvalidInput: `impl` is no implementation of the delta rule.
    """
    if impl not in IMPLEMENTATIONS:
        raise InvalidInput(f"impl is '{impl}'; the delta rule has {', '.join(IMPLEMENTATIONS)}")
    if impl in ("auto", "reference"):
        return None
    device = torch.device(device)
    if impl == "fla":
        kind: dict[str, bool] = {"gated": gated, "erasing": erasing, "by_channel": by_channel}
        return fla_backend.why_unavailable(device, dtype, key_width, **kind) or fla_backend.why_wrong(
            device, needs_gradient=needs_gradient, **kind
        )
    variant = fla_backend.variant_of(gated=gated, erasing=erasing, by_channel=by_channel)
    if impl == "triton" and (why := triton_backend.why_unavailable(device, dtype, key_width)) is not None:
        return why
    return verdicts.why_wrong("delta_rule", impl, device, variant=variant, needs_gradient=needs_gradient)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    lamb: Tensor | None = None,
    gates: RawGates | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = 64,
    released: bool = False,
    impl: str = "auto",
) -> DeltaRuleOutput:
    """Write to and read from a matrix state by the (gated) delta rule.

    Each step and value head: `S *= exp(g)`, or `S[i] *= exp(g[i])` for each key channel i; `u = beta (v - S^T x)`;
    `S += k u^T`; `o = S^T (scale q)`, where the erase direction `x` is `k` unless given, and `k + lamb q` with query
    feedback. The order matters: decay, error, write, read. The gate is a *log* decay, never positive; `beta` is used as
    given. The state and all sums are fp32 (fp64 for fp64 inputs) whatever the dtype of the inputs, autocast or not; the
    Triton kernels and fla's multiply in the dtype of the inputs and add in fp32.

    Args:
        q: `[B, T, H, K]`, read directions.
        k: `[B, T, H, K]`, write directions.
        v: `[B, T, HV, V]`; HV is a multiple of H, and value head j reads key head `j // (HV // H)`.
        beta: `[B, T, HV]`, write strength.
        g: `[B, T, HV]`, log decay, or `[B, T, HV, K]` for one of each key channel (Kimi Delta Attention); `None` for
            none.
        erase: `[B, T, H or HV, K]`, erase directions; `None` for `k`.
        lamb: `[B, T, HV]`, Q-Delta's query feedback, used as given; not together with `erase`. It mixes q and k as they
            are after `qk_l2norm`, q without `scale`.
        gates: what `beta` and `g` still have to go through, where they are a layer's projections; the Triton kernels
            do it on the way, but for decays of each key channel or with a lower bound. `None`: nothing.
        scale: factor on q; `None` for `K ** -0.5`.
        initial_state: `[B or sequences, HV, K, V]`; `None` for zeros.
        output_final_state: whether to return the state after the last step.
        cu_seqlens: `[sequences + 1]`, int32 or int64 boundaries of sequences packed in one row (then B is 1), on
            any device: host values are read, so boundaries on a GPU make the call wait for it. Each sequence has
            one token at least, its own initial state and its own final state.
        qk_l2norm: normalise q and k as `l2_normalise` does first; not together with `erase`.
        chunk_size: C of the chunked form in PyTorch; sets its speed, not its result (but for `released`). Kernels have
            their own.
        released: compute what Q-Delta's released kernels compute, which is not the recurrence: within a chunk the
            *earlier* token's `k + lamb q` meets the *later* token's k. What was trained with them may need it. Only the
            chunked form in PyTorch has it, and not for decays of each key channel; chunks of 64, counted from the first
            token of the call, are theirs.
        impl: `auto` (see `select_impl`; inside `torch.compile` never a kernel), `reference`, `chunked`, `triton` or
            `fla`.

    Returns:
        A `DeltaRuleOutput`.

    Raises:
        InvalidInput: a shape, dtype, device or setting that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here, is known to be wrong here, or does not
            have what `released` asks for.

    Source: DeltaNet arXiv 2406.06484, Gated DeltaNet arXiv 2412.06464 (eq. 10), query feedback arXiv 2606.08804, Kimi
        Delta Attention arXiv 2510.26692.
    """
    sizes = check_arguments(q, k, v, beta, g, erase, initial_state, cu_seqlens, qk_l2norm, chunk_size, lamb, released)
    gates = GIVEN if gates is None else gates
    check_gates(gates, g, sizes, q.device)
    tensors = (q, k, v, beta, g, erase, initial_state, lamb, gates.A_log, gates.dt_bias)
    erasing, by_channel = erase is not None or lamb is not None, g is not None and g.ndim == 4
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if released:
        if impl not in ("auto", "chunked"):
            raise KernelUnavailable(f"impl='{impl}' for the released recurrence: only impl='chunked' computes it")
        impl = "chunked"
    if impl == "auto" and torch.compiler.is_compiling():
        # What fla can do here is asked of the file system and of its own modules; neither belongs in a graph.
        impl = "reference" if sizes.time == 1 else "chunked"
    elif impl == "auto":
        impl = select_impl(
            q.device,
            q.dtype,
            key_width=sizes.key_width,
            time=sizes.time,
            gated=g is not None,
            erasing=erasing,
            needs_gradient=needs_gradient,
            value_width=sizes.value_width,
            by_channel=by_channel,
        ).name
    else:
        why = why_not(
            impl, q.device, q.dtype, key_width=sizes.key_width, gated=g is not None,
            erasing=erasing, needs_gradient=needs_gradient, by_channel=by_channel,
        )  # fmt: skip
        if why is not None:
            raise KernelUnavailable(f"impl='{impl}' for the delta rule: {why}")

    factor: float = sizes.key_width**-0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        if impl != "triton":
            beta, g = gates.activated(beta, g)
        elif by_channel or gates.decay_lower_bound is not None:
            # The kernels know one decay of a head alone before its activation.
            g, gates = gates.log_decay(g), RawGates(gates.strength)
    if lamb is not None and impl != "chunked":
        # These take the erase direction as a tensor, which is made before q and k are rounded (fla rounds it itself).
        dtype = compute_dtype(q)
        q, k = (l2_normalise(x.to(dtype)) if qk_l2norm else x.to(dtype) for x in (q, k))
        erase, qk_l2norm = erase_direction(q, k, lamb), False
        if impl != "reference":
            q, k = q.to(v.dtype), k.to(v.dtype)
            erase = erase.to(v.dtype) if impl == "triton" else erase
    if impl == "fla":
        output, state = fla_backend.delta_rule_fla(
            q, k, v, beta, g, erase, factor, initial_state, output_final_state, cu_seqlens,
            qk_l2norm=qk_l2norm, needs_gradient=needs_gradient,
        )  # fmt: skip
        return DeltaRuleOutput(output.to(v.dtype), state if output_final_state else None)

    if impl == "triton":
        output, state = triton_backend.run(
            q, k, v, beta, g, erase, factor, initial_state, output_final_state, cu_seqlens,
            gates=gates, qk_l2norm=qk_l2norm, norm_eps=NORM_EPS, needs_gradient=needs_gradient,
        )  # fmt: skip
        return DeltaRuleOutput(output, state if output_final_state else None)

    if qk_l2norm:
        # Widened first: rounding the unit vectors would cost more precision than all that follows.
        q, k = (l2_normalise(x.to(compute_dtype(x))) for x in (q, k))
    if impl == "chunked":
        output, state = delta_rule_chunked(
            q, k, v, beta, g, erase, factor, initial_state, cu_seqlens, chunk_size, lamb, released
        )
    else:
        output, state = delta_rule_reference(
            q, k, v, beta, g, k if erase is None else erase, factor, initial_state, cu_seqlens
        )
    return DeltaRuleOutput(output.to(v.dtype), state if output_final_state else None)
