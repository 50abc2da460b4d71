"""The decode step of the delta family: reference against whole sequences, rows, slots, drafts, what is refused."""

import pytest
import torch

from lapkernels.delta_step import ConvState, allocate_state, delta_step, select_impl, store_inputs, why_not
from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.testing_steps import DELTA_CASES, DeltaStepCase, check_delta, delta_oracle, delta_step_case

F64 = torch.float64


@pytest.mark.parametrize("at_once", [1, 3], ids="T{}".format)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DELTA_CASES)
def test_steps_are_whole_sequences(name, dtype, at_once):
    """Cases 17 and 24: token by token, or several of which the last are taken back; a padding row, a pool of NaN."""
    check_delta(name, "reference", dtype, at_once=at_once)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_narrower_than_the_sums(state_dtype):
    check_delta("as in Gated DeltaNet", "reference", torch.float32, state_dtype=state_dtype, value_major=True)


def test_the_order_of_decay_error_write_and_read():
    """Case 23, by hand: K = V = 1, S = 2, decay 1/2, beta 1/2, k = q = 1, v = 3.

    Decayed to 1, error 3 - 1 = 2, written 1 + 1 = 2, read 2. The error taken before the decay would give 1.5, the read
    before the write 1.
    """
    one = torch.ones(1, 1, 1, 1, dtype=F64)
    state = 2 * one
    out = delta_step(
        one, one, 3 * one, state,
        b=torch.zeros(1, 1, 1, dtype=F64), a=torch.tensor(0.5, dtype=F64).log().view(1, 1, 1),
        qk_l2norm=False, silu_q=False, silu_k=False, silu_v=False,
    )  # fmt: skip
    assert out.item() == pytest.approx(2.0, abs=1e-15)
    assert state.item() == pytest.approx(2.0, abs=1e-15)


def step(case: DeltaStepCase, t: int, state, conv=None, **more):
    rows = case.batch
    given = {"state": state, "conv": conv, "position": torch.full((rows,), t), **case.tokens(t, t + 1)}
    return delta_step(**{**given, **case.constants(), **more})


def test_value_heads_share_key_heads():
    """Case 3: as with q and k repeated explicitly."""
    case = delta_step_case(key_heads=2, value_heads=4, taps=None)
    wanted = [case.state(3), case.state(3)]
    for t in range(3):
        given = case.tokens(t, t + 1)
        repeated = {name: given[name].repeat_interleave(2, dim=2) for name in ("q", "k")}
        outputs = [step(case, t, wanted[0]), step(case, t, wanted[1], **repeated)]
        assert torch.equal(*outputs)
    assert torch.equal(*wanted)


def test_queries_and_keys_of_zeros():
    """Case 8."""
    case = delta_step_case(taps=None)
    zero = torch.zeros_like(case.tokens(0, 1)["q"])
    state = torch.ones_like(case.state(3))
    assert step(case, 4, state, q=zero, k=zero).isfinite().all()
    assert state.isfinite().all()


def test_rejected_drafts_leave_no_trace():
    """Case 17: draft 3 tokens, accept 1."""
    case = delta_step_case(tokens=8)
    _, states = delta_oracle(case)
    conv, state = case.conv(3, tokens=4), case.state(3)
    accepted, drafts = case.projected[:, :1], torch.randn(3, 3, case.projected.shape[2], dtype=F64)
    given = case.views(torch.cat((accepted, drafts), dim=1))
    ones = torch.ones(3, dtype=torch.int64)
    delta_step(**given, **case.constants(), state=state, conv=conv, position=0 * ones, commit=ones)
    torch.testing.assert_close(state, states[1], rtol=0, atol=1e-12)
    # What was rejected is in no ring either: the next tokens see the right past.
    for t in (1, 2, 3, 4, 5):
        step(case, t, state, conv)
    torch.testing.assert_close(state, states[6], rtol=0, atol=1e-12)


def test_commit_of_none_writes_nothing():
    case = delta_step_case()
    conv, state = case.conv(3), torch.ones_like(case.state(3))
    before = state.clone()
    step(case, 2, state, conv, commit=torch.zeros(3, dtype=torch.int32))
    assert torch.equal(state, before)
    assert conv.inputs.isnan().all()


def test_a_slot_is_used_again_without_clearing():
    """The row at position 0 starts from zero, the others go on."""
    case = delta_step_case(batch=1)
    wanted, _ = delta_oracle(case)
    conv, state = case.conv(1), case.state(1)
    for _ in range(2):
        found = torch.cat([step(case, t, state, conv) for t in range(6)], dim=1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_rows_join_and_leave():
    """Rows of different age, in changing places of a batch, follow their own sequences."""
    case = delta_step_case(batch=3, tokens=5)
    wanted, _ = delta_oracle(case)
    conv, state = case.conv(4), case.state(4)
    age, home = [0, 0, 0], [2, 0, 3]
    for batch in ([0], [0, 1], [1, 0, 2], [2, 1], [2, 0], [1, 2]):
        t = torch.tensor([age[row] for row in batch])
        given = case.views(torch.stack([case.projected[row, age[row] : age[row] + 1] for row in batch]))
        slots = torch.tensor([home[row] for row in batch], dtype=torch.int32)
        out = delta_step(**given, **case.constants(), state=state, conv=conv, position=t, slots=slots)
        for place, row in enumerate(batch):
            torch.testing.assert_close(out[place, 0], wanted[row, age[row]], rtol=0, atol=1e-12)
            age[row] += 1
    assert state[1].isnan().all()


@pytest.mark.parametrize("length", [1, 2, 3, 5], ids="prompt{}".format)
def test_after_a_prefill(length):
    """`store_inputs` leaves the ring as steps over the prompt would have."""
    case = delta_step_case(batch=2, tokens=6)
    wanted, states = delta_oracle(case)
    raw = torch.cat([case.tokens(0, 6)[name].flatten(2) for name in ("q", "k", "v")], dim=2)
    conv, state = case.conv(3), case.state(3)
    slots, ages = torch.tensor([2, 0]), torch.full((2,), length)
    last = torch.nn.functional.pad(raw, (0, 0, 3, 0), value=torch.nan)[:, length : length + 3]
    store_inputs(conv, last, ages, slots)
    state[slots] = states[length]
    out = step(case, length, state, conv, slots=slots)
    torch.testing.assert_close(out, wanted[:, length : length + 1], rtol=0, atol=1e-12)


def test_stochastic_rounding_keeps_the_mean():
    """4096 slots of one and the same row: each gets a neighbour of the true value, on average that value."""
    draws = 4096
    case = delta_step_case(batch=1, tokens=1, taps=None).to(torch.float32)
    case.projected = case.projected.expand(draws, -1, -1)
    start = (torch.rand(4, 16, 8) + 0.5).to(torch.bfloat16).expand(draws, -1, -1, -1)
    truth, state = start.float(), start.clone()
    at = torch.ones(draws, dtype=torch.int64)
    step(case, 0, truth, position=at)
    step(case, 0, state, position=at, rounding_seed=torch.tensor([5]))
    # Neighbours are 2^-7 of the number apart, at most.
    unit = truth[0].double().abs() * 2**-7
    error = state.double() - truth[0].double()
    assert (error.abs() <= unit).all()
    # A draw's deviation is at most half of that; 6 deviations of the mean.
    assert (error.mean(0).abs() <= 6 * 0.5 * unit / draws**0.5).all()
    # To the nearest, the mean is off by as much as any draw is.
    nearest = truth[0].to(torch.bfloat16).double() - truth[0].double()
    assert error.mean(0).abs().sum() < 0.1 * nearest.abs().sum()


def test_a_seed_gives_the_same_bits_again():
    case = delta_step_case(taps=None).to(torch.float32)
    states = [torch.ones_like(case.state(3)).to(torch.bfloat16) for _ in range(3)]
    for state, seed in zip(states, (7, 7, 8), strict=True):
        step(case, 1, state, rounding_seed=torch.tensor([seed], dtype=torch.int32))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_a_pool_holds_its_bytes():
    """Case 5: K 64, V 128."""
    assert allocate_state(3, 4, 64, 128).nbytes == 3 * 4 * 64 * 128 * 4
    assert allocate_state(3, 4, 64, 128, dtype=torch.bfloat16).nbytes == 3 * 4 * 64 * 128 * 2


def test_a_ring_copies_the_filter_channel_by_channel():
    weight, bias = torch.randn(6, 1, 4), torch.randn(6)
    conv = ConvState.allocate(weight, bias, 5, tokens=3, dtype=torch.bfloat16)
    assert torch.equal(conv.weight, weight.squeeze(1))
    assert conv.weight.stride() == (1, 6)
    assert conv.inputs.shape == (5, 6, 6)
    assert conv.inputs.dtype == torch.bfloat16
    with pytest.raises(InvalidInput, match="7 inputs do not fit"):
        store_inputs(conv, torch.zeros(1, 7, 6), torch.tensor([7]))


def test_what_is_refused():
    case = delta_step_case(tokens=2)
    for change, word in (
        ({"k": torch.zeros(3, 1, 2, 15, dtype=F64)}, "k has shape"),
        ({"v": torch.zeros(3, 1, 3, 8, dtype=F64)}, "HV = 3"),
        ({"q": torch.zeros(3, 1, 2, 16)}, "share a dtype"),
        ({"q": torch.zeros(3, 2, 16)}, "four axes|axes"),
        ({"state": torch.zeros(3, 4, 8, 16, dtype=F64)}, r"\[slots, 4, 16, 8\]"),
        ({"state": torch.zeros(3, 4, 32, 16, dtype=F64)[:, :, ::2, ::2]}, "neighbours in memory"),
        ({"state": torch.zeros(2, 4, 16, 8, dtype=F64)}, "2 slots for B = 3"),
        ({"position": None}, "position"),
        ({"position": torch.zeros(3)}, "int32 or int64"),
        ({"position": torch.tensor(5).expand(3)}, "position has shape .* make it contiguous"),
        ({"norm_weight": torch.ones(16, dtype=F64)[::2]}, "norm_weight has shape .* make it contiguous"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots"),
        ({"commit": torch.zeros(3, 1, dtype=torch.int32)}, "commit"),
        ({"dt_bias": torch.zeros(4, 16)}, "dt_bias has shape"),
        ({"a": None}, "no `a`"),
        ({"A_log": None}, "without A_log"),
        ({"gate": torch.zeros(3, 1, 4, 16, dtype=F64)[..., ::2]}, "gate has strides"),
        ({"gate_activation": "tanh"}, "tanh"),
        ({"rounding_seed": torch.tensor([1])}, "rounds a bf16 state"),
        ({"impl": "magic"}, "magic"),
    ):
        with pytest.raises(InvalidInput, match=word):
            step(case, 0, **{"state": case.state(3), "conv": case.conv(3), **change})
    conv = case.conv(3)
    two = {**case.tokens(0, 2), "position": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(InvalidInput, match="needs 5"):
        delta_step(**two, **case.constants(), state=case.state(3), conv=conv)
    with pytest.raises(InvalidInput, match=r"conv\.weight"):
        step(case, 0, case.state(3), ConvState(conv.weight[:-1], None, conv.inputs))
    with pytest.raises(InvalidInput, match=r"conv\.inputs has dtype"):
        step(case, 0, case.state(3), ConvState(conv.weight, None, conv.inputs.float()))


def test_which_implementation_runs():
    assert select_impl("cpu", torch.float32).name == "reference"
    assert why_not("reference", "cpu", F64) is None
    assert "fp64" in why_not("triton", "cuda", F64)
    case = delta_step_case()
    with pytest.raises(KernelUnavailable, match="fp64"):
        step(case, 0, case.state(3), case.conv(3), impl="triton")
