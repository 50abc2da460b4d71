"""The step's public function, and the choice of what computes it."""

import torch
from torch import Tensor

from lapkernels.decoding.choice import KernelOrReference
from lapkernels.decoding.configs import StepConfig
from lapkernels.decoding.rows import ConvState
from lapkernels.decoding.workspace import Workspace
from lapkernels.ssd_step.reference import ssd_step_reference
from lapkernels.ssd_step.validation import check_arguments


def allocate_state(
    slots: int,
    heads: int,
    head_width: int,
    state_width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """A pool of zero states, `[slots, heads, P, N]`, in the memory order that the kernels are fastest with.

    In memory each of the N state channels is a row of P contiguous numbers, so that any N costs its own bytes and no
    more. `ssd_step` takes the other order as well.
    """
    return torch.zeros(slots, heads, state_width, head_width, dtype=dtype, device=device).transpose(-1, -2)


_CHOICE = KernelOrReference(
    "ssd_step",
    "Mamba-2 step",
    "one kernel that reads and writes the state once",
    "one token after the other in PyTorch",
)
why_not, select_impl = _CHOICE.why_not, _CHOICE.select_impl


@torch.no_grad()
def ssd_step(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    dt: Tensor,
    A_log: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    conv: ConvState | None = None,
    position: Tensor | None = None,
    slots: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_groups: int | None = None,
    norm_eps: float = 1e-5,
    gate_first: bool = True,
    silu: bool = True,
    commit: Tensor | None = None,
    rounding_seed: Tensor | None = None,
    workspace: Workspace | None = None,
    config: StepConfig | None = None,
    impl: str = "auto",
) -> Tensor:
    """Advance rows by one token (or a few), from raw projections to the gated and normed output, state in place.

    For each row, token and head, in fp32 (fp64 for fp64 inputs):

    1. x, B, C go through the short convolution and SiLU.
    2. `step = clamp(softplus(dt + dt_bias), *dt_limit)`, `A = -exp(A_log)`.
    3. `S = exp(step A) S + (step x) B^T`; `y = S C + D x`.
    4. `y silu(gate)`, then an RMS norm over each of `norm_groups` equal groups of neighbouring heads, and the weight;
       or the norm first.

    Any of x, B, C, dt, gate may be a strided view of one projection's output, as long as its last axis is contiguous.
    Rows, slots, positions and steps of several tokens are those of `delta_step`: a row at position 0 starts from a
    zero state and no earlier inputs; only the first `commit[b]` tokens of a step count.

    Args:
        x: `[batch, T, heads, P]`, raw; T is 1 but for speculative decoding.
        B: `[batch, T, groups, N]`, raw; head h uses group `h // (heads // groups)`.
        C: `[batch, T, groups, N]`, raw.
        state: `[slots, heads, P, N]`, fp32 or bf16 (fp64 for the reference), P or N contiguous; written in place.
        dt: `[batch, T, heads]`, raw step sizes.
        A_log: `[heads]`, log of the decay rate.
        D: `[heads]`, the skip; `None` for none.
        dt_bias: `[heads]`, added before the softplus; `None` for none.
        dt_limit: bounds of the step size; `None` for none. transformers applies them in prefill alone.
        conv: filter and ring over the channels `[x | B | C]`, written in place; `None` for no convolution.
        position: `[batch]`, int32 or int64, tokens that each row has had so far; needed with `conv`.
        slots: `[batch]`, int32 or int64, where each row lives in the pool, no two alike. Negative: a padding row, of
            which nothing is read or written and whose output is zero. `None` for `0 .. batch - 1`.
        gate: `[batch, T, heads, P]`, before its SiLU; `None` for none.
        norm_weight: `[heads * P]`; `None` for no norm.
        norm_groups: groups of heads that are normed apart; `None` for the groups of B and C, as in Mamba-2.
        norm_eps: added to the mean square.
        gate_first: whether the gate comes before the norm, as in Mamba-2 (Falcon-H1 has both kinds).
        silu: whether SiLU follows x, B and C.
        commit: `[batch]`, int32 or int64, `0 <= commit <= T`: how many tokens count; `None` for all. 0 writes nothing.
        rounding_seed: one integer on the device: round a bf16 state up or down at random, with the true value as
            mean. Change it in place between steps (inside a CUDA graph too). `None` rounds to the nearest.
        workspace: where the kernel's programs meet; `None` for the device's own, which steps must not use at the same
            time on several streams.
        config: how the kernel cuts the step; `None` for what its table says.
        impl: `auto` (see `select_impl`), `reference` or `triton`.

    Returns:
        `[batch, T, heads, P]` in x's dtype, contiguous.

    Raises:
        InvalidInput: a shape, dtype, stride, device or setting that breaks the contract.
        KernelUnavailable: an `impl` asked for by name that cannot run here.

    Source: Mamba-2 arXiv 2405.21060.
    """
    norm_groups = B.shape[2] if norm_groups is None and B.ndim == 4 else norm_groups or 1
    check_arguments(
        x, B, C, dt, state, A_log, D, dt_bias, dt_limit, conv, position, slots, gate, norm_weight, norm_groups,
        commit, rounding_seed,
    )  # fmt: skip
    arguments = (
        x, B, C, dt, state, A_log, D, dt_bias, dt_limit, conv, position, slots, gate, norm_weight, norm_groups,
        norm_eps, gate_first, silu, commit, rounding_seed,
    )  # fmt: skip
    if _CHOICE.chosen(impl, x.device, x.dtype) == "triton":
        # Here, since it imports triton.
        from lapkernels.ssd_step.triton_launch import ssd_step_triton

        return ssd_step_triton(*arguments, config=config, workspace=workspace)
    return ssd_step_reference(*arguments)
