"""Q-Delta's query feedback in the delta rule: `(q, k, lamb)` go in, and every form takes `x = k + lamb q` alike."""

import itertools

import pytest
import torch
from torch import Tensor

from lapkernels import InvalidInput, KernelUnavailable
from lapkernels.delta_rule import DeltaRuleOutput, delta_rule, fla_backend, l2_normalise
from lapkernels.delta_step import delta_step
from lapkernels.testing import (
    DeltaRuleInputs,
    assert_as_precise,
    delta_rule_inputs,
    output_state_and_gradients,
    relative_error,
    transition_recurrence,
)

# Products of some hundred unit-sized fp64 terms: a hundred times eps and well below any real slip.
EXACT = 1e-12


def run(inputs: DeltaRuleInputs, **options) -> DeltaRuleOutput:
    return delta_rule(**inputs.tensors(), output_final_state=True, **options)


def assert_exact(inputs: DeltaRuleInputs, **options) -> None:
    truth = output_state_and_gradients(transition_recurrence, inputs)
    actual = output_state_and_gradients(lambda x: run(x, **options), inputs)
    assert "dlamb" in truth
    assert actual.keys() == truth.keys()
    for name, right in truth.items():
        assert relative_error(actual[name], right) < EXACT, name


@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 64], ids="chunk{}".format)
@pytest.mark.parametrize("time", [1, 15, 64, 65, 130], ids="T{}".format)
def test_chunks_are_the_recurrence(time, chunk):
    """Case 29, forward and backward, to lambda too."""
    assert_exact(
        delta_rule_inputs(time=time, value_heads=4, gate=0.05, feedback=True, state=True),
        impl="chunked",
        chunk_size=chunk,
    )


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("state", [False, True], ids=["zero_state", "carried_state"])
@pytest.mark.parametrize("gate", [None, 0.5], ids=["ungated", "gated"])
@pytest.mark.parametrize("value_heads", [2, 6], ids=["HV=H", "HV=3H"])
@pytest.mark.parametrize("scale", [None, 0.0, 1.7], ids="scale{}".format)
def test_every_combination_of_arguments(impl, state, gate, value_heads, scale):
    inputs = delta_rule_inputs(time=19, value_heads=value_heads, gate=gate, feedback=True, state=state)
    truth = output_state_and_gradients(lambda x: transition_recurrence(x, scale), inputs)
    actual = output_state_and_gradients(lambda x: run(x, impl=impl, chunk_size=8, scale=scale), inputs)
    for name, right in truth.items():
        assert relative_error(actual[name], right) < EXACT, name


def test_fp32_is_as_precise_as_steps_are():
    narrow = delta_rule_inputs(time=130, value_heads=4, feedback=True, state=True).to(torch.float32)
    assert_as_precise(
        actual=output_state_and_gradients(lambda x: run(x, impl="chunked"), narrow),
        truth=output_state_and_gradients(transition_recurrence, narrow.to(torch.float64)),
        yardstick=output_state_and_gradients(lambda x: run(x, impl="reference"), narrow),
        dtype=torch.float32,
        terms=64,
    )


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_bf16_inputs_are_mixed_in_fp32(impl):
    """Rounding `k + lamb q` to bf16 would alone cost more than the bound."""
    inputs = delta_rule_inputs(time=130, value_heads=4, feedback=True).to(torch.bfloat16)
    output, state = run(inputs, impl=impl)
    truth, final = transition_recurrence(inputs.to(torch.float64))
    assert output.dtype == torch.bfloat16
    assert relative_error(output, truth) < 0.51 * torch.finfo(torch.bfloat16).eps
    assert state is not None
    assert relative_error(state, final) < 1e-5


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_q_and_k_are_mixed_after_their_norm(impl):
    inputs = delta_rule_inputs(time=20, value_heads=4, feedback=True)
    raw = DeltaRuleInputs(3 * inputs.q, 0.2 * inputs.k, inputs.v, inputs.beta, inputs.g, lamb=inputs.lamb)
    unit = DeltaRuleInputs(l2_normalise(raw.q), l2_normalise(raw.k), raw.v, raw.beta, raw.g, lamb=raw.lamb)
    truth, _ = transition_recurrence(unit)
    assert relative_error(run(raw, impl=impl, qk_l2norm=True).output, truth) < EXACT
    # Mixed first, 3 q would outweigh k.
    assert relative_error(run(raw, impl=impl).output, truth) > 0.05


def test_the_transposed_matrix_is_caught():
    """`A[t, s]` pairs the later token's x with the earlier one's k. The release has it the other way around.

    With a strong lambda, weak decay and a whole chunk that is wrong by far more than 5 %; at chunk 1, or without
    feedback, it is not wrong at all, so tests there would pass.
    """
    inputs = delta_rule_inputs(batch=1, time=64, key_heads=1, key_width=16, value_width=16, gate=0.01, feedback=True)
    assert inputs.lamb is not None
    assert inputs.lamb.min() >= 0.3
    truth, _ = transition_recurrence(inputs)
    assert relative_error(run(inputs, impl="chunked", chunk_size=64).output, truth) < EXACT
    assert relative_error(run(inputs, released=True, chunk_size=64).output, truth) > 0.05
    assert relative_error(run(inputs, released=True, chunk_size=1).output, truth) < EXACT
    inputs.lamb[:] = 0
    truth, _ = transition_recurrence(inputs)
    assert relative_error(run(inputs, released=True, chunk_size=64).output, truth) < EXACT


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_error_is_taken_after_the_decay(impl):
    """Case 23, by hand with K = V = 1, and the same with chunks and heads against the wrong order."""
    one, head = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    output, state = delta_rule(
        2 * one,  # q
        one,
        3 * one,  # v
        0.5 * head,
        head * torch.log(torch.tensor(0.25, dtype=torch.float64)),
        lamb=0.25 * head,
        scale=1.0,
        initial_state=8 * one,
        output_final_state=True,
        impl=impl,
    )
    # x = 1 + 0.25 * 2 = 1.5. Decay: 8 / 4 = 2. Error: 3 - 2 * 1.5 = 0. Write: 2. Read: 2 * 2 = 4.
    # (error first: 3 - 12 = -9, then 2 - 4.5 = -2.5 and -5; without lambda: 2.5 and 5.)
    assert output.item() == pytest.approx(4.0, abs=1e-12)
    assert state is not None
    assert state.item() == pytest.approx(2.0, abs=1e-12)

    inputs = delta_rule_inputs(time=70, value_heads=4, gate=0.3, feedback=True, state=True)
    wrong, _ = error_before_decay(
        inputs.q, inputs.k, inputs.v, mixed(inputs), inputs.beta, inputs.g, inputs.initial_state
    )
    right = run(inputs, impl=impl).output
    assert relative_error(right, transition_recurrence(inputs)[0]) < EXACT
    assert relative_error(right, wrong) > 0.05


def mixed(inputs: DeltaRuleInputs) -> Tensor:
    """`k + lamb q` for each value head."""
    assert inputs.lamb is not None
    shared = inputs.v.shape[2] // inputs.q.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (inputs.q, inputs.k))
    return k + inputs.lamb.unsqueeze(-1) * q


def error_before_decay(q, k, v, p, beta, g, state, scale=None) -> tuple[Tensor, Tensor]:
    """`u = beta (v - S^T p)` from the state *before* its decay, as fla's comba kernels have it."""
    shared = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    reads = []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for t in range(q.shape[1]):
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, p[:, t]))
        state = g[:, t, :, None, None].exp() * state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        reads.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(reads, 1), state


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("norm", [True, False], ids=["normalised_inside", "as_given"])
def test_what_comba_is_given_makes_it_ours(gated, norm, monkeypatch):
    """A stand-in that keeps comba's contract gets fla's arguments; results and gradients are the recurrence's."""
    inputs = delta_rule_inputs(time=33, value_heads=4, gate=0.5 if gated else None, feedback=True, state=True)
    seen = []

    def comba(q, k, v, p, g, beta, *, use_qk_l2norm_in_kernel, scale, initial_state, output_final_state):
        assert not use_qk_l2norm_in_kernel
        assert q.shape == k.shape == p.shape
        seen.append(q.shape)
        return error_before_decay(q, k, v, p, beta, g, initial_state, scale)

    monkeypatch.setattr(fla_backend, "why_unavailable", lambda *a, **o: None)
    monkeypatch.setattr(fla_backend, "_kernel", lambda operator, form: {"comba": comba}[operator])
    narrow = inputs.to(torch.float32)
    truth = output_state_and_gradients(transition_recurrence, inputs)
    found = output_state_and_gradients(lambda x: run(x, impl="fla", qk_l2norm=norm), narrow)
    assert seen[0][2] == 4  # comba knows one key head for each value head
    for name, right in truth.items():
        # The stand-in runs 33 steps in fp32; inputs are rounded to it, and the eps of a norm costs 5e-7 a token. Along
        # q and k themselves a norm lets no gradient pass, so theirs are compared without it.
        if not (norm and name in ("dq", "dk")):
            assert relative_error(found[name], right) < 2e-5, name


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_no_feedback_is_the_gated_delta_rule_to_the_bit(impl):
    """What a conversion rests on."""
    inputs = delta_rule_inputs(time=130, value_heads=4, key_width=24, state=True).to(torch.float32)
    plain = run(inputs, impl=impl, qk_l2norm=True)
    none = run(inputs, impl=impl, qk_l2norm=True, lamb=torch.zeros_like(inputs.beta))
    assert torch.equal(plain.output, none.output)
    assert torch.equal(plain.final_state, none.final_state)


def test_the_decode_step_agrees():
    """Token by token through `delta_step` is one call of `delta_rule`, state and outputs."""
    inputs = delta_rule_inputs(time=9, value_heads=4, gate=0.4, feedback=True)
    raw = DeltaRuleInputs(3 * inputs.q, 0.2 * inputs.k, inputs.v, inputs.beta, inputs.g, lamb=inputs.lamb)
    wanted, final = run(raw, impl="chunked", qk_l2norm=True)
    assert raw.g is not None
    assert raw.lamb is not None
    state = torch.zeros(2, 4, 8, 6, dtype=torch.float64)
    for t in range(9):
        now = slice(t, t + 1)
        output = delta_step(
            raw.q[:, now], raw.k[:, now], raw.v[:, now], state,
            b=raw.beta.logit()[:, now], a=raw.g[:, now], lamb=raw.lamb[:, now],
            silu_q=False, silu_k=False, silu_v=False, impl="reference",
        )  # fmt: skip
        assert relative_error(output, wanted[:, now]) < EXACT
    assert relative_error(state, final) < EXACT


@pytest.mark.parametrize("released", [False, True], ids=["right", "released"])
def test_packed_sequences_are_the_separate_ones(released):
    """The release's chunks begin with each sequence, too."""
    bounds = [0, 1, 70, 75, 140]
    inputs = delta_rule_inputs(
        batch=1, time=140, value_heads=4, gate=0.05, feedback=True, state=True, sequences=len(bounds) - 1
    )

    def separate(x: DeltaRuleInputs):
        assert x.initial_state is not None
        parts = [
            run(x.time_slice(start, stop, x.initial_state[n : n + 1]), released=released, impl="chunked")
            for n, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])

    truth = output_state_and_gradients(separate, inputs)
    packed = output_state_and_gradients(
        lambda x: run(x, impl="chunked", released=released, cu_seqlens=torch.tensor(bounds)), inputs
    )
    for name, right in truth.items():
        assert relative_error(packed[name], right) < EXACT, name


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_rows_of_zeros_have_finite_gradients(impl):
    """Case 8."""
    inputs = delta_rule_inputs(time=20, feedback=True).to(torch.float32)
    inputs.q[:, 3:9] = 0
    inputs.k[:, 5:12] = 0
    for name, tensor in output_state_and_gradients(lambda x: run(x, impl=impl, qk_l2norm=True), inputs).items():
        assert tensor.isfinite().all(), name


def wave(*shape: int, step: float) -> Tensor:
    """Numbers that need no generator: `sin(step n^1.01)`."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(step * count**1.01).view(shape)


def test_the_released_recurrence_is_that_of_the_released_kernels():
    """Golden: Q-Delta's released Triton kernels (commit 4afe5b5), forward and backward, in triton 3.7.1's interpreter.

    Two chunks, the second not full, fp32. All their results were within 1.2e-6 of ours in fp64; the recurrence is 27 %
    away. The bound is six decimals' rounding and fp32's.
    """
    time, heads, width = 70, 2, 16
    q, k, v, state = (
        wave(*shape, step=step).float().requires_grad_()
        for shape, step in (
            ((1, time, heads, width), 0.7),
            ((1, time, heads, width), 1.3),
            ((1, time, heads, width), 2.1),
            ((1, heads, width, width), 0.3),
        )
    )
    beta = (0.5 + 0.4 * wave(1, time, heads, step=0.9)).float()
    g = (-0.02 - 0.02 * wave(1, time, heads, step=1.7)).float()
    lamb = (0.6 + 0.3 * wave(1, time, heads, step=1.1)).float().requires_grad_()
    output, final = delta_rule(
        q, k, v, beta, g, lamb=lamb, initial_state=state, output_final_state=True, qk_l2norm=True, released=True
    )
    assert final is not None
    weights = [wave(*output.shape, step=0.37).float(), wave(*final.shape, step=0.53).float()]
    d_k, d_lamb = torch.autograd.grad([output, final], [k, lamb], weights)
    golden = (
        (output[0], ((0, 0, 0), (5, 1, 3), (31, 0, 7), (63, 1, 15), (64, 0, 2), (69, 1, 9)),
         (-0.092572, 0.070683, -0.018985, -0.022076, 0.022889, -0.009957)),
        (final[0], ((0, 0, 0), (0, 9, 4), (1, 3, 12), (1, 15, 15)), (-0.074892, 0.027913, -0.093167, 0.403075)),
        (d_lamb[0], ((0, 0), (20, 1), (63, 0), (64, 1), (69, 0)), (-0.014152, -0.019432, -0.02703, 0.007276, -0.00908)),
        (d_k[0], ((0, 0, 0), (20, 1, 3), (63, 0, 5), (69, 1, 15)), (0.143606, 0.176957, 0.029511, -0.243666)),
    )  # fmt: skip
    for tensor, places, values in golden:
        for place, value in zip(places, values, strict=True):
            assert float(tensor.detach()[place]) == pytest.approx(value, abs=3e-6)
    right, _ = delta_rule(q, k, v, beta, g, lamb=lamb, initial_state=state, qk_l2norm=True, impl="chunked")
    assert relative_error(output, right) > 0.05


BAD = {
    "lambda_per_key_head": (lambda a: a | {"lamb": a["lamb"][:, :, :2]}, "lamb has shape"),
    "lambda_per_channel": (lambda a: a | {"lamb": a["lamb"].unsqueeze(-1)}, "lamb has shape"),
    "integer_lambda": (lambda a: a | {"lamb": a["lamb"].long()}, "lamb has dtype"),
    "both": (lambda a: a | {"erase": a["k"]}, "give one of the two"),
    "released_without": (lambda a: {n: x for n, x in a.items() if n != "lamb"} | {"released": True}, "no lamb"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    spoil, message = BAD[name]
    arguments = delta_rule_inputs(time=5, value_heads=4, feedback=True).tensors()
    with pytest.raises(InvalidInput, match=message):
        delta_rule(**spoil(arguments))


@pytest.mark.parametrize("impl", ["reference", "triton", "fla"])
def test_only_chunks_compute_the_released_recurrence(impl):
    arguments = delta_rule_inputs(time=5, feedback=True).to(torch.float32).tensors()
    with pytest.raises(KernelUnavailable, match="only impl='chunked'"):
        delta_rule(**arguments, released=True, impl=impl)
