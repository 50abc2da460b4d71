"""Gates of the delta rule before their activations, against the formulas in fp64."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapkernels.delta_rule import DeltaRuleOutput, RawGates, delta_rule
from lapkernels.testing import (
    DeltaRuleInputs,
    Precision,
    delta_rule_inputs,
    output_state_and_gradients,
    precisions,
    transition_recurrence,
)


@dataclass
class RawInputs(DeltaRuleInputs):
    """Arguments of a layer: beta and g before their activations.

    Attributes:
        A_log: `[HV]`, or `None`: g is a log decay, or not there.
        dt_bias: `[HV]`, `[HV, K]` or `None`.
        strength: as of `RawGates`.
        decay_lower_bound: likewise.
    """

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    strength: float | None = None
    decay_lower_bound: float | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: x for name, x in super().tensors().items() if name not in ("strength", "decay_lower_bound")}

    def activated(self) -> DeltaRuleInputs:
        """By the formulas, written out."""
        beta, g = self.beta, self.g
        if self.strength is not None:
            beta = self.strength / (1 + (-beta).exp())
        if self.A_log is not None:
            assert g is not None
            step = g if self.dt_bias is None else g + self.dt_bias
            rate = self.A_log.exp().view(-1, *[1] * (g.ndim - 3))
            if self.decay_lower_bound is None:
                g = -rate * torch.log1p(step.exp())
            else:
                g = self.decay_lower_bound / (1 + (-rate * step).exp())
        return DeltaRuleInputs(self.q, self.k, self.v, beta, g, self.erase, self.initial_state)


RAW_GATES: dict[str, dict[str, Any]] = {
    "all of it": {"time": 70, "value_heads": 2, "strength": 2.0, "bias": True, "state": True},
    "a decay": {"time": 20, "value_heads": 1, "strength": None, "bias": False},
    "a strength": {"time": 20, "value_heads": 2, "strength": 1.0, "gate": None, "bias": False, "erase": "value"},
}
"""What is left to activate, in layers of one key head."""

CHANNEL_GATES: dict[str, dict[str, Any]] = {
    "a decay of each channel": {"time": 35, "value_heads": 2, "strength": 1.0, "bias": True, "by_channel": True},
    "with a lower bound": {"time": 20, "value_heads": 2, "strength": None, "bias": True, "by_channel": True,
                           "bound": -5.0},
}  # fmt: skip
"""The same where each key channel has a decay of its own, as in KDA."""


def check_raw_gates(name: str, dtype: torch.dtype, device: str = "cpu", impl: str = "triton") -> None:
    """Activations in the kernels, with gradients to projections and parameters, against the formulas in fp64.

    Raises:
        AssertionError: naming what differs, and by how much.
    """
    for found in raw_gate_precisions(name, dtype, device, impl):
        assert found.holds, str(found)


def raw_gate_precisions(name: str, dtype: torch.dtype, device: torch.device | str, impl: str) -> list[Precision]:
    """How precise outputs, states and gradients of a layer are whose gates the rule activates.

    Args:
        name: of `RAW_GATES` or `CHANNEL_GATES`.
        dtype: of the layer's projections.
        device: where.
        impl: which implementation.
    """
    options = {**(RAW_GATES | CHANNEL_GATES)[name]}
    strength, bias, heads = options.pop("strength"), options.pop("bias"), options["value_heads"]
    bound = options.pop("bound", None)
    made = delta_rule_inputs(batch=1, key_heads=1, key_width=16, value_width=16, **options)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def narrow(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device, dtype)

    decays = made.g is not None
    biases = (heads,) if made.g is None or made.g.ndim == 3 else (heads, made.g.shape[-1])
    whole = RawInputs(
        made.q, made.k, made.v, normal(*made.beta.shape) if strength is not None else made.beta,
        normal(*made.g.shape) if made.g is not None else None, made.erase, made.initial_state,
        A_log=normal(heads) - 1 if decays else None, dt_bias=normal(*biases) if bias else None, strength=strength,
        decay_lower_bound=bound,
    )  # fmt: skip
    cast = {field: narrow(x) for field, x in whole.tensors().items()}
    for field in ("A_log", "dt_bias", "initial_state"):
        if cast.get(field) is not None:
            # As models keep them.
            cast[field] = getattr(whole, field).to(device, torch.float32)
    rounded = replace(whole, **cast)
    wide = replace(whole, **{field: x.cpu().double() for field, x in rounded.tensors().items()})

    def given(x: RawInputs, impl: str) -> DeltaRuleOutput:
        named: dict[str, Any] = x.tensors()
        gates = RawGates(x.strength, named.pop("A_log", None), named.pop("dt_bias", None), x.decay_lower_bound)
        return delta_rule(**named, gates=gates, output_final_state=True, impl=impl)

    def formulas(x: RawInputs, rounding: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        return transition_recurrence(x.activated(), rounding=rounding)

    exact = dtype == torch.float32
    cpu = replace(rounded, **{field: x.cpu() for field, x in rounded.tensors().items()})
    truth = output_state_and_gradients(formulas, wide)
    sums: dict[str, Tensor] = {}
    if wide.A_log is not None:
        assert wide.g is not None
        step = wide.g if wide.dt_bias is None else wide.g + wide.dt_bias
        by_rate = step if bound is not None else torch.log1p(step.exp()) * (1 + (-step).exp())
        shares = {"ddt_bias": truth["dg"], "dA_log": truth["dg"] * by_rate}
        # Sums over steps, each of which is as precise as the largest of them.
        sums = {each: x.abs().amax((0, 1)) * x.shape[1] ** 0.5 for each, x in shares.items() if each in truth}
        if "dA_log" in sums and sums["dA_log"].ndim == 2:
            # And over the channels of a head.
            sums["dA_log"] = sums["dA_log"].amax(1) * sums["dA_log"].shape[1] ** 0.5
    return precisions(
        actual=output_state_and_gradients(lambda x: given(x, impl), rounded),
        truth=truth,
        yardstick=output_state_and_gradients(lambda x: given(x, "reference"), cpu)
        if exact
        else output_state_and_gradients(lambda x: formulas(x, dtype), wide),
        dtype=dtype,
        terms=64,
        summands=sums,
    )
