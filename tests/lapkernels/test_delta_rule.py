"""The delta rule against an independent recurrence in fp64, and the properties that any form of it has."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapkernels import InvalidInput
from lapkernels.delta_rule import DeltaRuleOutput, RawGates, delta_rule, l2_normalise
from lapkernels.testing import (
    DeltaRuleInputs,
    assert_as_precise,
    delta_rule_inputs,
    output_state_and_gradients,
    relative_error,
    transition_recurrence,
)
from lapkernels.testing_gates import RAW_GATES, check_raw_gates

# Products of some hundred unit-sized fp64 terms: a hundred times eps and well below any real slip.
EXACT = 1e-12


def run(inputs: DeltaRuleInputs, **options) -> DeltaRuleOutput:
    return delta_rule(**inputs.tensors(), output_final_state=True, **options)


def assert_exact(inputs: DeltaRuleInputs, **options) -> None:
    truth = output_state_and_gradients(transition_recurrence, inputs)
    actual = output_state_and_gradients(lambda x: run(x, **options), inputs)
    assert actual.keys() == truth.keys()
    for name, right in truth.items():
        assert relative_error(actual[name], right) < EXACT, name


def assert_precise_in_fp32(inputs: DeltaRuleInputs, **options) -> None:
    narrow = inputs.to(torch.float32)
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: run(x, **options), narrow),
        truth=output_state_and_gradients(transition_recurrence, narrow.to(torch.float64)),
        yardstick=output_state_and_gradients(lambda x: run(x, impl="reference"), narrow),
        dtype=torch.float32,
        terms=min(64, inputs.q.shape[1]),
    )


@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 64], ids="chunk{}".format)
@pytest.mark.parametrize("time", [1, 7, 8, 17, 63, 64, 65, 130], ids="T{}".format)
def test_every_length_in_every_chunk_size(time, chunk):
    assert_exact(delta_rule_inputs(batch=1, time=time, value_heads=4, state=True), impl="chunked", chunk_size=chunk)


@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 64], ids="chunk{}".format)
@pytest.mark.parametrize("time", [15, 33, 65], ids="T{}".format)
@pytest.mark.parametrize("erase", ["key", "value"], ids="erase_{}".format)
def test_the_erase_direction_in_every_chunk_size(erase, time, chunk):
    """Case 29, backward too: several rows, a state handed from chunk to chunk, and a last chunk that is not full."""
    inputs = delta_rule_inputs(time=time, value_heads=4, gate=0.05, erase=erase, state=True)
    assert_exact(inputs, impl="chunked", chunk_size=chunk)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("state", [False, True], ids=["zero_state", "carried_state"])
@pytest.mark.parametrize("erase", [None, "key", "value"], ids="erase_{}".format)
@pytest.mark.parametrize("gate", [None, 0.5], ids=["ungated", "gated"])
@pytest.mark.parametrize("value_heads", [2, 6], ids=["HV=H", "HV=3H"])
def test_every_combination_of_arguments(impl, state, erase, gate, value_heads):
    inputs = delta_rule_inputs(time=19, value_heads=value_heads, gate=gate, erase=erase, state=state)
    assert_exact(inputs, impl=impl, chunk_size=8)


@pytest.mark.parametrize("value_width", [64, 128], ids="V{}".format)
@pytest.mark.parametrize("key_width", [32, 60, 64, 96, 100, 128], ids="K{}".format)
def test_widths_in_fp32(key_width, value_width):
    inputs = delta_rule_inputs(
        batch=1, time=65, key_heads=1, value_heads=2, key_width=key_width, value_width=value_width, state=True
    )
    assert_precise_in_fp32(inputs, impl="chunked")


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_bf16_inputs_are_computed_in_fp32(impl):
    inputs = delta_rule_inputs(time=130, value_heads=4).to(torch.bfloat16)
    output, state = run(inputs, impl=impl)
    assert output.dtype == torch.bfloat16
    assert state is not None
    assert state.dtype == torch.float32
    truth, final = transition_recurrence(inputs.to(torch.float64))
    # The output's own rounding is all that bf16 may cost; half a unit in the last place, and fp32's noise.
    assert relative_error(output, truth) < 0.51 * torch.finfo(torch.bfloat16).eps
    assert relative_error(state, final) < 1e-5


def test_autocast_changes_nothing():
    inputs = delta_rule_inputs(time=17).to(torch.float32)
    for impl in ("reference", "chunked"):
        plain = run(inputs, impl=impl)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(run(inputs, impl=impl).output, plain.output)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_decay_error_write_read_in_this_order(impl):
    """Case 23: numbers worked out by hand, K = V = 1; each other order of the four gives another output."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    head = torch.ones(1, 1, 1, dtype=torch.float64)
    output, state = delta_rule(
        2 * one,  # q
        one,
        3 * one,  # v
        0.5 * head,
        head * torch.log(torch.tensor(0.25, dtype=torch.float64)),
        scale=1.0,
        initial_state=8 * one,
        output_final_state=True,
        impl=impl,
    )
    # Decay: 8 / 4 = 2. Error: 3 - 2 = 1. Write: 2 + 0.5 * 1 = 2.5. Read: 2 * 2.5 = 5.
    # (error first: 3 - 8 = -5, then 2 - 2.5 = -0.5; read first: 4.)
    assert output.item() == pytest.approx(5.0, abs=1e-12)
    assert state is not None
    assert state.item() == pytest.approx(2.5, abs=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(time=st.integers(2, 70), cut=st.floats(0, 1), chunk=st.sampled_from([3, 16, 64]), seed=st.integers(0, 99))
def test_two_parts_with_the_carried_state_are_one_run(time, cut, chunk, seed):
    inputs = delta_rule_inputs(time=time, value_heads=4, erase="key", state=True, seed=seed)
    middle = 1 + int(cut * (time - 2))
    whole = run(inputs, impl="chunked", chunk_size=chunk)
    first = run(inputs.time_slice(0, middle, inputs.initial_state), impl="chunked", chunk_size=chunk)
    second = run(inputs.time_slice(middle, time, first.final_state), impl="chunked", chunk_size=chunk)
    assert relative_error(torch.cat([first.output, second.output], 1), whole.output) < EXACT
    assert relative_error(second.final_state, whole.final_state) < EXACT


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.sampled_from([1, 8, 64]),
    impl=st.sampled_from(["reference", "chunked"]),
    where=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_sequences_are_the_separate_ones(lengths, chunk, impl, where):
    bounds = [0, *itertools.accumulate(lengths)]
    inputs = delta_rule_inputs(
        batch=1, time=bounds[-1], value_heads=4, state=True, sequences=len(lengths), erase="value"
    )

    def separate(x: DeltaRuleInputs):
        parts = [
            transition_recurrence(x.time_slice(start, stop, x.initial_state[n : n + 1]))
            for n, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        outputs, states = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(states)

    truth = output_state_and_gradients(separate, inputs)
    packed = output_state_and_gradients(
        lambda x: run(x, impl=impl, chunk_size=chunk, cu_seqlens=torch.tensor(bounds, dtype=where)), inputs
    )
    for name, right in truth.items():
        assert relative_error(packed[name], right) < EXACT, name


def test_a_batch_is_its_rows():
    inputs = delta_rule_inputs(batch=3, time=70, value_heads=4, state=True)
    whole = run(inputs, impl="chunked")
    for row in range(3):
        single = run(DeltaRuleInputs(**{n: x[row : row + 1] for n, x in inputs.tensors().items()}), impl="chunked")
        assert relative_error(single.output, whole.output[row : row + 1]) < EXACT
        assert relative_error(single.final_state, whole.final_state[row : row + 1]) < EXACT


def test_shared_key_heads_are_repeated_ones():
    """Case 3: H = 16, HV = 32; the gradient of a shared head is the sum over its value heads."""
    inputs = delta_rule_inputs(batch=1, time=33, key_heads=16, value_heads=32, key_width=4, value_width=3)

    def repeated(x: DeltaRuleInputs):
        q, k = (t.repeat_interleave(2, dim=2) for t in (x.q, x.k))
        return run(DeltaRuleInputs(q, k, x.v, x.beta, x.g), impl="chunked")

    shared = output_state_and_gradients(lambda x: run(x, impl="chunked"), inputs)
    for name, right in output_state_and_gradients(repeated, inputs).items():
        assert relative_error(shared[name], right) < EXACT, name


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_an_orthogonal_change_of_key_basis_changes_no_output(impl, seed):
    """Proposition 3.1 of arXiv 2602.04852: q, k, erase and the state's key axis turn together."""
    inputs = delta_rule_inputs(time=37, value_heads=4, erase="key", state=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    turned = DeltaRuleInputs(
        inputs.q @ turn,
        inputs.k @ turn,
        inputs.v,
        inputs.beta,
        inputs.g,
        inputs.erase @ turn,
        turn.T @ inputs.initial_state,
    )
    before, after = run(inputs, impl=impl), run(turned, impl=impl)
    assert relative_error(after.output, before.output) < EXACT
    assert relative_error(after.final_state, turn.T @ before.final_state) < EXACT
    # The basis did change: the state itself is another.
    assert relative_error(after.final_state, before.final_state) > 0.1


def test_the_erase_direction_is_the_later_tokens():
    """`A[t, s]` pairs x of the later token with k of the earlier; its transpose is wrong by far more than 5 %.

    Weak decay, a full chunk and a strong erase mix, because at chunk 1 or without a mix the two agree.
    """
    inputs = delta_rule_inputs(batch=1, time=64, key_heads=1, key_width=16, value_width=16, gate=0.01, erase="key")
    truth, _ = transition_recurrence(inputs)
    assert relative_error(run(inputs, impl="chunked", chunk_size=64).output, truth) < EXACT

    q, k, v, beta, x = (t[0, :, 0] for t in (inputs.q, inputs.k, inputs.v, inputs.beta, inputs.erase))
    total = inputs.g[0, :, 0].cumsum(0)
    decay = (total[:, None] - total[None, :]).tril().exp().tril()

    def one_chunk(pairs):
        system = torch.eye(64, dtype=torch.float64) + (beta[:, None] * decay * pairs).tril(-1)
        update = torch.linalg.solve(system, beta[:, None] * v)
        return (16**-0.5 * decay * (q @ k.T)).tril() @ update

    assert relative_error(one_chunk(x @ k.T), truth[0, :, 0]) < EXACT
    assert relative_error(one_chunk(k @ x.T), truth[0, :, 0]) > 0.05


@pytest.mark.parametrize("erase", [None, "value"], ids="erase_{}".format)
def test_a_strong_decay_is_safe_and_precise(erase):
    """`g = -50` at every fifth step: sums reach -650 within a chunk, and what follows must not inherit their ulp."""
    # No initial state: its gradient is e^-50 of everything else, and precise to 50 ulp at best.
    inputs = delta_rule_inputs(time=70, value_heads=4, gate=0.02, erase=erase)
    inputs.g[:, ::5] = -50.0
    assert_exact(inputs, impl="chunked")
    assert_precise_in_fp32(inputs, impl="chunked")


@pytest.mark.parametrize("key_width", [60, 96, 100], ids="K{}".format)
def test_a_gate_that_borders_on_huge_numbers(key_width):
    """Case 1: whoever reads past the end of the gate finds 1e30."""
    inputs = delta_rule_inputs(batch=1, time=65, key_width=key_width, value_width=64).to(torch.float32)
    buffer = torch.full((inputs.g.numel() + 4096,), 1e30)
    buffer[: inputs.g.numel()] = inputs.g.flatten()
    beside = DeltaRuleInputs(inputs.q, inputs.k, inputs.v, inputs.beta, buffer[: inputs.g.numel()].view_as(inputs.g))
    for impl in ("reference", "chunked"):
        expected = run(inputs, impl=impl)
        actual = run(beside, impl=impl)
        assert torch.equal(actual.output, expected.output)
        assert torch.equal(actual.final_state, expected.final_state)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_more_rows_times_heads_than_a_grid_axis_counts(impl):
    """Case 16: 65536 + 4 states; the last ones are as right as the first."""
    inputs = delta_rule_inputs(batch=16385, time=3, key_heads=2, value_heads=4, key_width=2, value_width=1, state=True)
    output, state = run(inputs, impl=impl, chunk_size=2)
    truth, final = transition_recurrence(inputs)
    assert relative_error(output, truth) < EXACT
    assert state is not None
    assert relative_error(state, final) < EXACT


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_rows_of_zeros_have_finite_gradients(impl):
    """Case 8: slicing may leave a token without any channel that is not zero."""
    inputs = delta_rule_inputs(time=20).to(torch.float32)
    inputs.q[:, 3:9] = 0
    inputs.k[:, 5:12] = 0
    results = output_state_and_gradients(lambda x: run(x, impl=impl, qk_l2norm=True), inputs)
    for name, tensor in results.items():
        assert tensor.isfinite().all(), name
    assert results["output"][:, 3:9].abs().max() == 0


def test_normalising_inside_is_normalising_before():
    inputs = delta_rule_inputs(time=20)
    raw = DeltaRuleInputs(3 * inputs.q, 0.2 * inputs.k, inputs.v, inputs.beta, inputs.g)
    before = DeltaRuleInputs(l2_normalise(raw.q), l2_normalise(raw.k), raw.v, raw.beta, raw.g)
    for impl in ("reference", "chunked"):
        assert relative_error(run(raw, impl=impl, qk_l2norm=True).output, run(before, impl=impl).output) < EXACT
    # eps is inside the root, beside the squared length
    assert l2_normalise(torch.tensor([3e-3, 4e-3], dtype=torch.float64)).norm().item() == pytest.approx(
        5e-3 / (25e-6 + 1e-6) ** 0.5
    )


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("name", RAW_GATES)
def test_gates_before_their_activations(name, impl):
    """Through the rule, as by the formulas; gradients to projections and parameters."""
    check_raw_gates(name, torch.float32, impl=impl)


def test_no_final_state_unless_asked_for():
    inputs = delta_rule_inputs(time=5)
    assert delta_rule(**inputs.tensors(), impl="chunked").final_state is None


def test_the_read_scale_is_the_root_of_the_key_width_unless_given():
    inputs = delta_rule_inputs(time=5, key_width=8)
    default = delta_rule(**inputs.tensors()).output
    assert relative_error(delta_rule(**inputs.tensors(), scale=1.0).output * 8**-0.5, default) < EXACT


# torch.compile makes an instance of each autograd function itself, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole():
    """No graph break, and the compiled graph gives the same numbers and gradients."""
    inputs = delta_rule_inputs(time=70, value_heads=4, feedback=True, state=True)
    compiled = torch.compile(
        lambda x: tuple(run(DeltaRuleInputs(*x), impl="chunked")), fullgraph=True, dynamic=False, backend="aot_eager"
    )

    def as_tuple(x: DeltaRuleInputs):
        return compiled((x.q, x.k, x.v, x.beta, x.g, x.erase, x.initial_state, x.lamb))

    expected = output_state_and_gradients(lambda x: run(x, impl="chunked"), inputs)
    for name, actual in output_state_and_gradients(as_tuple, inputs).items():
        assert relative_error(actual, expected[name]) < EXACT, name


BAD = {
    "three_axes": (lambda a: a | {"q": a["q"][0]}, "q should have the axes"),
    "heads_do_not_divide": (lambda a: a | {"v": a["v"][:, :, :3], "beta": a["beta"][:, :, :3]}, "no multiple"),
    "beta_per_key_head": (lambda a: a | {"beta": a["beta"][:, :, :2]}, "beta has shape"),
    "gate_per_channel": (lambda a: a | {"g": a["g"].unsqueeze(-1)}, "g has shape"),
    "erase_of_another_width": (lambda a: a | {"erase": a["k"][..., :5]}, "erase has shape"),
    "state_transposed": (lambda a: a | {"initial_state": torch.zeros(2, 4, 6, 8)}, "initial_state has shape"),
    "integer_values": (lambda a: a | {"v": a["v"].long()}, "v has dtype"),
    "mixed_dtypes": (lambda a: a | {"k": a["k"].float()}, "share a dtype"),
    "other_device": (lambda a: a | {"beta": a["beta"].to("meta")}, "one device"),
    "no_time": (lambda a: {n: x[:, :0] for n, x in a.items()}, "no time step"),
    "no_chunk": (lambda a: a | {"chunk_size": 0}, "chunk_size"),
    "unknown_impl": (lambda a: a | {"impl": "magic"}, "impl is 'magic'"),
    "normalised_erase": (lambda a: a | {"erase": a["k"], "qk_l2norm": True}, "normalise q and k first"),
    "rate_without_a_gate": (lambda a: a | {"g": None, "gates": RawGates(A_log=torch.zeros(4))}, "there is no g"),
    "bias_without_a_rate": (lambda a: a | {"gates": RawGates(dt_bias=torch.zeros(4))}, "dt_bias has no meaning"),
    "rate_per_key_head": (lambda a: a | {"gates": RawGates(A_log=torch.zeros(2))}, "gates.A_log has shape"),
    "integer_rate": (lambda a: a | {"gates": RawGates(A_log=torch.zeros(4).long())}, "gates.A_log has dtype"),
    "no_strength": (lambda a: a | {"gates": RawGates(0.0)}, "gates.strength is 0"),
    "packed_batch": (lambda a: a | {"cu_seqlens": torch.tensor([0, 5])}, "B = 2"),
    "float_boundaries": (lambda a: a | {"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    spoil, message = BAD[name]
    arguments = delta_rule_inputs(time=5, value_heads=4).tensors()
    with pytest.raises(InvalidInput, match=message):
        delta_rule(**spoil(arguments))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [([0, 2, 2, 5], "no token"), ([0, 3, 2, 5], "no token"), ([1, 5], "run from 0"), ([0, 4], "T = 5")],
    ids=["empty", "backwards", "late_start", "early_end"],
)
def test_bad_boundaries_are_named(impl, bounds, message):
    arguments = delta_rule_inputs(batch=1, time=5).tensors()
    with pytest.raises(InvalidInput, match=message):
        delta_rule(**arguments, cu_seqlens=torch.tensor(bounds), impl=impl)
