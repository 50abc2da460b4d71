"""The step's public function, and the choice of what computes it."""

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference
from lapkernels.decoding.configs import StepConfig
from lapkernels.decoding.rows import ConvState
from lapkernels.decoding.workspace import Workspace
from lapkernels.delta_step.arguments import StepArguments
from lapkernels.delta_step.reference import delta_step_reference
from lapkernels.delta_step.validation import check_arguments


def allocate_state(
    slots: int,
    value_heads: int,
    key_width: int,
    value_width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """A pool of zero states, `[slots, HV, K, V]`, in the memory order that the kernels are fastest with.

    That order is K rows of V contiguous numbers, so any K costs its own bytes and no more. `delta_step` takes the
    other order as well (`pool.transpose(-1, -2)` of a `[slots, HV, V, K]` pool).
    """
    return torch.zeros(slots, value_heads, key_width, value_width, dtype=dtype, device=device)


_CHOICE = KernelOrReference(
    "delta_step",
    "decode step",
    "one kernel that reads and writes the state once",
    "one token after the other in PyTorch",
)
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


@torch.no_grad()
def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    b: Tensor | None,
    a: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    decay_lower_bound: float | None = None,
    conv: ConvState | None = None,
    position: Tensor | None = None,
    slots: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    gate_activation: str = "silu",
    lamb: Tensor | None = None,
    strength: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    silu_q: bool = True,
    silu_k: bool = True,
    silu_v: bool = True,
    commit: Tensor | None = None,
    rounding_seed: Tensor | None = None,
    workspace: Workspace | None = None,
    config: StepConfig | None = None,
    impl: str = "auto",
) -> Tensor:
    """Advance rows by one token (or a few), from raw projections to the normed and gated output, state in place.

    For each row, token and value head, in fp32 (fp64 for fp64 inputs):

    1. q, k, v go through the short convolution and SiLU; q and k get unit length (`x / sqrt(sum x^2 + 1e-6)`).
    2. `beta = strength sigmoid(b)`; the log decay is `g = -exp(A_log) softplus(a + dt_bias)`.
    3. `S *= exp(g)`; `u = beta (v - S^T x)` with `x = k + lamb q` (`k` without `lamb`); `S += k u^T`;
       `o = S^T (scale q)`. The order matters: decay, error, write, read.
    4. `o / rms(o) * norm_weight * f(gate)`.

    Any of q, k, v, b, a, lamb, gate may be a strided view of one projection's output, as long as its last axis is
    contiguous. A row at position 0 starts from a zero state and no earlier inputs, whatever its slot holds. Nothing is
    kept for a backward pass.

    **Several tokens** (speculative decoding): all T tokens are computed and give outputs; state and convolution
    inputs advance by the first `commit[b]` tokens only. The next call passes the accepted tokens again, followed by
    new drafts, with `commit` the number accepted and `position` grown by what the last call committed. So a rejected
    draft leaves no trace, and the state is read and written once a call.

    Args:
        q: `[B, T, H, K]`, raw; T is 1 but for speculative decoding.
        k: `[B, T, H, K]`, raw.
        v: `[B, T, HV, V]`, raw; HV is a multiple of H, and value head j reads key head `j // (HV // H)`.
        state: `[slots, HV, K, V]`, fp32 or bf16 (fp64 for the reference), K or V contiguous; written in place.
        b: `[B, T, HV]`, write strength before its sigmoid; `None` for a constant `strength`.
        a: `[B, T, HV]`, or `[B, T, HV, K]` for a decay per key channel (KDA); `None` for no decay. Without `A_log`
            it is the log decay itself.
        A_log: `[HV]`, log of the decay rate.
        dt_bias: `[HV]`, or `[HV, K]` per key channel; `None` for none.
        decay_lower_bound: the log decay is `decay_lower_bound sigmoid(exp(A_log) (a + dt_bias))` instead (KDA's
            "safe gate"; a negative number).
        conv: filter and ring over the channels `[q | k | v]`, written in place; `None` for no convolution.
        position: `[B]`, int32 or int64, tokens that each row has had so far; needed with `conv`.
        slots: `[B]`, int32 or int64, where each row lives in the pool, no two alike. Negative: a padding row, of
            which nothing is read or written and whose output is zero. `None` for `0 .. B - 1`.
        gate: `[B, T, HV, V]`, before its activation; `None` for none.
        norm_weight: `[V]`; `None` for no output norm.
        norm_eps: added to the mean square in the output norm.
        gate_activation: `silu` (`swish`) or `sigmoid`.
        lamb: `[B, T, HV]`, Q-Delta's query feedback after its sigmoid.
        strength: factor on the write strength (2 with negative eigenvalues).
        scale: factor on q; `None` for `K ** -0.5`.
        qk_l2norm: whether q and k get unit length.
        silu_q: whether SiLU follows q (after the convolution, or without one).
        silu_k: the same for k.
        silu_v: the same for v.
        commit: `[B]`, int32 or int64, `0 <= commit <= T`: how many tokens count; `None` for all. 0 writes nothing.
        rounding_seed: one integer on the device: round a bf16 state up or down at random, with the true value as
            mean. Change it in place between steps (inside a CUDA graph too). `None` rounds to the nearest.
        workspace: where the kernel's programs meet; `None` for the device's own, which steps must not use at the same
            time on several streams.
        config: how the kernel cuts the step; `None` for what its table says.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[B, T, HV, V]` in v's dtype, contiguous.

    Raises:
        InvalidInput: a shape, dtype, stride, device or setting that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.

    Source: Gated DeltaNet arXiv 2412.06464 (eq. 10), Q-Delta arXiv 2606.08804, KDA arXiv 2510.26692.
    """
    sizes = check_arguments(
        q, k, v, state, b, a, A_log, dt_bias, decay_lower_bound, conv, position, slots, gate, norm_weight,
        gate_activation, lamb, commit, rounding_seed,
    )  # fmt: skip
    factor: float = sizes.key_width**-0.5 if scale is None else scale
    arguments = StepArguments(
        q, k, v, state, b, a, A_log, dt_bias, decay_lower_bound, conv, position, slots, gate, norm_weight, norm_eps,
        gate_activation, lamb, strength, factor, qk_l2norm, (silu_q, silu_k, silu_v), commit, rounding_seed,
    )  # fmt: skip
    if _CHOICE.chosen(impl, q.device, q.dtype) == "triton":
        # Here, since it imports triton.
        from lapkernels.delta_step.triton_launch import delta_step_triton

        return delta_step_triton(arguments, config, workspace)
    return delta_step_reference(arguments)
