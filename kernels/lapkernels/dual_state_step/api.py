"""The step's public function, and the choice of what computes it."""

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference
from lapkernels.decoding.configs import StepConfig
from lapkernels.dual_state_step.arguments import StepArguments
from lapkernels.dual_state_step.reference import dual_state_step_reference
from lapkernels.dual_state_step.validation import check_arguments


def allocate_state(
    slots: int,
    states: int,
    heads: int,
    key_width: int,
    value_width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """A pool of zero states, `[slots, states, H, K, V]`."""
    return torch.zeros(slots, states, heads, key_width, value_width, dtype=dtype, device=device)


_CHOICE = KernelOrReference(
    "dual_state_step",
    "step of gated states",
    "one kernel that reads and writes each state once",
    "one token after the other in PyTorch",
)
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


@torch.no_grad()
def dual_state_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    gate: Tensor,
    mixture: Tensor,
    normaliser: float = 16.0,
    floor: float = -50.0,
    scale: float | None = None,
    position: Tensor | None = None,
    slots: Tensor | None = None,
    commit: Tensor | None = None,
    config: StepConfig | None = None,
    impl: str = "auto",
) -> Tensor:
    """Advance rows by one token (or a few): all states of a head in one pass, in place.

    For each row, token, key head and state a, in fp32 (fp64 for fp64 inputs): `g = max(logsigmoid(gate) / normaliser,
    floor)`, `S_a = Diag(exp(g_a)) S_a + k v^T`, `o = sum_a softmax(mixture)_a S_a^T (scale q)`. Any of q, k, v, gate
    may be a strided view, as long as its last axis is contiguous.

    Args:
        q: `[batch, T, HQ, K]`; T is 1 but for speculative decoding. Query head j reads key head `j // (HQ // H)`.
        k: `[batch, T, H, K]`.
        v: `[batch, T, H, V]`.
        state: `[slots, states, H, K, V]`, fp32 or bf16 (fp64 for the reference); slots contiguous, written in place.
        gate: `[batch, T, states, H, K]`, before the logsigmoid.
        mixture: `[states]`, before the softmax.
        normaliser: what the logsigmoid is divided by.
        floor: the least log decay.
        scale: factor on q; `None` for `K ** -0.5`.
        position: `[batch]`, int32 or int64, tokens that each row has had so far: a row at 0 starts from zero states,
            whatever its slot holds. `None`: all rows go on.
        slots: `[batch]`, int32 or int64, where each row lives in the pool, no two alike. Negative: a padding row, of
            which nothing is read or written and whose output is zero. `None` for `0 .. batch - 1`.
        commit: `[batch]`, int32 or int64, `0 <= commit <= T`: how many tokens count; `None` for all. The states are
            then those after so many tokens; 0 writes nothing.
        config: how the kernel cuts the step; `None` for what its table says.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[batch, T, HQ, V]` in v's dtype, contiguous.

    Raises:
        InvalidInput: a shape, dtype, stride, device or setting that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.

    Source: DSLA arXiv 2506.09316.
    """
    check_arguments(q, k, v, state, gate, mixture, normaliser, position, slots, commit)
    factor: float = q.shape[3] ** -0.5 if scale is None else scale
    arguments = StepArguments(q, k, v, state, gate, mixture, normaliser, floor, factor, position, slots, commit)
    if _CHOICE.chosen(impl, q.device, q.dtype) == "triton":
        # Here, since it imports triton.
        from lapkernels.dual_state_step.triton_launch import dual_state_step_triton

        return dual_state_step_triton(arguments, config)
    return dual_state_step_reference(arguments)
