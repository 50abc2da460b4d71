"""Lemma 3.1 and Theorem 3.2 of Q-Delta, checked in fp64 against states that another recurrence makes."""

import pytest
import torch

from lapcli.analysis.stability import rows_at_once, summary, track, track_layers
from lapcli.families.loading import load_model, resolve_model
from lapcli.models.mixer import RuleInputs
from lapcli.testing.models import tiny_gated_deltanet, tiny_qdelta
from lapkernels.testing import DeltaRuleInputs, delta_rule_inputs, relative_error, transition_recurrence

EXACT = 1e-12


def given(inputs: DeltaRuleInputs, **changes) -> RuleInputs:
    told = RuleInputs(
        inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g, inputs.lamb, None, False, None, None
    )  # fmt: skip
    return told._replace(**changes)


def states(inputs: DeltaRuleInputs, time: int):
    """Before each of the first tokens, and after the last of them; by transition matrices."""
    batch, _, heads, width = inputs.v.shape
    found = [torch.zeros(batch, heads, inputs.k.shape[3], width, dtype=torch.float64)]
    for t in range(time):
        found.append(transition_recurrence(inputs.time_slice(t, t + 1, found[-1]))[1])
    return found


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "plain"])
@pytest.mark.parametrize("gate", [0.5, None], ids=["gated", "ungated"])
def test_every_step_is_what_the_states_say(feedback, gate):
    time, heads = 25, 4
    inputs = delta_rule_inputs(time=time, value_heads=heads, gate=gate, feedback=feedback)
    found = track(given(inputs))
    before = states(inputs, time)
    q, k = (x.repeat_interleave(2, 2) for x in (inputs.q, inputs.k))
    x = k if inputs.lamb is None else k + inputs.lamb[..., None] * q
    decay = torch.ones_like(inputs.beta) if inputs.g is None else inputs.g.exp()
    read = [torch.einsum("bhkv,bhk->bhv", s, x[:, t - 1]) for t, s in enumerate(before) if t]
    for t in range(time):
        kept = decay[:, t, :, None, None] * before[t]
        prior = inputs.v[:, t] - torch.einsum("bhkv,bhk->bhv", kept, x[:, t])
        after = inputs.v[:, t] - read[t]
        assert relative_error(found.before[:, t], prior.norm(dim=-1)) < EXACT
        assert relative_error(found.after[:, t], after.norm(dim=-1)) < EXACT
        # Lemma 3.1, to rounding: the error shrinks by exactly that factor.
        factor = (1 - inputs.beta[:, t] * (k * x)[:, t].sum(-1)).abs()
        assert relative_error(found.after[:, t], factor * prior.norm(dim=-1)) < EXACT
        if t:
            drift = prior - (inputs.v[:, t - 1] - read[t - 1])
            assert relative_error(found.drift[:, t], drift.norm(dim=-1)) < EXACT
            value = inputs.v[:, t] - inputs.v[:, t - 1]
            assert relative_error(found.value_drift[:, t], value.norm(dim=-1)) < EXACT
            assert relative_error(found.prediction_drift[:, t], (value - drift).norm(dim=-1)) < EXACT
            readouts = [torch.einsum("bhkv,bhk->bhv", before[t], direction[:, t]) for direction in (q, k)]
            wanted = torch.nn.functional.cosine_similarity(*readouts, dim=-1)
            assert relative_error(found.cosine[:, t], wanted) < 1e-9
    assert found.drift[:, 0].isnan().all()
    assert float(found.lemma.max()) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_the_error_stays_below_the_bound(seed):
    """Theorem 3.2, for gates, strengths and feedback at random; and it is no bound of another kind of thing."""
    inputs = delta_rule_inputs(batch=4, time=80, value_heads=4, gate=0.5, feedback=True, seed=seed)
    inputs.beta.mul_(0.5).add_(0.5)
    found = track(given(inputs))
    held = ~found.bound.isnan()
    assert held[:, 1:].all()
    assert not held[:, 0].any()
    assert (found.after[held] <= found.bound[held]).all()
    told = summary({0: found.tensors()})
    assert told["bound_share"] == 1.0
    assert told["bound_count"] == held.sum()
    assert told["outside"] == 0.0
    # With a fifth of the drift it would not hold.
    assert (found.after[held] > found.bound[held] / 5).any()


def test_the_bound_is_reached_where_every_drift_is_alike():
    """One key, no decay, constant strength, values that move on evenly: the error grows as the theorem says."""
    time = 30
    one = torch.ones(1, time, 1, 1, dtype=torch.float64)
    v = torch.arange(time, dtype=torch.float64).view(1, time, 1, 1)
    told = RuleInputs(one, one, v, 0.4 * one[..., 0], None, None, None, False, None, None)
    found = track(told)
    # e_0 = 0 with v_0 = 0, and each step adds a drift of 1.
    wanted = 0.6 * (1 - 0.6 ** torch.arange(time, dtype=torch.float64)) / 0.4
    assert relative_error(found.after[0, :, 0], wanted) < EXACT
    assert relative_error(found.bound[0, 1:, 0], wanted[1:]) < EXACT


def test_beyond_two_there_is_no_bound():
    inputs = delta_rule_inputs(time=10, feedback=True)
    inputs.beta.mul_(0).add_(2.5)
    found = track(given(inputs))
    told = summary({0: found.tensors()})
    assert told["outside"] > 0
    assert told["rho"] > 1
    assert told["bound_count"] < 9 * 2 * 2
    assert float(found.lemma.max()) < 1e-9


@pytest.mark.parametrize("make", [tiny_qdelta, tiny_gated_deltanet], ids=["qdelta", "gated"])
def test_layers_of_a_model(make, tmp_path):
    """q and k are normalised where the model does, and nobody watches afterwards."""
    source = resolve_model(str(make(tmp_path / "m", num_v_heads=4)))
    model = load_model(source)
    ids = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    found = track_layers(model, ids)
    assert list(found) == [0, 1]
    for tracking in found.values():
        assert tracking.product.shape == (2, 20, 4)
        assert all(tensor.dtype == torch.float64 for tensor in tracking.tensors().values())
        assert 0 < tracking.product.min() < tracking.product.max() < 2
        held = ~tracking.bound.isnan()
        assert (tracking.after[held] <= tracking.bound[held]).all()
    assert all(not mixer.watched for mixer in model.mixers())
    assert rows_at_once(model, "cpu") == (1 << 20) // (4 * 32 * 32)
