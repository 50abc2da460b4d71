"""The delta rule with a decay of each key channel (Kimi Delta Attention), step by step and in chunks."""

import itertools

import pytest
import torch

from lapkernels import InvalidInput
from lapkernels.delta_rule import DeltaRuleOutput, RawGates, delta_rule
from lapkernels.testing import (
    DeltaRuleInputs,
    assert_as_precise,
    delta_rule_inputs,
    output_state_and_gradients,
    relative_error,
    transition_recurrence,
)
from lapkernels.testing_gates import CHANNEL_GATES, check_raw_gates

# As of the decay of a head: products of some hundred unit-sized fp64 terms.
EXACT = 1e-12
BOTH = pytest.mark.parametrize("impl", ["reference", "chunked"])


def run(inputs: DeltaRuleInputs, **options) -> DeltaRuleOutput:
    return delta_rule(**inputs.tensors(), output_final_state=True, **options)


def channels(**options) -> DeltaRuleInputs:
    return delta_rule_inputs(by_channel=True, **options)


def assert_exact(inputs: DeltaRuleInputs, **options) -> None:
    truth = output_state_and_gradients(transition_recurrence, inputs)
    actual = output_state_and_gradients(lambda x: run(x, **options), inputs)
    assert actual.keys() == truth.keys()
    for name, right in truth.items():
        assert relative_error(actual[name], right) < EXACT, name


def assert_precise_in_fp32(inputs: DeltaRuleInputs) -> None:
    narrow = inputs.to(torch.float32)
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: run(x, impl="chunked"), narrow),
        truth=output_state_and_gradients(transition_recurrence, narrow.to(torch.float64)),
        yardstick=output_state_and_gradients(lambda x: run(x, impl="reference"), narrow),
        dtype=torch.float32,
        terms=min(64, inputs.q.shape[1]),
    )


@pytest.mark.parametrize("chunk", [1, 3, 16, 64], ids="chunk{}".format)
@pytest.mark.parametrize("time", [1, 7, 17, 65], ids="T{}".format)
def test_every_length_in_every_chunk_size(time, chunk):
    """Chunks that are no power of two are halved all the same."""
    assert_exact(channels(batch=1, time=time, value_heads=4, state=True), impl="chunked", chunk_size=chunk)


@BOTH
@pytest.mark.parametrize("state", [False, True], ids=["zero_state", "carried_state"])
@pytest.mark.parametrize(
    "erasing", [{}, {"erase": "key"}, {"erase": "value"}, {"feedback": True}], ids=["key", "own", "own_a_head", "lamb"]
)
def test_every_combination_of_arguments(impl, state, erasing):
    inputs = channels(time=19, value_heads=6, gate=2.0, state=state, **erasing)
    assert_exact(inputs, impl=impl, chunk_size=8)


@pytest.mark.parametrize("key_width", [60, 96, 128], ids="K{}".format)
def test_widths_in_fp32(key_width):
    assert_precise_in_fp32(
        channels(batch=1, time=65, key_heads=1, value_heads=2, key_width=key_width, value_width=64, state=True)
    )


@BOTH
def test_decay_error_write_read_in_this_order_and_channel_by_channel(impl):
    """Numbers worked out by hand, K = 2, V = 1: the two channels decay by a quarter and by a half."""
    half = torch.tensor(0.5, dtype=torch.float64)
    pair = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    output, state = delta_rule(
        torch.tensor([2.0, 1.0], dtype=torch.float64).view(1, 1, 1, 2),
        pair,
        3 * pair[..., :1],
        half.view(1, 1, 1),
        torch.stack((2 * half.log(), half.log())).view(1, 1, 1, 2),
        scale=1.0,
        initial_state=torch.tensor([8.0, 6.0], dtype=torch.float64).view(1, 1, 2, 1),
        output_final_state=True,
        impl=impl,
    )
    # Decay: 2, 3. Error: 3 - 5 = -2, halved. Write: 1, 2. Read: 2 * 1 + 2.
    # (Error first: 3 - 14 = -11, and -3.5, -2.5 are left; channels the other way around: 4, 1.5, and 2.75, 0.25.)
    assert state is not None
    assert state.flatten().tolist() == pytest.approx([1.0, 2.0], abs=1e-12)
    assert output.item() == pytest.approx(4.0, abs=1e-12)


@BOTH
def test_channels_that_decay_alike_are_the_decay_of_a_head(impl):
    """And the gradient of the head's is the sum over them."""
    plain = delta_rule_inputs(time=70, value_heads=4, state=True)

    def spread(x: DeltaRuleInputs) -> DeltaRuleOutput:
        assert x.g is not None
        g = x.g.unsqueeze(-1).expand(-1, -1, -1, x.q.shape[-1])
        return run(DeltaRuleInputs(x.q, x.k, x.v, x.beta, g, initial_state=x.initial_state), impl=impl)

    expected = output_state_and_gradients(lambda x: run(x, impl=impl), plain)
    for name, actual in output_state_and_gradients(spread, plain).items():
        assert relative_error(actual, expected[name]) < EXACT, name


@BOTH
def test_channels_in_another_order_are_the_same_rule(impl):
    """q, k, g, erase and the state's rows go together; the decays alone do not."""
    inputs = channels(time=37, value_heads=4, erase="key", state=True, gate=3.0)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 4, 5])
    named = {
        name: x.index_select(-2 if name == "initial_state" else -1, order)
        for name, x in inputs.tensors().items()
        if name not in ("v", "beta")
    }
    moved = DeltaRuleInputs(**(inputs.tensors() | named))
    before, after = run(inputs, impl=impl), run(moved, impl=impl)
    assert relative_error(after.output, before.output) < EXACT
    assert relative_error(after.final_state, before.final_state.index_select(-2, order)) < EXACT
    alone = run(DeltaRuleInputs(**(inputs.tensors() | {"g": named["g"]})), impl=impl)
    assert relative_error(alone.output, before.output) > 0.05


@pytest.mark.parametrize("erase", [None, "value"], ids="erase_{}".format)
def test_a_strong_decay_is_safe_and_precise(erase):
    """-50 in single channels at single steps; what follows in them, and all others, must not feel it."""
    inputs = channels(time=70, value_heads=4, gate=0.02, erase=erase)
    assert inputs.g is not None
    for step, channel in ((0, 0), (5, 3), (6, 3), (40, 3), (63, 1), (64, 2), (69, 7)):
        inputs.g[:, step, :, channel] = -50.0
    inputs.g[:, 33] = -50.0
    assert_exact(inputs, impl="chunked")
    assert_precise_in_fp32(inputs)


@BOTH
def test_a_channel_that_is_forgotten_whole(impl):
    """A log decay of minus infinity: finite everywhere, and nothing of the channel's past is left."""
    inputs = channels(batch=1, time=70, state=True).to(torch.float32)
    assert inputs.g is not None
    inputs.g[:, 20, :, 3] = -torch.inf
    results = output_state_and_gradients(lambda x: run(x, impl=impl), inputs)
    for name, tensor in results.items():
        assert tensor.isfinite().all(), name
    assert results["dinitial_state"][:, :, 3].abs().max() > 0
    inputs.g[:, 0, :, 3] = -torch.inf
    results = output_state_and_gradients(lambda x: run(x, impl=impl), inputs)
    assert results["dinitial_state"][:, :, 3].abs().max() == 0


@BOTH
def test_packed_sequences_are_the_separate_ones(impl):
    bounds = [0, 1, 40, 110]
    inputs = channels(batch=1, time=110, value_heads=4, state=True, sequences=3, erase="value")

    def separate(x: DeltaRuleInputs):
        parts = [
            transition_recurrence(x.time_slice(start, stop, x.initial_state[n : n + 1]))
            for n, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        outputs, states = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(states)

    truth = output_state_and_gradients(separate, inputs)
    packed = output_state_and_gradients(lambda x: run(x, impl=impl, cu_seqlens=torch.tensor(bounds)), inputs)
    for name, right in truth.items():
        assert relative_error(packed[name], right) < EXACT, name


@BOTH
def test_nothing_of_one_packed_sequence_reaches_another(impl):
    """Not even NaN, gradients included."""
    inputs = channels(batch=1, time=80, value_heads=4).to(torch.float32)
    boundaries = torch.tensor([0, 33, 80])
    expected = output_state_and_gradients(lambda x: run(x, impl=impl, cu_seqlens=boundaries), inputs)
    for tensor in inputs.tensors().values():
        tensor[:, :33] = torch.nan
    found = output_state_and_gradients(lambda x: run(x, impl=impl, cu_seqlens=boundaries), inputs)
    for name, right in expected.items():
        rest = slice(1, None) if name == "final_state" else (slice(None), slice(33, None))
        assert torch.equal(found[name][rest], right[rest]), name


@BOTH
@pytest.mark.parametrize("name", CHANNEL_GATES)
def test_gates_before_their_activations(name, impl):
    check_raw_gates(name, torch.float32, impl=impl)


# torch.compile makes an instance of each autograd function itself, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole():
    inputs = channels(time=20, value_heads=4, feedback=True, state=True)
    compiled = torch.compile(
        lambda x: tuple(run(DeltaRuleInputs(*x), impl="chunked", chunk_size=16)),
        fullgraph=True,
        dynamic=False,
        backend="aot_eager",
    )

    def as_tuple(x: DeltaRuleInputs):
        return compiled((x.q, x.k, x.v, x.beta, x.g, x.erase, x.initial_state, x.lamb))

    expected = output_state_and_gradients(lambda x: run(x, impl="chunked", chunk_size=16), inputs)
    for name, actual in output_state_and_gradients(as_tuple, inputs).items():
        assert relative_error(actual, expected[name]) < EXACT, name


BAD = {
    "another_width": (lambda a: a | {"g": a["g"][..., :5]}, "a decay of each key channel"),
    "a_key_heads": (lambda a: a | {"g": a["g"][:, :, :2]}, "a decay of each key channel"),
    "released": (lambda a: a | {"lamb": a["beta"], "released": True}, "released=True with a decay of each key channel"),
    "bias_a_head": (
        lambda a: a | {"gates": RawGates(A_log=torch.zeros(4), dt_bias=torch.zeros(4))},
        r"gates.dt_bias has shape \[4\]; it should be \[4, 8\]",
    ),
    "bound_without_a_rate": (lambda a: a | {"gates": RawGates(decay_lower_bound=-5.0)}, "no meaning"),
    "bound_above_zero": (
        lambda a: a | {"gates": RawGates(A_log=torch.zeros(4), decay_lower_bound=5.0)},
        "decay_lower_bound is 5.0; it should be below 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    spoil, message = BAD[name]
    with pytest.raises(InvalidInput, match=message):
        delta_rule(**spoil(channels(time=5, value_heads=4).tensors()))
