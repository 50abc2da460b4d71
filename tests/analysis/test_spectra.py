"""Effective rank, condition numbers and the bounds, against closed forms and plain SVDs."""

import math

import pytest
import torch

from lapcli.analysis.results import bound_of
from lapcli.analysis.spectra import key_bound, pearson, spectrum, spectrum_floor

RANDOM = torch.Generator().manual_seed(7)


def with_values(values, rows, columns):
    """A matrix `[rows, columns]` with these singular values, fp64."""
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=RANDOM)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64, generator=RANDOM)).Q
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.mT


def test_the_worked_example():
    # er = 1 + 1e-4, u = er / 2, kappa = 1 / 0.01; the bound says no more than 1 / sqrt(0.50005) = 1.4141 of it.
    found = spectrum(torch.diag(torch.tensor([1.0, 0.01], dtype=torch.float64)))
    assert found.effective_rank.item() == pytest.approx(1.0001, abs=1e-15)
    assert found.utilisation.item() == pytest.approx(0.50005, abs=1e-15)
    assert found.kappa.item() == pytest.approx(100.0, rel=1e-10)
    assert found.normalised.tolist() == pytest.approx([1.0, 0.01], rel=1e-10)
    assert not found.floored


@pytest.mark.parametrize(
    ("state", "rank", "kappa"),
    [
        (torch.eye(5), 5.0, 1.0),
        (torch.ones(4, 6), 1.0, math.inf),
        (torch.diag(torch.tensor([3.0, 3.0, 0.0])), 2.0, math.inf),
        (torch.tensor([[2.0]]), 1.0, 1.0),
        (torch.zeros(3, 4), 0.0, math.inf),
    ],
    ids=["orthogonal", "rank-one", "two-of-three", "one-number", "zeros"],
)
def test_closed_forms(state, rank, kappa):
    found = spectrum(state)
    assert found.effective_rank.item() == pytest.approx(rank, rel=1e-12)
    assert found.utilisation.item() == pytest.approx(rank / min(state.shape), rel=1e-12)
    # What cannot be told from rounding is a lower limit, and said to be one.
    assert found.floored.item() == math.isinf(kappa)
    wanted = 1 / spectrum_floor(state) if math.isinf(kappa) else kappa
    assert found.kappa.item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 20), (20, 8), (64, 64)], ids=str)
def test_as_precise_as_an_svd_down_to_the_floor(rows, columns):
    small = min(rows, columns)
    states = torch.stack([with_values(torch.logspace(0, -low, small).tolist(), rows, columns) for low in (1, 3, 5, 9)])
    found, values = spectrum(states), torch.linalg.svdvals(states)
    assert torch.allclose(found.effective_rank, (values**2).sum(-1) / values[:, 0] ** 2, rtol=1e-12)
    assert found.floored.tolist() == (values[:, -1] < spectrum_floor(states) * values[:, 0]).tolist()
    assert found.floored.tolist()[-1]
    told = values > spectrum_floor(states) * values[:, :1]
    assert torch.allclose(found.squares.sqrt()[told], values[told], rtol=1e-3)


def test_scale_and_orientation_change_no_rank():
    state = torch.randn(3, 6, 9, generator=RANDOM)
    one = spectrum(state)
    for other in (spectrum(state * 2.0**40), spectrum(state * 2.0**-40), spectrum(state.mT)):
        assert torch.allclose(one.effective_rank, other.effective_rank, rtol=1e-12)
        assert torch.allclose(one.kappa, other.kappa, rtol=1e-9)


@pytest.mark.parametrize("shape", [(6, 6), (6, 11), (11, 6)], ids=str)
def test_the_bounds_hold_of_random_states(shape):
    # Decaying states of up to 40 tokens, keys of very different lengths.
    keys = torch.randn(50, shape[0], 40, dtype=torch.float64, generator=RANDOM)
    keys *= torch.logspace(0, -4, shape[0], dtype=torch.float64)[:, None]
    values = torch.randn(50, shape[1], 40, dtype=torch.float64, generator=RANDOM) * torch.linspace(0, 1, 40)
    state = keys @ values.mT
    found = spectrum(state)
    readout = found.kappa * found.utilisation.sqrt()
    assert bound_of(readout).share == 1.0
    bound = key_bound(state[:, None], found.effective_rank[:, None], (keys @ keys.mT)[:, None])
    judged = bound_of(bound.margin)
    assert judged.states == 50
    assert judged.share == 1.0
    assert judged.margin >= 1.0


def test_the_key_bound_is_what_the_paper_defines():
    # Two value heads of one key head. nu(V) is the rank of V's part in the keys' row space, got here by a projection.
    keys = torch.randn(1, 5, 12, dtype=torch.float64, generator=RANDOM)
    values = torch.randn(2, 7, 12, dtype=torch.float64, generator=RANDOM)
    state = keys @ values.mT
    rank = spectrum(state).effective_rank
    bound = key_bound(state, rank, keys @ keys.mT)
    projected = values @ torch.linalg.pinv(keys) @ keys
    sigma, key_sigma = torch.linalg.svdvals(projected), torch.linalg.svdvals(keys)
    nu, kappa = (sigma**2).sum(-1) / sigma[:, 0] ** 2, key_sigma[:, 0] / key_sigma[:, -1]
    assert torch.allclose(bound.kappa, kappa, rtol=1e-9)
    assert torch.allclose(bound.margin, rank * kappa**2 / nu, rtol=1e-9)


def test_it_is_tight_for_orthogonal_keys_and_presumes_keys_that_span():
    keys, values = torch.eye(4, dtype=torch.float64), with_values([3.0, 2.0, 1.0, 0.5], 4, 6)
    rank = spectrum(values).effective_rank
    assert key_bound(values[None], rank[None], keys[None]).margin.item() == pytest.approx(1.0, rel=1e-12)
    few = key_bound(values[None], rank[None], torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])).double()[None])
    assert few.kappa.item() == math.inf
    assert few.margin.isnan().all()
    assert bound_of(few.margin).share is None


def test_a_missed_bound_is_seen():
    judged = bound_of(torch.tensor([2.0, 1.0, 1 - 1e-9, 0.99, torch.nan]))
    assert (judged.states, judged.share) == (4, 0.75)
    assert judged.margin == pytest.approx(0.99)


def test_pearson_of_a_constructed_case():
    x = torch.tensor([1.0, 2.0, 3.0])
    # Deviations (-1, 0, 1) and (-1, 1, 0): 1 / (sqrt 2 sqrt 2).
    assert pearson(x, torch.tensor([1.0, 3.0, 2.0])) == pytest.approx(0.5)
    assert pearson(x, 7 - 2 * x) == pytest.approx(-1.0)
    assert pearson(x, 7 + 2 * x) == pytest.approx(1.0)
    assert pearson(x, torch.full((3,), 0.1)) is None
    assert pearson(x[:1], x[:1]) is None
