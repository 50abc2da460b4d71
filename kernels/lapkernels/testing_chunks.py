"""Cases of the chunked delta rule's Triton kernels, for tests in the interpreter and on a GPU."""

import itertools
from typing import Any

import torch
from torch import Tensor

from lapkernels.delta_rule.api import DeltaRuleOutput, delta_rule
from lapkernels.delta_rule.triton_autograd import delta_rule_triton_with_gradients
from lapkernels.delta_rule.triton_launch import Tiles
from lapkernels.testing import (
    DeltaRuleInputs,
    assert_as_precise,
    delta_rule_inputs,
    output_state_and_gradients,
    poisoned,
    relative_error,
    transition_recurrence,
)
from lapkernels.testing_gates import CHANNEL_GATES, RAW_GATES, check_raw_gates

CASES: dict[str, dict[str, Any]] = {
    "no gate, no state, one step": {"time": 1, "gate": None, "key_heads": 1, "key_width": 16, "value_width": 16},
    "gated, a last chunk that is not full": {"time": 67, "key_heads": 1, "key_width": 64, "value_width": 16,
                                             "state": True},
    "whole chunks": {"batch": 1, "time": 128, "key_width": 32, "value_width": 32},
    "grouped heads, K 48": {"batch": 1, "time": 37, "key_heads": 1, "value_heads": 2, "key_width": 48,
                            "value_width": 24},
    "K 96, V 40": {"batch": 1, "time": 70, "key_heads": 1, "key_width": 96, "value_width": 40, "state": True},
    "K 100": {"batch": 1, "time": 35, "key_heads": 1, "key_width": 100, "value_width": 16},
    "K 128": {"batch": 1, "time": 18, "key_heads": 1, "key_width": 128, "value_width": 16, "state": True},
    "K 192, V 48": {"batch": 1, "time": 33, "key_heads": 1, "key_width": 192, "value_width": 48},
    "K 256": {"batch": 1, "time": 18, "key_heads": 1, "key_width": 256, "value_width": 16, "state": True},
    "V 512": {"batch": 1, "time": 3, "key_heads": 1, "key_width": 16, "value_width": 512, "state": True},
    "an erase direction a key head": {"batch": 1, "time": 70, "key_heads": 1, "value_heads": 2, "gate": 0.05,
                                      "erase": "key", "key_width": 32, "value_width": 16, "state": True},
    "an erase direction a value head": {"batch": 1, "time": 35, "value_heads": 4, "erase": "value", "key_width": 24,
                                        "value_width": 16},
    "an erase direction without a gate": {"batch": 1, "time": 35, "key_heads": 1, "gate": None, "erase": "value",
                                          "key_width": 16, "value_width": 16, "state": True},
    "query feedback": {"batch": 1, "time": 70, "key_heads": 1, "value_heads": 2, "gate": 0.05, "feedback": True,
                       "key_width": 24, "value_width": 16, "state": True},
}  # fmt: skip

CHANNEL_CASES: dict[str, dict[str, Any]] = {
    "a last chunk of few steps": {"time": 67, "key_heads": 1, "value_heads": 2, "key_width": 32, "value_width": 16,
                                  "state": True, "gate": 2.0},
    "K 96, V 40": {"time": 70, "key_heads": 1, "key_width": 96, "value_width": 40, "state": True, "gate": 0.1},
    "K 48, an erase direction a value head": {"time": 35, "key_heads": 1, "value_heads": 2, "erase": "value",
                                              "key_width": 48, "value_width": 16},
    "an erase direction a key head": {"time": 20, "key_heads": 1, "value_heads": 2, "erase": "key", "key_width": 16,
                                      "value_width": 16, "state": True},
    "query feedback": {"time": 40, "key_heads": 1, "value_heads": 2, "feedback": True, "key_width": 24,
                       "value_width": 16, "state": True},
    "K 256": {"time": 18, "key_heads": 1, "key_width": 256, "value_width": 16, "state": True},
}  # fmt: skip
"""The same where each key channel has a decay of its own."""


def run(inputs: DeltaRuleInputs, **options) -> DeltaRuleOutput:
    """Through the public function."""
    return delta_rule(**inputs.tensors(), output_final_state=True, **{"impl": "triton", **options})


def check(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Output, state and all gradients of a case, as near the fp64 recurrence as its own dtype allows."""
    compare(delta_rule_inputs(**CASES[name]).to(dtype), device)


def check_channels(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """As `check`, of `CHANNEL_CASES`."""
    compare(delta_rule_inputs(batch=1, by_channel=True, **CHANNEL_CASES[name]).to(dtype), device)


def compare(narrow: DeltaRuleInputs, device: str, run=run) -> None:
    """The same for any arguments, and for any other way to run the kernels."""
    dtype = narrow.q.dtype
    wide = narrow.to(torch.float64)
    if dtype == torch.float32:
        plain = output_state_and_gradients(lambda x: run_reference(x), narrow)
    else:
        plain = output_state_and_gradients(lambda x: transition_recurrence(x, rounding=dtype), wide)
    assert_as_precise(
        actual=output_state_and_gradients(run, narrow.to(device=device)),
        truth=output_state_and_gradients(transition_recurrence, wide),
        yardstick=plain,
        dtype=dtype,
        terms=64,
    )


def run_reference(inputs: DeltaRuleInputs) -> DeltaRuleOutput:
    """Step by step."""
    return run(inputs, impl="reference")


def check_tiles(tiles: Tiles, dtype: torch.dtype, device: str = "cpu") -> None:
    """One case with tiles of one's own: V in several blocks."""

    def with_tiles(x: DeltaRuleInputs) -> tuple[Tensor, Tensor]:
        return delta_rule_triton_with_gradients(
            x.q, x.k, x.v, x.beta, x.g, x.erase, x.q.shape[-1] ** -0.5, x.initial_state, None, tiles=tiles
        )

    inputs = delta_rule_inputs(batch=1, time=70, key_heads=1, key_width=32, value_width=40, state=True)
    compare(inputs.to(dtype), device, with_tiles)


def check_norm(key_width: int, dtype: torch.dtype, device: str = "cpu", *, by_channel: bool = False) -> None:
    """The normalisation in the kernels against the normalisation before them, gradients too."""
    inputs = delta_rule_inputs(
        batch=1, time=37, key_heads=1, value_heads=2, key_width=key_width, value_width=16, by_channel=by_channel
    )
    longer = DeltaRuleInputs(3 * inputs.q, 0.5 * inputs.k, inputs.v, inputs.beta, inputs.g).to(dtype, device)
    fused = output_state_and_gradients(lambda x: run(x, qk_l2norm=True), longer)
    truth = output_state_and_gradients(lambda x: run(x, impl="reference", qk_l2norm=True), longer.to(torch.float64))
    for name, right in truth.items():
        # Some 64 rounded terms in each sum.
        assert relative_error(fused[name].double(), right) < 8 * torch.finfo(dtype).eps, name


def check_packed(dtype: torch.dtype, device: str = "cpu", *, by_channel: bool = False) -> None:
    """Packed sequences as each alone, with states and gradients of their own."""
    bounds = [0, 1, 66, 70]
    count = len(bounds) - 1
    inputs = delta_rule_inputs(
        batch=1, time=70, key_heads=1, value_heads=1, key_width=16, value_width=16, state=True, sequences=count,
        by_channel=by_channel,
    ).to(dtype, device)  # fmt: skip
    boundaries = torch.tensor(bounds)
    packed = output_state_and_gradients(lambda x: run(x, cu_seqlens=boundaries), inputs)

    def one_by_one(x: DeltaRuleInputs) -> tuple[Tensor, Tensor]:
        assert x.initial_state is not None
        parts = [
            run(x.time_slice(start, stop, x.initial_state[n : n + 1]))
            for n, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        states = [part.final_state for part in parts if part.final_state is not None]
        return torch.cat([part.output for part in parts], 1), torch.cat(states)

    for name, alone in output_state_and_gradients(one_by_one, inputs).items():
        assert relative_error(packed[name], alone) < 8 * torch.finfo(dtype).eps, name

    # The longest is full of NaN, and the others feel nothing.
    for name, x in inputs.tensors().items():
        x[(slice(1, 2),) if name == "initial_state" else (slice(None), slice(bounds[1], bounds[2]))] = torch.nan
    spoilt = output_state_and_gradients(lambda x: run(x, cu_seqlens=boundaries), inputs)
    for name, right in packed.items():
        rows = 0 if name in ("final_state", "dinitial_state") else 1
        for part in (slice(0, 1), slice(2, 3) if rows == 0 else slice(bounds[2], bounds[3])):
            where = part if rows == 0 else (slice(None), part)
            assert torch.equal(spoilt[name][where], right[where]), name


def check_zeros(dtype: torch.dtype, device: str = "cpu", *, by_channel: bool = False) -> None:
    """Case 8: all-zero q and k, normalised or not, leave results and gradients finite."""
    inputs = delta_rule_inputs(
        batch=1, time=20, key_heads=1, key_width=16, value_width=16, by_channel=by_channel
    ).to(dtype, device)  # fmt: skip
    none = DeltaRuleInputs(0 * inputs.q, 0 * inputs.k, inputs.v, inputs.beta, inputs.g)
    for norm in (False, True):
        for name, found in output_state_and_gradients(lambda x, norm=norm: run(x, qk_l2norm=norm), none).items():
            assert bool(found.isfinite().all()), name


def check_strong_decay(dtype: torch.dtype, device: str = "cpu") -> None:
    """A gate of -50 at every fifth step: differences of running sums cancel, exponentials do not overflow."""
    inputs = delta_rule_inputs(batch=1, time=70, key_heads=1, key_width=16, value_width=16, gate=0.1)
    assert inputs.g is not None
    inputs.g[:, ::5] = -50
    compare(inputs.to(dtype), device)


def check_strong_decay_of_channels(dtype: torch.dtype, device: str = "cpu") -> None:
    """Gates of -50 in single channels at single steps, at others in all, and one of minus infinity."""
    inputs = delta_rule_inputs(
        batch=1, time=70, key_heads=1, key_width=16, value_width=16, gate=0.1, by_channel=True, state=True
    )
    assert inputs.g is not None
    for step, channel in ((0, 0), (5, 3), (6, 3), (40, 3), (63, 1), (64, 2), (69, 7)):
        inputs.g[:, step, :, channel] = -50
    inputs.g[:, 33] = -50
    compare(inputs.to(dtype), device)
    results: list[dict[str, Tensor]] = []
    for least in (-torch.inf, -200):
        inputs.g[:, 20, :, 5] = least
        results.append(output_state_and_gradients(run, inputs.to(dtype, device)))
    for name, found in results[0].items():
        assert torch.equal(found, results[1][name]), name


def check_equal_channels(dtype: torch.dtype, device: str = "cpu") -> None:
    """Channels that decay alike are the decay of a head."""
    plain = delta_rule_inputs(batch=1, time=40, key_heads=1, value_heads=2, key_width=32, value_width=16, state=True)
    plain = plain.to(dtype, device)
    assert plain.g is not None
    spread = plain.g.unsqueeze(-1).expand(*plain.g.shape, plain.q.shape[-1])
    by_head = output_state_and_gradients(run, plain)
    # Its channels lie in no order in memory, being one number each.
    found = output_state_and_gradients(
        lambda x: run(DeltaRuleInputs(x.q, x.k, x.v, x.beta, spread, initial_state=x.initial_state)),
        DeltaRuleInputs(plain.q, plain.k, plain.v, plain.beta, initial_state=plain.initial_state),
    )
    for name, actual in found.items():
        assert relative_error(actual, by_head[name]) < 8 * torch.finfo(dtype).eps, name


def check_repeated_keys(dtype: torch.dtype, device: str = "cpu") -> None:
    """One key at every step, written whole: powers of A grow like binomials, `(I + A)^-1` does not."""
    inputs = delta_rule_inputs(batch=1, time=64, key_heads=1, key_width=16, value_width=16, gate=None)
    inputs.k[:] = inputs.k[:, :1]
    inputs.beta[:] = 1
    compare(inputs.to(dtype), device)


def check_many_rows(
    rows: int, dtype: torch.dtype, device: str = "cpu", *, value_heads: int = 2, width: int = 16
) -> None:
    """One row many times over: each has, to the bit, the results and the gradients that the row has alone."""
    inputs = delta_rule_inputs(
        batch=1, time=2, key_heads=1, value_heads=value_heads, key_width=width, value_width=width, state=True
    ).to(dtype, device)

    def results(copies: int) -> list[Tensor]:
        given = {name: x.expand(copies, *x.shape[1:]).clone().requires_grad_() for name, x in inputs.tensors().items()}
        output, state = run(DeltaRuleInputs(**given))
        assert state is not None
        # Gradients of one for every number, in views that take no memory.
        ones = [torch.ones((), dtype=x.dtype, device=device).expand_as(x) for x in (output, state)]
        found = torch.autograd.grad([output, state], list(given.values()), ones)
        return [output.detach(), state.detach(), *found]

    for alone, found in zip(results(1), results(rows), strict=True):
        for row in (0, rows // 2, rows - 1):
            assert torch.equal(found[row], alone[0])


def check_poisoned(dtype: torch.dtype, device: str = "cpu", key_width: int = 20, *, by_channel: bool = False) -> None:
    """Whatever lies beside the arguments, and in fresh memory, reaches no result (case 1)."""
    inputs = delta_rule_inputs(
        batch=1, time=35, key_heads=1, key_width=key_width, value_width=24, by_channel=by_channel
    ).to(dtype, device)  # fmt: skip
    expected = output_state_and_gradients(run, inputs)
    beside = {}
    for name, x in inputs.tensors().items():
        wide = torch.full((*x.shape[:1], x.shape[1] + 64, *x.shape[2:]), 1e30, dtype=x.dtype, device=device)
        wide[:, 32 : 32 + x.shape[1]] = x
        beside[name] = wide[:, 32 : 32 + x.shape[1]]

    with poisoned():
        found = output_state_and_gradients(run, DeltaRuleInputs(**beside))
    for name, right in expected.items():
        assert torch.equal(found[name], right), name


def check_all(dtype: torch.dtype, device: str = "cpu") -> None:
    """Everything above but the tiles and the neighbours."""
    for name in CASES:
        check(name, dtype, device)
    for key_width in (16, 96):
        check_norm(key_width, dtype, device)
    check_packed(dtype, device)
    check_zeros(dtype, device)
    check_strong_decay(dtype, device)
    check_repeated_keys(dtype, device)
    for name in CHANNEL_CASES:
        check_channels(name, dtype, device)
    check_strong_decay_of_channels(dtype, device)
    for name in (*RAW_GATES, *CHANNEL_GATES):
        check_raw_gates(name, dtype, device)
