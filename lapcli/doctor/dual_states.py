"""Gated states that share keys and values, against a recurrence in fp64: trials for `lapcli.doctor.kernels`."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.doctor.kernels import CHUNK, LENGTH, SHORT, STEP_WIDTHS, Trial, Way
from lapkernels.testing import Precision, output_state_and_gradients, precisions
from lapkernels.testing_dual import (
    DualStateInputs,
    dual_state_inputs,
    dual_step_inputs,
    follow_dual,
    rounding_recurrence,
    step_oracle,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "two states, grouped heads": {"states": 2, "query_heads": 4},
    "one state": {"states": 1},
}


def dual_state_trials(device: torch.device) -> Iterator[Trial]:
    """Of the operator, every implementation, forward and backward."""
    from lapkernels.dual_state import IMPLEMENTATIONS, dual_state, why_not

    for impl in IMPLEMENTATIONS:
        if impl == "auto":
            continue
        dtype = torch.bfloat16 if impl == "fla" else torch.float32
        for variant in VARIANTS:
            ways: tuple[Way, ...] = ("forward", "backward")
            for way in ways:

                def run(
                    impl: str = impl, variant: str = variant, way: Way = way, dtype: torch.dtype = dtype
                ) -> list[Precision]:
                    case = _case(variant, way, dtype)

                    def call(inputs: DualStateInputs) -> tuple[Tensor, Tensor | None]:
                        arguments: dict[str, Any] = dict(inputs.tensors())
                        return dual_state(**arguments, output_final_state=True, impl=impl)

                    found = _results(call, case.inputs.to(device=device), way)
                    # As for the delta rule: summands of a chunk, and in fp32 those of the key axis too.
                    terms = CHUNK * (1 if impl == "fla" else case.inputs.k.shape[3])
                    return precisions(found, case.truth, case.yardstick, dtype, terms)

                why = why_not(impl, device, dtype, needs_gradient=way == "backward")
                yield Trial("dual_state", impl, variant, way, dtype, why, run, cost=1 if impl == "fla" else 0)


def dual_state_step_trials(device: torch.device) -> Iterator[Trial]:
    """Of the decode step, every implementation, in fp32 and bf16 states."""
    from lapkernels.dual_state_step import IMPLEMENTATIONS, why_not

    for impl in IMPLEMENTATIONS:
        if impl == "auto":
            continue
        dtype = torch.bfloat16 if impl != "reference" and device.type == "cuda" else torch.float32
        for variant, options in VARIANTS.items():
            kept = (torch.float32,) if impl == "reference" else (torch.float32, torch.bfloat16)
            for state_dtype in kept:

                def run(
                    impl: str = impl,
                    options: dict[str, Any] = options,
                    dtype: torch.dtype = dtype,
                    state_dtype: torch.dtype = state_dtype,
                ) -> list[Precision]:
                    sizes = {"time": SHORT, "key_width": STEP_WIDTHS[0], "value_width": STEP_WIDTHS[1]}
                    case = dual_step_inputs(**sizes, **options).to(dtype)
                    output, state = step_oracle(case)
                    truth = {"output": output, "state": state}
                    found = follow_dual(case.to(device=device), impl, state_dtype, 1, None)
                    if impl == "reference":
                        # The definition itself: off by what sums over the key axis round, token by token.
                        return precisions(found, truth, truth, dtype, terms=STEP_WIDTHS[0] * SHORT)
                    yardstick = follow_dual(case, "reference", state_dtype, 1, None)
                    coarsest = max((dtype, state_dtype), key=lambda each: torch.finfo(each).eps)
                    return precisions(found, truth, yardstick, coarsest, SHORT)

                name = variant if state_dtype == torch.float32 else f"{variant}, bf16 state"
                why = why_not(impl, device, dtype)
                if why is None and state_dtype == torch.bfloat16 and device.type == "cpu":
                    why = "triton's interpreter cuts numbers off where a GPU rounds them to bf16"
                yield Trial("dual_state_step", impl, name, "decode", dtype, why, run)


class _Case(NamedTuple):
    """Inputs in their dtype, what comes of them, and of a recurrence that rounds its operands."""

    inputs: DualStateInputs
    truth: dict[str, Tensor]
    yardstick: dict[str, Tensor]


@cache
def _case(variant: str, way: Way, dtype: torch.dtype) -> _Case:
    """Once for all implementations."""
    inputs = dual_state_inputs(
        batch=1, time=LENGTH, key_width=32, value_width=64, gate=0.1, state=True, **VARIANTS[variant]
    ).to(dtype)
    exact = inputs.to(torch.float64)
    truth, yardstick = (
        _results(lambda x, rounded=rounded: rounding_recurrence(x, rounded), exact, way)
        for rounded in (torch.float64, dtype)
    )
    return _Case(inputs, truth, yardstick)


def _results(
    run: Callable[[DualStateInputs], tuple[Tensor, Tensor | None]], inputs: DualStateInputs, way: Way
) -> dict[str, Tensor]:
    if way == "backward":
        named = output_state_and_gradients(run, inputs)
        return {name: tensor for name, tensor in named.items() if name.startswith("d")}
    with torch.no_grad():
        output, state = run(inputs)
    assert state is not None
    return {"output": output, "final_state": state}
