"""Gated states against the sum over all pairs of tokens in fp64, and the properties that any form of them has."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapkernels import InvalidInput, KernelUnavailable
from lapkernels.dual_state import DualStateOutput, dual_state, fla_backend, select_impl, why_not
from lapkernels.testing import assert_as_precise, output_state_and_gradients, relative_error
from lapkernels.testing_dual import DualStateInputs, dual_state_inputs, sum_over_pairs

# Products of some hundred unit-sized fp64 terms: a hundred times eps and well below any real slip.
EXACT = 1e-12


def run(inputs: DualStateInputs, **options) -> DualStateOutput:
    return dual_state(**inputs.tensors(), output_final_state=True, **options)


def assert_exact(inputs: DualStateInputs, **options) -> None:
    truth = output_state_and_gradients(sum_over_pairs, inputs)
    actual = output_state_and_gradients(lambda x: run(x, **options), inputs)
    assert actual.keys() == truth.keys()
    for name, right in truth.items():
        assert relative_error(actual[name], right) < EXACT, name


def assert_precise_in_fp32(inputs: DualStateInputs, **options) -> None:
    narrow = inputs.to(torch.float32)
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: run(x, **options), narrow),
        truth=output_state_and_gradients(sum_over_pairs, narrow.to(torch.float64)),
        yardstick=output_state_and_gradients(lambda x: run(x, impl="reference"), narrow),
        dtype=torch.float32,
        terms=min(64, inputs.q.shape[1]),
    )


@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 64], ids="chunk{}".format)
@pytest.mark.parametrize("time", [1, 7, 8, 17, 63, 65], ids="T{}".format)
def test_every_length_in_every_chunk_size(time, chunk):
    assert_exact(dual_state_inputs(batch=1, time=time, state=True), impl="chunked", chunk_size=chunk)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("state", [False, True], ids=["zero_state", "carried_state"])
@pytest.mark.parametrize("states", [1, 2, 4, 8], ids="states{}".format)
@pytest.mark.parametrize("query_heads", [2, 6], ids=["HQ=H", "HQ=3H"])
def test_every_combination_of_arguments(impl, state, states, query_heads):
    inputs = dual_state_inputs(time=19, query_heads=query_heads, states=states, state=state)
    assert_exact(inputs, impl=impl, chunk_size=8)


@pytest.mark.parametrize("value_width", [48, 128], ids="V{}".format)
@pytest.mark.parametrize("key_width", [24, 64, 100], ids="K{}".format)
def test_widths_in_fp32(key_width, value_width):
    inputs = dual_state_inputs(
        batch=1, time=33, heads=1, query_heads=2, key_width=key_width, value_width=value_width, state=True
    )
    assert_precise_in_fp32(inputs, impl="chunked")


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_each_state_decays_its_own_past(impl):
    """Numbers worked out by hand, K = V = 1: decay, write, read in this order, and no state sees the other's past."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    halved_quartered = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64)).view(1, 1, 2, 1, 1)
    output, state = dual_state(
        2 * one,
        3 * one,
        5 * one,
        halved_quartered,
        torch.tensor([0.75, 0.25], dtype=torch.float64),
        scale=1.0,
        initial_state=torch.tensor([8.0, 16.0], dtype=torch.float64).view(1, 2, 1, 1, 1),
        output_final_state=True,
        impl=impl,
    )
    # 8 / 2 + 15 = 19, 16 / 4 + 15 = 19: then 2 (0.75 * 19 + 0.25 * 19). Unlike shares of unlike states: below.
    assert state.flatten().tolist() == pytest.approx([19.0, 19.0], abs=1e-12)
    assert output.item() == pytest.approx(38.0, abs=1e-12)
    output, state = dual_state(
        2 * one, 3 * one, 5 * one, halved_quartered, torch.tensor([0.75, 0.25], dtype=torch.float64), scale=0.5,
        initial_state=torch.tensor([8.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1, 1), output_final_state=True,
        impl=impl,
    )  # fmt: skip
    assert state.flatten().tolist() == pytest.approx([19.0, 15.0], abs=1e-12)
    assert output.item() == pytest.approx(0.75 * 19 + 0.25 * 15, abs=1e-12)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_bf16_inputs_are_computed_in_fp32(impl):
    inputs = dual_state_inputs(time=40).to(torch.bfloat16)
    output, state = run(inputs, impl=impl)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    truth, final = sum_over_pairs(inputs)
    # The output's own rounding is all that bf16 may cost; half a unit in the last place, and fp32's noise.
    assert relative_error(output, truth) < 0.51 * torch.finfo(torch.bfloat16).eps
    assert relative_error(state, final) < 1e-5


def test_autocast_changes_nothing():
    inputs = dual_state_inputs(time=17).to(torch.float32)
    for impl in ("reference", "chunked"):
        plain = run(inputs, impl=impl)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(run(inputs, impl=impl).output, plain.output)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(time=st.integers(2, 70), cut=st.floats(0, 1), chunk=st.sampled_from([3, 16, 64]), seed=st.integers(0, 99))
def test_two_parts_with_the_carried_states_are_one_run(time, cut, chunk, seed):
    inputs = dual_state_inputs(time=time, query_heads=4, state=True, seed=seed)
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
    inputs = dual_state_inputs(batch=1, time=bounds[-1], query_heads=4, state=True, sequences=len(lengths))

    def separate(x: DualStateInputs):
        parts = [
            sum_over_pairs(x.time_slice(start, stop, x.initial_state[n : n + 1]))
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
    inputs = dual_state_inputs(batch=3, time=35, query_heads=4, state=True)
    whole = run(inputs, impl="chunked")
    for row in range(3):
        one = {n: x if n == "mixture" else x[row : row + 1] for n, x in inputs.tensors().items()}
        single = run(DualStateInputs(**one), impl="chunked")
        assert relative_error(single.output, whole.output[row : row + 1]) < EXACT
        assert relative_error(single.final_state, whole.final_state[row : row + 1]) < EXACT


def test_states_that_share_keys_are_one_wider_state():
    """What fla is given: k repeated along its width, gates side by side, q times each state's share."""
    inputs = dual_state_inputs(time=35, states=3, state=True)
    shares = inputs.q.unsqueeze(3) * inputs.mixture[:, None]
    wide = DualStateInputs(
        shares.flatten(3),
        inputs.k.repeat(1, 1, 1, 3),
        inputs.v,
        inputs.g.transpose(2, 3).flatten(3).unsqueeze(2),
        torch.ones(1, dtype=torch.float64),
        inputs.initial_state.transpose(1, 2).flatten(2, 3).unsqueeze(1),
    )
    one, many = run(wide, impl="chunked", scale=8**-0.5), run(inputs, impl="chunked")
    assert relative_error(one.output, many.output) < EXACT
    assert relative_error(one.final_state[:, 0].unflatten(2, (3, 8)).transpose(1, 2), many.final_state) < EXACT


def test_what_fla_is_asked_for_is_the_operator(monkeypatch):
    """fla itself needs a GPU; its contract, GLA with a query head for each state, is kept here by the oracle."""

    class Library:
        @staticmethod
        def chunk_gla(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens=None):
            assert q.shape == k.shape == g.shape
            assert not state_v_first
            assert all(x.is_contiguous() for x in (q, k, v, g))
            held = None if initial_state is None else initial_state.unsqueeze(1)
            ones = torch.ones(1, dtype=q.dtype)
            output, state = dual_state(
                q, k, v, g.unsqueeze(2).to(q.dtype), ones, scale=scale, initial_state=held, cu_seqlens=cu_seqlens,
                output_final_state=True, impl="reference",
            )  # fmt: skip
            return output, state.squeeze(1) if output_final_state else None

    monkeypatch.setattr(fla_backend.importlib, "import_module", lambda name: Library)
    for options in ({}, {"batch": 1, "sequences": 3}):
        inputs = dual_state_inputs(time=11, query_heads=6, states=3, state=True, **options).to(torch.float32)
        packed = torch.tensor([0, 2, 7, 11]) if options else None
        output, state = fla_backend.dual_state_fla(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.mixture, 0.3, inputs.initial_state, True, packed
        )
        right = run(inputs, scale=0.3, cu_seqlens=packed, impl="reference")
        # Shares are multiplied into q here, into the output there.
        assert relative_error(output, right.output) < 4 * torch.finfo(torch.float32).eps
        assert relative_error(state, right.final_state) < torch.finfo(torch.float32).eps


@pytest.mark.parametrize("chunk", [16, 64], ids="chunk{}".format)
def test_a_strong_decay_is_safe_and_precise(chunk):
    """`g = -50` in some channels at every fifth step: sums reach -650 within a chunk beside channels that keep all."""
    # No initial state: its gradient is e^-50 of everything else, and precise to 50 ulp at best.
    inputs = dual_state_inputs(time=70, gate=0.02)
    inputs.g[:, ::5, :, :, ::2] = -50.0
    assert_exact(inputs, impl="chunked", chunk_size=chunk)
    assert_precise_in_fp32(inputs, impl="chunked", chunk_size=chunk)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_gates_of_minus_infinity_forget_all(impl):
    inputs = dual_state_inputs(time=21, state=True).to(torch.float32)
    inputs.g[:, 9] = -torch.inf
    whole = run(inputs, impl=impl)
    after = run(inputs.time_slice(9, 21), impl=impl)
    assert whole.output.isfinite().all()
    assert relative_error(whole.output[:, 9:], after.output) < 1e-6
    assert relative_error(whole.final_state, after.final_state) < 1e-6


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_rows_of_zeros_have_finite_gradients(impl):
    """Case 8: slicing may leave a token without any channel that is not zero."""
    inputs = dual_state_inputs(time=20).to(torch.float32)
    inputs.q[:, 3:9] = 0
    inputs.k[:, 5:12] = 0
    results = output_state_and_gradients(lambda x: run(x, impl=impl), inputs)
    for name, tensor in results.items():
        assert tensor.isfinite().all(), name
    assert results["output"][:, 3:9].abs().max() == 0


@pytest.mark.parametrize("key_width", [60, 96, 100], ids="K{}".format)
def test_a_gate_that_borders_on_huge_numbers(key_width):
    """Case 1: whoever reads past the end of the gate finds 1e30."""
    inputs = dual_state_inputs(batch=1, time=20, key_width=key_width).to(torch.float32)
    buffer = torch.full((inputs.g.numel() + 4096,), 1e30)
    buffer[: inputs.g.numel()] = inputs.g.flatten()
    beside = inputs.tensors() | {"g": buffer[: inputs.g.numel()].view_as(inputs.g)}
    for impl in ("reference", "chunked"):
        assert torch.equal(run(DualStateInputs(**beside), impl=impl).output, run(inputs, impl=impl).output)


def test_pairs_are_worked_on_in_parts(monkeypatch):
    """A device with room for one chunk at a time gives the same numbers and gradients."""
    from lapkernels.dual_state import chunked

    inputs = dual_state_inputs(time=50, query_heads=4, state=True)
    whole = output_state_and_gradients(lambda x: run(x, impl="chunked"), inputs)
    monkeypatch.setitem(chunked._AT_ONCE, "cpu", 1)
    for name, part in output_state_and_gradients(lambda x: run(x, impl="chunked"), inputs).items():
        assert relative_error(part, whole[name]) < EXACT, name


def test_memory_of_a_long_row_grows_with_the_inputs_alone():
    """What autograd keeps: no pairs of steps, of which each has a number for every channel."""
    inputs = dual_state_inputs(batch=1, time=512, heads=1, key_width=32, value_width=32).requiring_grad()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        dual_state(**inputs.tensors(), impl="chunked")
    largest = max(x.numel() for x in kept)
    # The states before the chunks: K V / 16 numbers a token and state.
    assert largest <= 512 * 2 * 32 * 32 // 16


# torch.compile makes an instance of each autograd function itself, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole():
    """No graph break, and the compiled graph gives the same numbers and gradients."""
    inputs = dual_state_inputs(time=35, query_heads=4, state=True)
    compiled = torch.compile(
        lambda x: tuple(run(DualStateInputs(*x), impl="auto")), fullgraph=True, dynamic=False, backend="aot_eager"
    )

    def as_tuple(x: DualStateInputs):
        return compiled((x.q, x.k, x.v, x.g, x.mixture, x.initial_state))

    expected = output_state_and_gradients(lambda x: run(x, impl="chunked"), inputs)
    for name, actual in output_state_and_gradients(as_tuple, inputs).items():
        assert relative_error(actual, expected[name]) < EXACT, name


def test_the_read_scale_is_the_root_of_the_key_width_unless_given():
    inputs = dual_state_inputs(time=5, key_width=8)
    default = dual_state(**inputs.tensors())
    assert default.final_state is None
    assert relative_error(dual_state(**inputs.tensors(), scale=1.0).output * 8**-0.5, default.output) < EXACT


def test_what_runs_and_why():
    assert select_impl("cpu", torch.float32, time=1).name == "reference"
    choice = select_impl("cpu", torch.float32, time=9)
    assert choice.name == "chunked"
    assert "needs a GPU" in choice.reason or "not installed" in choice.reason
    assert why_not("chunked", "cpu", torch.float64) is None
    with pytest.raises(KernelUnavailable, match="fla"):
        dual_state(**dual_state_inputs(time=5).to(torch.float32).tensors(), impl="fla")


BAD = {
    "no_axes": (lambda a: a | {"q": a["q"][0]}, "q should have the axes"),
    "gate_axes": (lambda a: a | {"g": a["g"][:, :, 0]}, r"g should have the axes \[B, T, states, H, K\]"),
    "odd_heads": (lambda a: a | {"q": a["q"][:, :, :3]}, "no multiple of the H = 2"),
    "short_v": (lambda a: a | {"v": a["v"][:, :4]}, "v has shape"),
    "gate_width": (lambda a: a | {"g": a["g"][..., :7]}, "g has shape"),
    "mixture": (lambda a: a | {"mixture": a["mixture"][:1]}, r"mixture has shape \[1\]; it should be \[2\]"),
    "state": (lambda a: a | {"initial_state": torch.zeros(2, 1, 2, 8, 6)}, "initial_state has shape"),
    "integers": (lambda a: a | {"k": a["k"].long()}, "k has dtype"),
    "two_dtypes": (lambda a: a | {"k": a["k"].float()}, "share a dtype"),
    "other_device": (lambda a: a | {"mixture": a["mixture"].to("meta")}, "one device"),
    "no_time": (lambda a: {n: x if n == "mixture" else x[:, :0] for n, x in a.items()}, "no time step"),
    "no_chunk": (lambda a: a | {"chunk_size": 0}, "chunk_size"),
    "unknown_impl": (lambda a: a | {"impl": "magic"}, "impl is 'magic'"),
    "packed_batch": (lambda a: a | {"cu_seqlens": torch.tensor([0, 5])}, "B = 2"),
    "float_boundaries": (lambda a: a | {"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    spoil, message = BAD[name]
    with pytest.raises(InvalidInput, match=message):
        dual_state(**spoil(dual_state_inputs(time=5, query_heads=4).tensors()))
