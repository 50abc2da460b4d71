"""Inputs for decode steps and an independent fp64 oracle over whole sequences, for tests and benchmarks.

The oracle never sees a pool, a ring or a step: it filters each sequence with `conv1d` and applies the transition
matrix of each token.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels.decoding.configs import StepConfig
from lapkernels.decoding.rows import ConvState
from lapkernels.delta_step import delta_step
from lapkernels.ssd_step import ssd_step
from lapkernels.testing import assert_as_precise


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


def delta_oracle(case: DeltaStepCase) -> tuple[Tensor, list[Tensor]]:
    """What the layer gives for whole sequences, in fp64.

    Returns:
        The outputs `[B, N, HV, V]`, and the states `[B, HV, K, V]` after 0, 1, .., N tokens.
    """
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
    x = k if lamb is None else k + lamb[..., None] * q
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
    state = torch.zeros(*v.shape[:1], value_heads, width, v.shape[3], dtype=torch.float64, device=v.device)
    identity = torch.eye(width, dtype=torch.float64, device=v.device)
    states, outputs = [state], []
    for t in range(v.shape[1]):
        erase = identity - beta[:, t, :, None, None] * k[:, t, :, :, None] * x[:, t, :, None, :]
        state = erase @ (log_decay[:, t].exp().unsqueeze(-1) * state)
        state = state + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        states.append(state)
        outputs.append((q[:, t, :, None, :] @ state).squeeze(-2) * options.get("scale", width**-0.5))
    output = torch.stack(outputs, dim=1)
    if "norm_weight" in parameters:
        rms = (output.square().mean(-1, keepdim=True) + options["norm_eps"]).sqrt()
        output = output / rms * parameters["norm_weight"]
    gate = seen.get("gate")
    if gate is not None:
        opened = 1 / (1 + (-gate).exp())
        output = output * (opened if options["gate_activation"] == "sigmoid" else gate * opened)
    return output, states


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


def ssd_oracle(case: SsdStepCase) -> tuple[Tensor, list[Tensor]]:
    """What the layer gives for whole sequences, in fp64, by the sum over all pairs of tokens.

    Returns:
        The outputs `[B, N, heads, P]`, and the states `[B, heads, P, state width]` after 0, 1, .., N tokens.
    """
    groups, heads, _, head_width = case.shape
    seen = {name: x.double() for name, x in case.views(case.projected).items() if x is not None}
    parameters = {name: x.double() for name, x in case.parameters.items()}
    sizes = [seen[name].shape[2] * seen[name].shape[3] for name in ("x", "B", "C")]
    line = filtered(torch.cat([seen[name].flatten(2) for name in ("x", "B", "C")], dim=2), case.weight, case.bias)
    line = line / (1 + (-line).exp())
    x, B, C = (part.reshape(seen[n].shape) for n, part in zip(("x", "B", "C"), line.split(sizes, dim=2), strict=True))
    group = torch.arange(heads, device=x.device) // (heads // groups)
    B, C = B[:, :, group], C[:, :, group]
    step = torch.log1p((seen["dt"] + parameters["dt_bias"]).exp())
    if case.options["dt_limit"] is not None:
        step = step.clamp(*case.options["dt_limit"])
    total = torch.cumsum(-parameters["A_log"].exp() * step, dim=1)
    tokens = x.shape[1]
    states = [torch.zeros(x.shape[0], heads, head_width, B.shape[3], dtype=torch.float64, device=x.device)]
    outputs = []
    for t in range(tokens):
        decay = (total[:, t : t + 1] - total[:, : t + 1]).exp() * step[:, : t + 1]
        states.append(torch.einsum("bsh,bshp,bshn->bhpn", decay, x[:, : t + 1], B[:, : t + 1]))
        outputs.append(
            torch.einsum("bsh,bshp,bsh->bhp", decay, x[:, : t + 1], (B[:, : t + 1] * C[:, t : t + 1]).sum(-1))
        )
    y = torch.stack(outputs, dim=1)
    if "D" in parameters:
        y = y + parameters["D"][:, None] * x
    opened = seen["gate"] / (1 + (-seen["gate"]).exp()) if "gate" in seen else torch.ones_like(y)
    if case.options["gate_first"]:
        y = y * opened
    if "norm_weight" in parameters:
        y = y.flatten(2).unflatten(2, (case.options["norm_groups"], -1))
        y = y / (y.square().mean(-1, keepdim=True) + case.options["norm_eps"]).sqrt()
        y = (y.flatten(2) * parameters["norm_weight"]).unflatten(2, (heads, head_width))
    return (y if case.options["gate_first"] else y * opened), states


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
        change: what to change about the case.

    Raises:
        AssertionError: naming what differs, and by how much.
    """
    case = delta_step_case(**{"batch": 2, **DELTA_CASES[name], **change})
    _check(delta_step, delta_oracle, case, impl, dtype, device, state_dtype, value_major, at_once, config)


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
    _check(ssd_step, ssd_oracle, case, impl, dtype, device, state_dtype, value_major, at_once, config)


def _check(
    step: Any,
    oracle: Any,
    case: Any,
    impl: str,
    dtype: torch.dtype,
    device: torch.device | str,
    state_dtype: torch.dtype | None,
    value_major: bool,
    at_once: int,
    config: StepConfig | None,
) -> None:
    narrow = case.to(dtype)
    # The truth of the inputs as they are once rounded, not of what they were.
    output, states = oracle(narrow)
    truth: dict[str, Tensor] = {"output": output, "state": states[-1]}
    state_dtype = state_dtype or torch.promote_types(dtype, torch.float32)
    yardstick = follow(step, narrow, "reference", state_dtype, value_major, 1, None)
    found = follow(step, narrow.to(device=device), impl, state_dtype, value_major, at_once, config)
    coarsest = max((dtype, state_dtype), key=lambda each: torch.finfo(each).eps)
    # Rounded a token, in another order.
    assert_as_precise(found, truth, yardstick, coarsest, terms=case.projected.shape[1])


def follow(
    step: Any,
    case: Any,
    impl: str,
    state_dtype: torch.dtype,
    value_major: bool,
    at_once: int,
    config: StepConfig | None,
) -> dict[str, Tensor]:
    """Take whole sequences through a step, in a pool full of NaN, beside a padding row.

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
        out = step(**case.views(given), **arguments, config=config)
        assert not out[-1].any(), "a padding row's output is not zero"
        outputs.append(out[:-1, :count])
        position += count
        done, turn = done + count, turn + 1
    assert pool[spare].isnan().all(), "a slot that is nobody's was written"
    if conv is not None:
        assert conv.inputs[spare].isnan().all(), "a ring that is nobody's was written"
    return {"output": torch.cat(outputs, dim=1), "state": pool[live]}
