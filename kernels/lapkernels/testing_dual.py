"""What tests and benchmarks of gated states share: inputs, and an fp64 oracle that knows no recurrence.

The oracle sums over all pairs of tokens, with the decay from one to the other written out, so it shares no line with
the step-by-step definition or with chunks.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lapkernels.decoding.configs import StepConfig
from lapkernels.dual_state_step import dual_state_step
from lapkernels.testing import Rounded, assert_as_precise


@dataclass
class DualStateInputs:
    """Arguments of `dual_state`.

    Attributes:
        q: `[B, T, HQ, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: `[B, T, states, H, K]`, log decays.
        mixture: `[states]`.
        initial_state: `[B or sequences, states, H, K, V]` or `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    mixture: Tensor
    initial_state: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "DualStateInputs":
        """Detached copies in another dtype or place; gates, mixture and states stay fp32 or wider."""
        moved: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            wide = name in ("g", "mixture", "initial_state") and dtype not in (None, torch.float64)
            moved[name] = tensor.detach().to(device=device, dtype=torch.float32 if wide else dtype, copy=True)
        return replace(self, **moved)

    def time_slice(self, start: int, stop: int, initial_state: Tensor | None = None) -> "DualStateInputs":
        """Steps `start` to `stop`, from other states."""
        cut = {name: getattr(self, name)[:, start:stop] for name in ("q", "k", "v", "g")}
        return replace(self, **cut, initial_state=initial_state)

    def requiring_grad(self) -> "DualStateInputs":
        """The same tensors as leaves of a graph."""
        return replace(self, **{name: x.detach().requires_grad_() for name, x in self.tensors().items()})


def dual_state_inputs(
    *,
    batch: int = 2,
    time: int = 17,
    heads: int = 2,
    query_heads: int | None = None,
    states: int = 2,
    key_width: int = 8,
    value_width: int = 6,
    gate: float = 0.5,
    state: bool = False,
    sequences: int | None = None,
    seed: int = 0,
) -> DualStateInputs:
    """Random arguments in fp64 on the CPU.

    Args:
        batch: B.
        time: T.
        heads: H, of k and v.
        query_heads: HQ; `None` for H.
        states: how many.
        key_width: K.
        value_width: V.
        gate: log decays of the first state are drawn from `(-gate, 0)`, those of each further one from a range that is
            twice as wide.
        state: whether there are initial states.
        sequences: how many of them; `None` for B.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = torch.rand(batch, time, states, heads, key_width, generator=generator, dtype=torch.float64)
    faster = gate * 2.0 ** torch.arange(states, dtype=torch.float64)
    return DualStateInputs(
        q=normal(batch, time, query_heads or heads, key_width),
        k=normal(batch, time, heads, key_width),
        v=normal(batch, time, heads, value_width),
        g=-faster[:, None, None] * drawn,
        mixture=normal(states).softmax(0),
        initial_state=normal(sequences or batch, states, heads, key_width, value_width) if state else None,
    )


def sum_over_pairs(inputs: DualStateInputs, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The operator without a recurrence: each pair of tokens with the product of all gates between them, in fp64.

    Args:
        inputs: of any dtype; not packed.
        scale: factor on q; `None` for `K ** -0.5`.

    Returns:
        The output `[B, T, HQ, V]` and the final states `[B, states, H, K, V]`, fp64.
    """
    q, k, v, g, mixture = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.mixture))
    time, heads, width = k.shape[1:]
    head = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // heads)
    factor: float = width**-0.5 if scale is None else scale
    outputs, state = [], torch.empty(0)
    for t in range(time):
        # Logs of what is left at t of a token s, [B, t + 1, states, H, K]: the gates after s, summed from the end.
        left = torch.cat((g[:, 1 : t + 1].flip(1).cumsum(1).flip(1), torch.zeros_like(g[:, :1])), 1).exp()
        state = torch.einsum("bsahk,bshk,bshv->bahkv", left, k[:, : t + 1], v[:, : t + 1])
        if inputs.initial_state is not None:
            state = state + g[:, : t + 1].sum(1).exp().unsqueeze(-1) * inputs.initial_state.double()
        outputs.append(torch.einsum("a,bhk,bahkv->bhv", mixture, q[:, t] * factor, state[:, :, head]))
    return torch.stack(outputs, 1), state


def rounding_recurrence(
    inputs: DualStateInputs, dtype: torch.dtype, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The operator step by step in fp64, but for what a kernel that multiplies in `dtype` has to round.

    That is k and v, q times each state's share, the states as they are read, the output, and the gradients of these.

    Args:
        inputs: of any dtype; not packed.
        dtype: of the products.
        scale: factor on q; `None` for `K ** -0.5`.

    Returns:
        As `sum_over_pairs`.
    """

    def narrow(x: Tensor) -> Tensor:
        return Rounded.apply(x, dtype)  # pyright: ignore[reportReturnType]

    q, g, mixture = (x.double() for x in (inputs.q, inputs.g, inputs.mixture))
    k, v = (narrow(x.double()) for x in (inputs.k, inputs.v))
    heads, width = k.shape[2:]
    shares = narrow(q.unsqueeze(3) * mixture[:, None]).unflatten(2, (heads, -1))
    factor: float = width**-0.5 if scale is None else scale
    if inputs.initial_state is None:
        state = v.new_zeros(v.shape[0], g.shape[2], heads, width, v.shape[3])
    else:
        state = inputs.initial_state.double()
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state + (k[:, t, :, :, None] * v[:, t, :, None, :]).unsqueeze(1)
        outputs.append(factor * torch.einsum("bhrak,bahkv->bhrv", shares[:, t], narrow(state)).flatten(1, 2))
    return narrow(torch.stack(outputs, 1)), state


def step_oracle(inputs: DualStateInputs, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """What steps over whole sequences give, where `g` are raw gates and `mixture` logits, in fp64.

    Returns:
        The output `[B, T, HQ, V]` and the final states `[B, states, H, K, V]`.
    """
    gate, logits = inputs.g.double(), inputs.mixture.double()
    # A log of the sigmoid that is none of torch's, with the paper's sixteenth and the floor.
    log_decay = (-torch.log1p((-gate.abs()).exp()) - (-gate).clamp(min=0)) / 16
    shares = logits.exp() / logits.exp().sum()
    return sum_over_pairs(replace(inputs, g=log_decay.clamp(min=-50.0), mixture=shares), scale)


def dual_step_inputs(**options: Any) -> DualStateInputs:
    """Arguments of `dual_state_inputs`, with raw gates around zero in place of log decays, some of them far below."""
    inputs = dual_state_inputs(**options)
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 1)
    gate = 3 * torch.randn(inputs.g.shape, generator=generator, dtype=torch.float64)
    # The floor: a sixteenth of -2000 is below -50.
    gate[:, ::3, :, :, ::4] = -2000.0
    return replace(inputs, g=gate, mixture=2 * inputs.mixture - 1)


def check_dual_step(
    impl: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    state_dtype: torch.dtype | None = None,
    at_once: int = 1,
    config: StepConfig | None = None,
    **options: Any,
) -> None:
    """Assert that `dual_state_step` follows the oracle, token by token or several at once, some of them taken back.

    Args:
        impl: which implementation.
        dtype: of the inputs.
        device: where.
        state_dtype: of the pool; `None` for fp32 (fp64 for fp64).
        at_once: T.
        config: of the kernel.
        options: for `dual_step_inputs`.

    Raises:
        AssertionError: naming what differs, and by how much; or a slot that is nobody's was written.
    """
    case = dual_step_inputs(**{"time": 6, **options}).to(dtype)
    state_dtype = state_dtype or torch.promote_types(dtype, torch.float32)
    output, state = step_oracle(case)
    truth = {"output": output, "state": state}
    yardstick = follow_dual(case, "reference", state_dtype, 1, None)
    found = follow_dual(case.to(device=device), impl, state_dtype, at_once, config)
    coarsest = max((dtype, state_dtype), key=lambda each: torch.finfo(each).eps)
    # Rounded a token, in another order.
    assert_as_precise(found, truth, yardstick, coarsest, terms=case.q.shape[1])


def follow_dual(
    case: DualStateInputs, impl: str, state_dtype: torch.dtype, at_once: int, config: StepConfig | None
) -> dict[str, Tensor]:
    """Take whole sequences through steps, in a pool full of NaN, beside a padding row.

    With several tokens a call, calls of 1, 2, .. tokens that count follow one another; what a call holds behind those
    is right and wrong in turn, and leaves no trace.

    Returns:
        `output` `[B, T, HQ, V]` and the last `state` of each row.

    Raises:
        AssertionError: a slot that is nobody's was written, or a padding row's output is not zero.
    """
    device, (rows, length), states = case.q.device, case.q.shape[:2], case.g.shape[2]
    live, spare = [2 * row for row in reversed(range(rows))], [2 * row + 1 for row in range(rows)]
    slots = torch.tensor([*live, -1], dtype=torch.int32, device=device)
    shape = (2 * rows, states, case.k.shape[2], case.k.shape[3], case.v.shape[3])
    pool = torch.full(shape, torch.nan, dtype=state_dtype, device=device)
    position = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    # Views that are not contiguous: all parts of a token side by side, as one projection would leave them.
    parts = {"q": case.q, "k": case.k, "v": case.v, "gate": case.g.to(case.q.dtype)}
    sizes = [x.flatten(2).shape[2] for x in parts.values()]
    joined = torch.cat([x.flatten(2) for x in parts.values()], dim=2)
    joined = torch.cat((joined, torch.full_like(joined[:1], torch.nan)))
    outputs, done, turn = [], 0, 0
    while done < length:
        count = min(1 + turn % at_once, length - done)
        given = joined[:, done : done + at_once].clone()
        if given.shape[1] < at_once:
            given = torch.cat((given, torch.ones_like(joined[:, : at_once - given.shape[1]])), dim=1)
        if turn % 2:
            given[:, count:] = 3.0
        pieces = zip(parts, given.split(sizes, dim=2), strict=True)
        arguments: dict[str, Any] = {name: piece.unflatten(2, parts[name].shape[2:]) for name, piece in pieces}
        if at_once > 1:
            arguments["commit"] = torch.full((rows + 1,), count, device=device)
        out = dual_state_step(
            **arguments, state=pool, mixture=case.mixture, position=position, slots=slots, impl=impl, config=config
        )
        assert not out[-1].any(), "a padding row's output is not zero"
        outputs.append(out[:-1, :count])
        position += count
        done, turn = done + count, turn + 1
    assert pool[spare].isnan().all(), "a slot that is nobody's was written"
    return {"output": torch.cat(outputs, dim=1), "state": pool[live]}
