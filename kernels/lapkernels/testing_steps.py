"""Inputs for decode steps and an independent fp64 oracle over whole sequences, for tests and benchmarks.

The oracle never sees a pool, a ring or a step: it filters each sequence with `conv1d` and applies the transition
matrix of each token.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.decoding.configs import StepConfig
from lapkernels.decoding.rows import ConvState
from lapkernels.delta_step import delta_step
from lapkernels.ssd_step import ssd_step
from lapkernels.testing import assert_as_precise, poisoned


@dataclass
class StepCase:
    """Sequences for one layer, in fp64 on the CPU: what its projections give, and its parameters.

    Attributes:
        projected: `[B, N, columns]`, one projection's output for N tokens: q, k, v, gate, b, a, lamb side by side.
        columns: where each of them lies, as (start, shape of its own axes).
        parameters: the tensors that belong to the layer, as the step takes them.
        options: the settings among its arguments.
        weight: `[channels, W]` or `None`.
        bias: `[channels]` or `None`.
        shape: heads that are shared, heads, and the two widths of a state.
    """

    projected: Tensor
    columns: dict[str, tuple[int, tuple[int, ...]]]
    parameters: dict[str, Tensor]
    options: dict[str, Any]
    weight: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int, int, int]

    @property
    def batch(self) -> int:
        """B."""
        return self.projected.shape[0]

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """In another dtype or place; A_log and dt_bias stay fp32 or wider, as models keep them."""
        wide = {torch.float64: torch.float64}.get(dtype or self.projected.dtype, torch.float32)
        parameters = {
            name: x.to(device=device, dtype=dtype if name == "norm_weight" else wide)
            for name, x in self.parameters.items()
        }
        weight, bias = (None if x is None else x.to(device=device, dtype=dtype) for x in (self.weight, self.bias))
        projected = self.projected.to(device=device, dtype=dtype)
        return replace(self, projected=projected, parameters=parameters, weight=weight, bias=bias)

    def tokens(self, start: int, stop: int) -> dict[str, Tensor | None]:
        """The step's arguments for tokens `start` to `stop` of each row: views of one tensor."""
        return self.views(self.projected[:, start:stop])

    def views(self, projected: Tensor) -> dict[str, Tensor | None]:
        """The parts of a projection's output `[B, T, columns]` by name."""
        found: dict[str, Tensor | None] = {}
        for name, (start, shape) in self.columns.items():
            size = torch.Size(shape).numel()
            found[name] = projected[..., start : start + size].unflatten(-1, shape)
        return found

    def conv(self, slots: int, tokens: int = 1) -> ConvState | None:
        """A fresh convolution state, its ring full of NaN: what was never written must never count."""
        if self.weight is None:
            return None
        conv = ConvState.allocate(self.weight, self.bias, slots, tokens=tokens, dtype=self.projected.dtype)
        conv.inputs.fill_(torch.nan)
        return conv

    def constants(self) -> dict[str, Any]:
        """Parameters and settings, as the step takes them."""
        return {**self.parameters, **self.options}


class DeltaStepCase(StepCase):
    """A delta-family layer; `shape` is H, HV, K, V."""

    def views(self, projected: Tensor) -> dict[str, Tensor | None]:
        """q, k, v, gate, b, a, lamb of a projection's output `[B, T, columns]`; `b` is always there, maybe `None`."""
        return {"b": None, **super().views(projected)}

    def state(self, slots: int, dtype: torch.dtype | None = None, *, value_major: bool = False) -> Tensor:
        """A pool of states full of NaN, `[slots, HV, K, V]`; a row at position 0 starts from zero all the same."""
        _, heads, key_width, value_width = self.shape
        inner = (value_width, key_width) if value_major else (key_width, value_width)
        pool = self.projected.new_full((slots, heads, *inner), torch.nan, dtype=dtype)
        return pool.transpose(-1, -2) if value_major else pool


class SsdStepCase(StepCase):
    """A Mamba-2 layer; `shape` is groups, heads, N, P."""

    def state(self, slots: int, dtype: torch.dtype | None = None, *, value_major: bool = True) -> Tensor:
        """A pool of states full of NaN, `[slots, heads, P, N]`; P contiguous unless `value_major` (N contiguous)."""
        _, heads, state_width, head_width = self.shape
        inner = (head_width, state_width) if value_major else (state_width, head_width)
        pool = self.projected.new_full((slots, heads, *inner), torch.nan, dtype=dtype)
        return pool if value_major else pool.transpose(-1, -2)


def delta_step_case(
    *,
    batch: int = 3,
    tokens: int = 6,
    key_heads: int = 2,
    value_heads: int = 4,
    key_width: int = 16,
    value_width: int = 8,
    decay: str | None = "head",
    taps: int | None = 4,
    bias: bool = False,
    strength: float = 1.0,
    write: bool = True,
    feedback: bool = False,
    gate: str | None = "silu",
    norm: bool = True,
    qk_l2norm: bool = True,
    silu: tuple[bool, bool, bool] = (True, True, True),
    padding: int = 3,
    seed: int = 0,
) -> DeltaStepCase:
    """Random sequences and parameters of one layer.

    Args:
        batch: B.
        tokens: N, tokens of each sequence.
        key_heads: H.
        value_heads: HV.
        key_width: K.
        value_width: V.
        decay: `None`, `head`, `channel`, `given` (the log decay itself) or `bounded` (per channel, bounded below).
        taps: W; `None` for no convolution.
        bias: whether the convolution has one.
        strength: factor on the write strength.
        write: whether the write strength is learned (`b`).
        feedback: whether there is Q-Delta's lambda.
        gate: `None`, `silu` or `sigmoid`.
        norm: whether there is an output norm.
        qk_l2norm: as in `delta_step`.
        silu: on q, k, v.
        padding: unused columns at the end of the projection, so that its rows are not aligned.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    per_channel = decay in ("channel", "bounded")
    shapes: dict[str, tuple[int, ...]] = {
        "q": (key_heads, key_width),
        "k": (key_heads, key_width),
        "v": (value_heads, value_width),
    }
    if gate:
        shapes["gate"] = (value_heads, value_width)
    if write:
        shapes["b"] = (value_heads,)
    if decay:
        shapes["a"] = (value_heads, key_width) if per_channel else (value_heads,)
    if feedback:
        shapes["lamb"] = (value_heads,)
    columns, start = {}, 0
    for name, shape in shapes.items():
        columns[name] = (start, shape)
        start += torch.Size(shape).numel()
    projected = normal(batch, tokens, start + padding)
    projected[..., start:] = 1e30
    for name in ("a", "lamb"):
        if name in columns:
            begin, shape = columns[name]
            part = projected[..., begin : begin + torch.Size(shape).numel()]
            if name == "lamb":
                part.sigmoid_()
            elif decay == "given":
                part.abs_().neg_()

    parameters: dict[str, Tensor] = {}
    if decay and decay != "given":
        parameters["A_log"] = normal(value_heads)
        parameters["dt_bias"] = normal(value_heads, key_width) if per_channel else normal(value_heads)
    if norm:
        parameters["norm_weight"] = 1 + 0.3 * normal(value_width)
    options: dict[str, Any] = {
        "strength": strength, "qk_l2norm": qk_l2norm, "norm_eps": 1e-5,
        "silu_q": silu[0], "silu_k": silu[1], "silu_v": silu[2],
    }  # fmt: skip
    if gate:
        options["gate_activation"] = gate
    if decay == "bounded":
        options["decay_lower_bound"] = -5.0
    channels = 2 * key_heads * key_width + value_heads * value_width
    return DeltaStepCase(
        projected,
        columns,
        parameters,
        options,
        None if taps is None else normal(channels, taps) / taps**0.5,
        normal(channels) if bias else None,
        (key_heads, value_heads, key_width, value_width),
    )


def filtered(line: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The causal convolution of whole sequences `[B, N, channels]`, in fp64."""
    if weight is None:
        return line.double()
    padded = F.pad(line.double().transpose(1, 2), (weight.shape[1] - 1, 0))
    bias = None if bias is None else bias.double()
    return F.conv1d(padded, weight.double().unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2)


class _DeltaTokens(NamedTuple):
    """What the recurrence of a delta-family layer is made of, in fp64; `[B, N, HV, ...]`, all of every token."""

    q: Tensor
    k: Tensor
    v: Tensor
    lamb: Tensor
    beta: Tensor
    decay: Tensor
    scale: float


def _delta_tokens(case: DeltaStepCase) -> _DeltaTokens:
    heads, value_heads, width, _ = case.shape
    seen = {name: None if x is None else x.double() for name, x in case.views(case.projected).items()}
    q, k, v = seen["q"], seen["k"], seen["v"]
    assert q is not None
    assert k is not None
    assert v is not None
    options, parameters = case.options, {name: x.double() for name, x in case.parameters.items()}
    sizes = [x.shape[2] * x.shape[3] for x in (q, k, v)]
    line = filtered(torch.cat([x.flatten(2) for x in (q, k, v)], dim=2), case.weight, case.bias)
    parts = []
    for name, x, like in zip(("q", "k", "v"), line.split(sizes, dim=2), (q, k, v), strict=True):
        x = x.reshape(like.shape)
        parts.append(x / (1 + (-x).exp()) if options[f"silu_{name}"] else x)
    q, k, v = parts
    if options["qk_l2norm"]:
        q, k = (x / (x.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt() for x in (q, k))
    head = torch.arange(value_heads, device=q.device) // (value_heads // heads)
    q, k = q[:, :, head], k[:, :, head]
    lamb, b, a = seen.get("lamb"), seen["b"], seen.get("a")
    lamb = torch.zeros_like(v[..., 0]) if lamb is None else lamb
    beta = torch.full(v.shape[:3], options["strength"], dtype=torch.float64, device=v.device)
    if b is not None:
        beta = beta / (1 + (-b).exp())
    log_decay = torch.zeros_like(k)
    if a is not None:
        if "A_log" in parameters:
            shifted = a + parameters["dt_bias"]
            rate = parameters["A_log"].exp()
            rate = rate[:, None] if a.ndim == 4 else rate
            if "decay_lower_bound" in options:
                a = options["decay_lower_bound"] / (1 + (-rate * shifted).exp())
            else:
                a = -rate * torch.log1p(shifted.exp())
        log_decay = log_decay + (a if a.ndim == 4 else a[..., None])
    return _DeltaTokens(q, k, v, lamb, beta, log_decay.exp(), options.get("scale", width**-0.5))


def _delta_after(case: DeltaStepCase, read: Tensor) -> Tensor:
    """By what norm and gate multiply what was read, `[B, N, HV, V]`."""
    factor = torch.ones_like(read)
    if "norm_weight" in case.parameters:
        rms = (read.square().mean(-1, keepdim=True) + case.options["norm_eps"]).sqrt()
        factor = case.parameters["norm_weight"].double() / rms
    gate = case.views(case.projected).get("gate")
    if gate is not None:
        gate = gate.double()
        opened = 1 / (1 + (-gate).exp())
        factor = factor * (opened if case.options["gate_activation"] == "sigmoid" else gate * opened)
    return factor


def delta_oracle(case: DeltaStepCase) -> tuple[Tensor, list[Tensor]]:
    """What the layer gives for whole sequences, in fp64.

    Returns:
        The outputs `[B, N, HV, V]`, and the states `[B, HV, K, V]` after 0, 1, .., N tokens.
    """
    q, k, v, lamb, beta, decay, scale = _delta_tokens(case)
    x = k + lamb[..., None] * q
    width = k.shape[3]
    state = torch.zeros(v.shape[0], v.shape[2], width, v.shape[3], dtype=torch.float64, device=v.device)
    identity = torch.eye(width, dtype=torch.float64, device=v.device)
    states, reads = [state], []
    for t in range(v.shape[1]):
        erase = identity - beta[:, t, :, None, None] * k[:, t, :, :, None] * x[:, t, :, None, :]
        state = erase @ (decay[:, t].unsqueeze(-1) * state)
        state = state + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        states.append(state)
        reads.append((q[:, t, :, None, :] @ state).squeeze(-2) * scale)
    read = torch.stack(reads, dim=1)
    return read * _delta_after(case, read), states


def delta_summands(case: DeltaStepCase, states: list[Tensor]) -> dict[str, Tensor]:
    """How large the sums of a token are before they cancel, for `precisions`: each root of a sum of squares, in fp64.

    A token adds up, from the state before it: the error `v - (k + lambda q)^T D S`, the state `D S + k u^T`, what is
    read of it `S^T q`. Norm and gate then multiply what is left by the same factor as what cancelled.

    Args:
        case: the layer.
        states: of `delta_oracle`.

    Returns:
        `output` `[B, N, HV, V]`, and `state`, of the last token.
    """
    q, k, v, lamb, beta, decay, scale = _delta_tokens(case)
    after = torch.stack(states[1:], dim=1)
    old = (decay.unsqueeze(-1) * torch.stack(states[:-1], dim=1)).square()
    erased = k.square() + (lamb[..., None] * q).square()
    update = beta.unsqueeze(-1).square() * (v.square() + (erased.unsqueeze(-2) @ old).squeeze(-2))
    state = old + k.square().unsqueeze(-1) * update.unsqueeze(-2)
    read = scale * (q.square().unsqueeze(-2) @ state).squeeze(-2).sqrt()
    factor = _delta_after(case, scale * (q.unsqueeze(-2) @ after).squeeze(-2))
    return {"output": read * factor.abs(), "state": state[:, -1].sqrt()}


def ssd_step_case(
    *,
    batch: int = 3,
    tokens: int = 6,
    groups: int = 2,
    heads: int = 4,
    state_width: int = 16,
    head_width: int = 8,
    taps: int | None = 4,
    bias: bool = True,
    skip: bool = True,
    gate: bool = True,
    gate_first: bool = True,
    norm_groups: int | None = 2,
    dt_limit: tuple[float, float] | None = None,
    padding: int = 3,
    seed: int = 0,
) -> SsdStepCase:
    """Random sequences and parameters of one Mamba-2 layer.

    Args:
        batch: B.
        tokens: tokens of each sequence.
        groups: of B and C.
        heads: heads.
        state_width: N.
        head_width: P.
        taps: W; `None` for no convolution.
        bias: whether the convolution has one.
        skip: whether there is a D.
        gate: whether the output is gated.
        gate_first: whether before the norm.
        norm_groups: groups of heads normed apart; `None` for no norm.
        dt_limit: bounds of the step size.
        padding: unused columns at the end of the projection, so that its rows are not aligned.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes: dict[str, tuple[int, ...]] = {"gate": (heads, head_width)} if gate else {}
    shapes |= {"x": (heads, head_width), "B": (groups, state_width), "C": (groups, state_width), "dt": (heads,)}
    columns, start = {}, 0
    for name, shape in shapes.items():
        columns[name] = (start, shape)
        start += torch.Size(shape).numel()
    projected = normal(batch, tokens, start + padding)
    projected[..., start:] = 1e30
    parameters = {"A_log": normal(heads), "dt_bias": normal(heads)}
    if skip:
        parameters["D"] = normal(heads)
    options: dict[str, Any] = {"norm_eps": 1e-5, "gate_first": gate_first, "dt_limit": dt_limit}
    if norm_groups is not None:
        parameters["norm_weight"] = 1 + 0.3 * normal(heads * head_width)
        options["norm_groups"] = norm_groups
    channels = heads * head_width + 2 * groups * state_width
    return SsdStepCase(
        projected,
        columns,
        parameters,
        options,
        None if taps is None else normal(channels, taps) / taps**0.5,
        normal(channels) if bias and taps is not None else None,
        (groups, heads, state_width, head_width),
    )


class _SsdTokens(NamedTuple):
    """What the recurrence of a Mamba-2 layer is made of, in fp64; `[B, N, heads, ...]`, all of every token."""

    x: Tensor
    B: Tensor
    C: Tensor
    step: Tensor
    log_decay: Tensor
    skip: Tensor


def _ssd_tokens(case: SsdStepCase) -> _SsdTokens:
    groups, heads, _, _ = case.shape
    seen = {name: x.double() for name, x in case.views(case.projected).items() if x is not None}
    parameters = {name: x.double() for name, x in case.parameters.items()}
    sizes = [seen[name].shape[2] * seen[name].shape[3] for name in ("x", "B", "C")]
    line = filtered(torch.cat([seen[name].flatten(2) for name in ("x", "B", "C")], dim=2), case.weight, case.bias)
    line = line / (1 + (-line).exp())
    x, B, C = (part.reshape(seen[n].shape) for n, part in zip(("x", "B", "C"), line.split(sizes, dim=2), strict=True))
    group = torch.arange(heads, device=x.device) // (heads // groups)
    step = torch.log1p((seen["dt"] + parameters["dt_bias"]).exp())
    if case.options["dt_limit"] is not None:
        step = step.clamp(*case.options["dt_limit"])
    skip = parameters["D"][:, None] * x if "D" in parameters else torch.zeros_like(x)
    return _SsdTokens(x, B[:, :, group], C[:, :, group], step, -parameters["A_log"].exp() * step, skip)


def _ssd_after(case: SsdStepCase, y: Tensor) -> Tensor:
    """By what norm and gate multiply what was read, `[B, N, heads, P]`."""
    _, heads, _, head_width = case.shape
    gate = case.views(case.projected).get("gate")
    opened = torch.ones_like(y)
    if gate is not None:
        opened = gate.double() / (1 + (-gate.double()).exp())
    if "norm_weight" not in case.parameters:
        return opened
    normed = y * opened if case.options["gate_first"] else y
    normed = normed.flatten(2).unflatten(2, (case.options["norm_groups"], -1))
    inverse = 1 / (normed.square().mean(-1, keepdim=True) + case.options["norm_eps"]).sqrt()
    weight = case.parameters["norm_weight"].double()
    factor = inverse.expand_as(normed).flatten(2) * weight
    return factor.unflatten(2, (heads, head_width)) * opened


def ssd_oracle(case: SsdStepCase) -> tuple[Tensor, list[Tensor]]:
    """What the layer gives for whole sequences, in fp64, by the sum over all pairs of tokens.

    Returns:
        The outputs `[B, N, heads, P]`, and the states `[B, heads, P, state width]` after 0, 1, .., N tokens.
    """
    x, B, C, step, log_decay, skip = _ssd_tokens(case)
    total = torch.cumsum(log_decay, dim=1)
    states = [torch.zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float64, device=x.device)]
    reads = []
    for t in range(x.shape[1]):
        decay = (total[:, t : t + 1] - total[:, : t + 1]).exp() * step[:, : t + 1]
        states.append(torch.einsum("bsh,bshp,bshn->bhpn", decay, x[:, : t + 1], B[:, : t + 1]))
        reads.append(torch.einsum("bsh,bshp,bsh->bhp", decay, x[:, : t + 1], (B[:, : t + 1] * C[:, t : t + 1]).sum(-1)))
    y = torch.stack(reads, dim=1) + skip
    return y * _ssd_after(case, y), states


def ssd_summands(case: SsdStepCase, states: list[Tensor]) -> dict[str, Tensor]:
    """As `delta_summands`: the state `D S + dt x B^T`, what is read of it `S C` with the skip."""
    x, B, C, step, log_decay, skip = _ssd_tokens(case)
    after = torch.stack(states[1:], dim=1)
    old = (log_decay.exp()[..., None, None] * torch.stack(states[:-1], dim=1)).square()
    state = old + (step[..., None] * x).square().unsqueeze(-1) * B.square().unsqueeze(-2)
    read = ((state @ C.square().unsqueeze(-1)).squeeze(-1) + skip.square()).sqrt()
    factor = _ssd_after(case, (after @ C.unsqueeze(-1)).squeeze(-1) + skip)
    return {"output": read * factor.abs(), "state": state[:, -1].sqrt()}


DELTA_CASES: dict[str, dict[str, Any]] = {
    "as in Gated DeltaNet": {"key_heads": 1, "value_heads": 2},
    "three key parts, a gate by sigmoid": {"key_width": 28, "gate": "sigmoid", "key_heads": 1, "value_heads": 1},
    "odd widths, a bias": {"key_width": 15, "value_width": 6, "bias": True, "value_heads": 2},
    "decay per channel": {"decay": "channel", "key_width": 12, "key_heads": 1, "value_heads": 1, "gate": "sigmoid"},
    "decay bounded below": {"decay": "bounded", "key_heads": 1, "value_heads": 1, "silu": (False, True, False)},
    "no decay, constant strength": {"decay": None, "write": False, "strength": 2.0, "gate": None, "value_heads": 2},
    "no convolution, no norms": {
        "taps": None,
        "norm": False,
        "qk_l2norm": False,
        "value_heads": 2,
        "silu": (False,) * 3,
    },
    "query feedback, decay given": {"feedback": True, "decay": "given", "taps": 1, "strength": 2.0, "value_heads": 2},
}
"""Layers of the delta family by what is particular about each, for `check_delta`."""

SSD_CASES: dict[str, dict[str, Any]] = {
    "as in Mamba-2": {"groups": 1, "heads": 2, "norm_groups": 1},
    "groups, norm before gate, limits": {"norm_groups": 2, "gate_first": False, "dt_limit": (0.3, 1.0)},
    "odd widths, no bias": {
        "state_width": 28,
        "head_width": 6,
        "groups": 1,
        "heads": 1,
        "norm_groups": 1,
        "bias": False,
    },
    "no norm, no skip, no convolution": {"norm_groups": None, "skip": False, "taps": None, "heads": 2},
}
"""Mamba-2 layers by what is particular about each, for `check_ssd`."""


def check_delta(
    name: str,
    impl: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    state_dtype: torch.dtype | None = None,
    value_major: bool = False,
    at_once: int = 1,
    config: StepConfig | None = None,
    terms: int | None = None,
    **change: Any,
) -> None:
    """Assert that `delta_step` follows the oracle, token by token or several at once, of which some are taken back.

    Args:
        name: of `DELTA_CASES`.
        impl: which implementation.
        dtype: of the inputs.
        device: where.
        state_dtype: of the pool; `None` for fp32 (fp64 for fp64).
        value_major: whether K is contiguous in the pool.
        at_once: T.
        config: of the kernel.
        terms: of `assert_as_precise`; `None` for one a token. Sums over K one after the other, as in triton's
            interpreter, are rounded K times, where a tree's partial sums that are as large as the sum are few.
        change: what to change about the case.

    Raises:
        AssertionError: naming what differs, and by how much.
    """
    case = delta_step_case(**{"batch": 2, **DELTA_CASES[name], **change})
    oracle = delta_oracle, delta_summands
    _check(delta_step, *oracle, case, impl, dtype, device, state_dtype, value_major, at_once, config, terms)


def check_ssd(
    name: str,
    impl: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    state_dtype: torch.dtype | None = None,
    value_major: bool = False,
    at_once: int = 1,
    config: StepConfig | None = None,
    **change: Any,
) -> None:
    """Assert that `ssd_step` follows the oracle. Arguments as for `check_delta`; `value_major` has N contiguous."""
    case = ssd_step_case(**{"batch": 2, **SSD_CASES[name], **change})
    oracle = ssd_oracle, ssd_summands
    _check(ssd_step, *oracle, case, impl, dtype, device, state_dtype, value_major, at_once, config)


def _check(
    step: Any,
    oracle: Any,
    summands: Any,
    case: Any,
    impl: str,
    dtype: torch.dtype,
    device: torch.device | str,
    state_dtype: torch.dtype | None,
    value_major: bool,
    at_once: int,
    config: StepConfig | None,
    terms: int | None = None,
) -> None:
    narrow = case.to(dtype)
    # The truth of the inputs as they are once rounded, not of what they were.
    output, states = oracle(narrow)
    truth: dict[str, Tensor] = {"output": output, "state": states[-1]}
    state_dtype = state_dtype or torch.promote_types(dtype, torch.float32)
    yardstick = follow(step, narrow, "reference", state_dtype, value_major, 1, None)
    found = follow(step, narrow.to(device=device), impl, state_dtype, value_major, at_once, config)
    coarsest = max((dtype, state_dtype), key=lambda each: torch.finfo(each).eps)
    # Summands are rounded as the state is, inputs and outputs as they are.
    finer = torch.finfo(state_dtype).eps / torch.finfo(coarsest).eps
    sizes = {name: size * finer for name, size in summands(narrow, states).items()}
    # Rounded a token, in another order; what one token leaves to the next is the yardstick's as well.
    assert_as_precise(found, truth, yardstick, coarsest, terms or case.projected.shape[1], sizes)


def follow(
    step: Any,
    case: Any,
    impl: str,
    state_dtype: torch.dtype,
    value_major: bool,
    at_once: int,
    config: StepConfig | None,
) -> dict[str, Tensor]:
    """Take whole sequences through a step, beside a padding row; the pool and all fresh memory are full of NaN.

    With several tokens a call, calls of 1, 2, .. tokens that count follow one another; the drafts behind those are
    right, and wrong, in turn.

    Returns:
        `output` `[B, N, heads, width]` and the last `state` of each row.

    Raises:
        AssertionError: a slot, ring or output that is nobody's was written, or an output was not.
    """
    device, length, rows = case.projected.device, case.projected.shape[1], case.batch
    live, spare = [2 * row for row in reversed(range(rows))], [2 * row + 1 for row in range(rows)]
    slots = torch.tensor([*live, -1], dtype=torch.int32, device=device)
    pool = case.state(2 * rows, state_dtype, value_major=value_major)
    conv = case.conv(2 * rows, at_once)
    position = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    padded = torch.cat((case.projected, torch.full_like(case.projected[:1], torch.nan)))
    outputs, done, turn = [], 0, 0
    while done < length:
        count = min(1 + turn % at_once, length - done)
        given = padded[:, done : done + at_once].clone()
        if given.shape[1] < at_once:
            given = torch.cat((given, torch.ones_like(padded[:, : at_once - given.shape[1]])), dim=1)
        if turn % 2:
            given[:, count:] = 3.0
        arguments = {
            **case.constants(),
            "state": pool,
            "conv": conv,
            "position": position,
            "slots": slots,
            "impl": impl,
        }
        if at_once > 1:
            arguments["commit"] = torch.full((rows + 1,), count, device=device)
        with poisoned():
            out = step(**case.views(given), **arguments, config=config)
        assert not out[-1].any(), "a padding row's output is not zero"
        outputs.append(out[:-1, :count])
        position += count
        done, turn = done + count, turn + 1
    assert pool[spare].isnan().all(), "a slot that is nobody's was written"
    if conv is not None:
        assert conv.inputs[spare].isnan().all(), "a ring that is nobody's was written"
    return {"output": torch.cat(outputs, dim=1), "state": pool[live]}
