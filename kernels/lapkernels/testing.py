"""What tests and benchmarks share: inputs, an independent recurrence in fp64, and tolerances that are derived.

The recurrence here shares no line with `delta_rule.reference`: it applies the transition matrix of each step, so
that a slip in one of the two shows.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LEAST_MIX = 0.3
"""Of q in the erase direction: with less, an operator that pairs the wrong tokens would hardly show it."""


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated is full of NaN, so that nothing that was not written passes for a result."""
    was = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was)


@dataclass
class DeltaRuleInputs:
    """Arguments of `delta_rule`, with unit q and k.

    Attributes:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        beta: `[B, T, HV]`.
        g: `[B, T, HV]`, log decay, or `[B, T, HV, K]` of each key channel, or `None`.
        erase: `[B, T, H or HV, K]` or `None`.
        initial_state: `[B or sequences, HV, K, V]` or `None`.
        lamb: `[B, T, HV]`, query feedback, or `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None = None
    erase: Tensor | None = None
    initial_state: Tensor | None = None
    lamb: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "DeltaRuleInputs":
        """Detached copies in another dtype or place; the gate and the state stay fp32 or wider."""
        moved: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            wide = name in ("g", "initial_state") and dtype not in (None, torch.float64)
            moved[name] = tensor.detach().to(device=device, dtype=torch.float32 if wide else dtype, copy=True)
        return replace(self, **moved)

    def time_slice(self, start: int, stop: int, initial_state: Tensor | None = None) -> "DeltaRuleInputs":
        """Steps `start` to `stop`, from another state."""
        cut = {name: x[:, start:stop] for name, x in self.tensors().items() if name != "initial_state"}
        return replace(self, **cut, initial_state=initial_state)

    def requiring_grad(self) -> "DeltaRuleInputs":
        """The same tensors as leaves of a graph."""
        return replace(self, **{name: x.detach().requires_grad_() for name, x in self.tensors().items()})


def delta_rule_inputs(
    *,
    batch: int = 2,
    time: int = 17,
    key_heads: int = 2,
    value_heads: int | None = None,
    key_width: int = 8,
    value_width: int = 6,
    gate: float | None = 0.5,
    by_channel: bool = False,
    erase: str | None = None,
    feedback: bool = False,
    state: bool = False,
    sequences: int | None = None,
    seed: int = 0,
) -> DeltaRuleInputs:
    """Random arguments in fp64 on the CPU.

    Args:
        batch: B.
        time: T.
        key_heads: H.
        value_heads: HV; `None` for H.
        key_width: K.
        value_width: V.
        gate: log decays are drawn from `(-gate, 0)`; `None` for no gate.
        by_channel: whether each key channel has a log decay of its own.
        erase: `None`, or `key` or `value` for an erase direction per key or value head.
        feedback: whether there is query feedback, of 0.3 or more.
        state: whether there is an initial state.
        sequences: how many initial states; `None` for B.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    value_heads = key_heads if value_heads is None else value_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    def per_head(x: Tensor, heads: int) -> Tensor:
        return x.repeat_interleave(heads // x.shape[2], dim=2)

    q, k = unit(normal(batch, time, key_heads, key_width)), unit(normal(batch, time, key_heads, key_width))
    direction = None
    if erase is not None:
        heads = {"key": key_heads, "value": value_heads}[erase]
        mix = _LEAST_MIX + 0.6 * uniform(batch, time, heads, 1)
        direction = per_head(k, heads) + mix * per_head(q, heads)
    decays = (batch, time, value_heads, key_width) if by_channel else (batch, time, value_heads)
    return DeltaRuleInputs(
        q=q,
        k=k,
        v=normal(batch, time, value_heads, value_width),
        beta=uniform(batch, time, value_heads),
        g=None if gate is None else -gate * uniform(*decays),
        erase=direction,
        initial_state=normal(sequences or batch, value_heads, key_width, value_width) if state else None,
        lamb=_LEAST_MIX + 0.6 * uniform(batch, time, value_heads) if feedback else None,
    )


class Rounded(torch.autograd.Function):
    """Rounds a value, and its gradient, to a narrower dtype and back."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Round."""
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Round the gradient."""
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def transition_recurrence(
    inputs: DeltaRuleInputs, scale: float | None = None, rounding: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The operator by its transition matrices, `S_t = (I - beta k x^T) D S_{t-1} + beta k v^T`, in fp64.

    `D` is `e^g`, or a diagonal of K numbers.

    Args:
        inputs: of any dtype.
        scale: factor on q; `None` for `K ** -0.5`.
        rounding: round what a kernel that multiplies in this dtype has to round: the operands of the products with
            the state, and the output. The state itself stays wide.

    Returns:
        The output `[B, T, HV, V]` and the final state `[B, HV, K, V]`, fp64.
    """

    def narrow(x: Tensor) -> Tensor:
        return x if rounding is None else Rounded.apply(x, rounding)  # pyright: ignore[reportReturnType]

    heads, width = inputs.v.shape[2], inputs.k.shape[3]
    head = torch.arange(heads, device=inputs.v.device) // (heads // inputs.k.shape[2])
    q, k = narrow(inputs.q.double()[:, :, head]), narrow(inputs.k.double()[:, :, head])
    v, beta = narrow(inputs.v.double()), inputs.beta.double()[..., None, None]
    x = k
    if inputs.erase is not None:
        own = inputs.erase.shape[2] == heads
        x = narrow(inputs.erase.double() if own else inputs.erase.double()[:, :, head])
    if inputs.lamb is not None:
        x = narrow(inputs.k.double()[:, :, head] + inputs.lamb.double()[..., None] * inputs.q.double()[:, :, head])
    decay = torch.ones_like(beta[..., 0]) if inputs.g is None else inputs.g.double().exp()
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    factor: float = width**-0.5 if scale is None else scale
    state = inputs.initial_state
    if state is None:
        state = torch.zeros(*v.shape[::2], width, v.shape[3], dtype=torch.float64, device=v.device)
    state = state.double()
    identity = torch.eye(width, dtype=torch.float64, device=v.device)
    rows = []
    for t in range(v.shape[1]):
        column = k[:, t, :, :, None]
        if rounding is None:
            step = (identity - beta[:, t] * column * x[:, t, :, None, :]) * decay[:, t, :, None, :]
            state = step @ state + beta[:, t] * column * v[:, t, :, None, :]
        else:
            kept = decay[:, t, :, :, None] * state
            found = x[:, t, :, None, :] @ narrow(kept)
            state = kept + column * narrow(beta[:, t] * (v[:, t, :, None, :] - found))
        rows.append(factor * (q[:, t, :, None, :] @ narrow(state)).squeeze(-2))
    return narrow(torch.stack(rows, dim=1)), state


def output_state_and_gradients(
    run: Callable[[Any], tuple[Tensor, Tensor | None]], inputs: Any, seed: int = 1
) -> dict[str, Tensor]:
    """Run an operator and a backward pass of random cotangents through it.

    Args:
        run: takes inputs, returns output and final state.
        inputs: `DeltaRuleInputs`, or others that know their `tensors` and can be made to require gradients.
        seed: of the cotangents.

    Returns:
        `output`, `final_state`, and `d<name>` for each input.
    """
    inputs = inputs.requiring_grad()
    output, state = run(inputs)
    assert state is not None, "the operator returned no final state"
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype) for x in (output, state)
    ]
    named = inputs.tensors()
    gradients = torch.autograd.grad([output, state], list(named.values()), cotangents)
    return {
        "output": output.detach(),
        "final_state": state.detach(),
        **{f"d{name}": gradient for name, gradient in zip(named, gradients, strict=True)},
    }


class Precision(NamedTuple):
    """How far one result is from the truth, by one measure.

    Attributes:
        name: of the result.
        kind: `largest` entry or `rms`.
        error: the result's.
        allowed: what a plain computation in the same dtype may have.
    """

    name: str
    kind: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the error is allowed; a result that is not finite has none that is."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} error {self.error:.3e}, allowed {self.allowed:.3e}"


def precisions(
    actual: dict[str, Tensor],
    truth: dict[str, Tensor],
    yardstick: dict[str, Tensor],
    dtype: torch.dtype,
    terms: int = 1,
    summands: dict[str, Tensor] | None = None,
) -> list[Precision]:
    """Hold a result against the truth, and against what a plain computation in the same dtype makes of it.

    Allowed is twice the yardstick's own error, and the rounding of `terms` summands, which grows by their root: both
    for the largest entry and for the root mean square. A summand is as large as the result, or larger where summands
    cancel: `k . q` times an update against what was read before it, and what is left is then divided by its length.
    The yardstick alone does not tell of that: one draw of roundings of the worst entry may happen to be small. Nothing
    here is set by hand.

    Args:
        actual: results by name.
        truth: the same in fp64.
        yardstick: the same by the plain computation.
        dtype: the one whose rounding is allowed.
        terms: how many rounded summands a result has that the plain computation's has not: the chunk length where
            a chunk's products replace steps, 1 where only the result is rounded.
        summands: how large the sums are that a result comes of, in quadrature (independent roundings of summands add
            like that) and in the result's own scale, by name and in its shape; `None`, or a name left out, where
            they are no larger than the result.

    Returns:
        Two for each result. The error of one that is not finite is infinite.

    Raises:
        AssertionError: names or shapes differ.
    """
    assert actual.keys() == truth.keys() == yardstick.keys(), (actual.keys(), truth.keys(), yardstick.keys())
    eps = torch.finfo(dtype).eps * terms**0.5
    found: list[Precision] = []
    for name, right in truth.items():
        right = right.detach().double().cpu()
        got, plain = (x[name].detach().double().cpu() for x in (actual, yardstick))
        assert got.shape == right.shape, f"{name}: shape {list(got.shape)}, not {list(right.shape)}"
        finite = bool(got.isfinite().all())
        rounded = right.abs()
        if summands is not None and name in summands:
            assert summands[name].shape == right.shape, f"{name}: summands of shape {list(summands[name].shape)}"
            rounded = torch.maximum(rounded, summands[name].detach().double().cpu())
        for kind, size in (("largest", _largest), ("rms", _rms)):
            error = size(got - right) if finite else float("inf")
            found.append(Precision(name, kind, error, 2 * size(plain - right) + eps * size(rounded)))
    return found


def assert_as_precise(
    actual: dict[str, Tensor],
    truth: dict[str, Tensor],
    yardstick: dict[str, Tensor],
    dtype: torch.dtype,
    terms: int = 1,
    summands: dict[str, Tensor] | None = None,
) -> None:
    """Assert that a result is about as near the truth as a plain computation in the same dtype is; see `precisions`.

    Raises:
        AssertionError: naming the result, its error and what is allowed.
    """
    for found in precisions(actual, truth, yardstick, dtype, terms, summands):
        assert found.error < float("inf"), f"{found.name} is not finite"
        assert found.holds, str(found)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """`max |a - b| / max |b|` in fp64, on the CPU; NaN where either has one.

    Raises:
        AssertionError: the shapes differ, which broadcasting would hide.
    """
    assert actual.shape == truth.shape, f"shape {list(actual.shape)}, not {list(truth.shape)}"
    found, wanted = (x.detach().double().cpu() for x in (actual, truth))
    return _largest(found - wanted) / max(_largest(wanted), 1e-300)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
