"""The Gram form and the QR form, against each other and against definitions computed from the matrix itself."""

from itertools import combinations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.benchmarks.selection import kahan, kahan_blocks
from lapcli.selectors import strong_rrqr
from lapcli.selectors.lapack import EPS, pivoted_cholesky
from lapcli.selectors.strong_rrqr import bounds_of, strong_rrqr_gram
from lapcli.selectors.strong_rrqr_qr import stack_triangles, strong_rrqr_qr

F = 1.5
FORMS = {
    "gram": lambda matrix, k, f=F: strong_rrqr_gram(matrix.T @ matrix, k, f),
    "qr": lambda matrix, k, f=F: strong_rrqr_qr(matrix, k, f),
}
KAHAN = [(64, 0.1, 19, 48), (128, 0.1, 19, 56), (192, 0.06, 35, 99), (256, 0.05, 43, 125)]

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def gaussian(rows, n, seed):
    return np.random.default_rng(seed).standard_normal((rows, n))


def graded(rows, n, seed, smallest):
    """Singular values from 1 down to `smallest`, in a random basis."""
    left, right = (np.linalg.qr(gaussian(size, n, seed + at))[0] for at, size in enumerate((rows, n)))
    return left * np.geomspace(1, smallest, n) @ right.T


def largest_rho(matrix, kept):
    """rho by its definition, through the pseudo-inverse: shares nothing with either form."""
    rest = np.setdiff1d(np.arange(matrix.shape[1]), kept)
    inverse = np.linalg.pinv(matrix[:, kept])
    coupling = inverse @ matrix[:, rest]
    over = np.linalg.norm(matrix[:, rest] - matrix[:, kept] @ coupling, axis=0)
    return np.hypot(coupling, np.outer(np.linalg.norm(inverse, axis=1), over)).max()


def gram_error(matrix, kept):
    """Relative error that an fp64 Gram matrix leaves in rho: its condition number times eps, n for the sums."""
    return 10 * matrix.shape[1] * EPS * np.linalg.cond(matrix[:, kept]) ** 2


# What is asked for holds on return


@settings(deadline=None, max_examples=60)
@given(n=st.integers(2, 24), seed=seeds, f=st.sampled_from([1.0, 1.01, 1.5, 3.0]), data=st.data())
def test_rho_is_at_most_f_and_is_what_the_definition_says(n, seed, f, data):
    k = data.draw(st.integers(1, n - 1))
    matrix = np.abs(gaussian(3 * n, n, seed))  # a common mean makes columns alike, so that exchanges happen
    for chosen in (FORMS["gram"](matrix, k, f), FORMS["qr"](matrix, k, f)):
        assert chosen.rho <= f * (1 + n * EPS)
        assert chosen.rho == pytest.approx(largest_rho(matrix, chosen.kept), rel=gram_error(matrix, chosen.kept))
        assert chosen.rank == n
        assert len(set(chosen.kept)) == k
        assert (np.diff(chosen.kept) > 0).all()
        assert chosen.bounds.holds


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 24), seed=seeds, f=st.sampled_from([1.01, 1.5]), data=st.data())
def test_both_forms_agree_on_well_conditioned_matrices(n, seed, f, data):
    k = data.draw(st.integers(1, n))
    matrix = np.abs(gaussian(3 * n, n, seed))
    gram, qr = FORMS["gram"](matrix, k, f), FORMS["qr"](matrix, k, f)
    np.testing.assert_array_equal(gram.kept, qr.kept)
    assert gram.swaps == qr.swaps
    accuracy = gram_error(matrix, np.arange(n))
    assert gram.rho == pytest.approx(qr.rho, rel=accuracy)
    np.testing.assert_allclose(gram.scores, qr.scores, rtol=accuracy)
    np.testing.assert_allclose(gram.bounds[:8], qr.bounds[:8], rtol=accuracy, atol=1e-12)


def test_the_bounds_are_the_singular_values_of_the_matrix(form):
    matrix = graded(200, 40, 0, 1e-3)
    chosen = form(matrix, 15)
    rest = np.setdiff1d(np.arange(40), chosen.kept)
    basis = np.linalg.qr(matrix[:, chosen.kept])[0]
    over = matrix[:, rest] - basis @ (basis.T @ matrix[:, rest])
    whole, kept = np.linalg.svd(matrix)[1], np.linalg.svd(matrix[:, chosen.kept])[1]
    c = np.sqrt(1 + F**2 * 15 * 25)
    expected = (
        c,
        kept[-1],
        kept[0],
        whole[14] / c,
        np.linalg.norm(over, 2),
        c * whole[15],
        kept[0] / kept[-1],
        c * whole[0] / whole[14],
        True,
    )
    # The Gram matrix squares the condition number of 1e3.
    np.testing.assert_allclose(np.array(chosen.bounds, float), expected, rtol=40 * EPS * 1e6)


def test_scores_are_distances_from_the_span_of_the_kept(form):
    matrix = gaussian(60, 12, 3)
    chosen = form(matrix, 5)
    for column in range(12):
        others = matrix[:, np.setdiff1d(chosen.kept, [column])]
        solution = np.linalg.lstsq(others, matrix[:, column], rcond=None)[0]
        distance = np.linalg.norm(matrix[:, column] - others @ solution)
        assert chosen.scores[column] == pytest.approx(distance, rel=1e-12)


def test_a_violated_bound_is_reported():
    whole = np.array([4.0, 2.0, 1.0])
    assert bounds_of(whole, np.array([3.0, 1.5]), 1.0, 1.2, F).holds
    assert not bounds_of(whole, np.array([3.0, 0.5]), 1.0, 1.2, F).holds  # c = 2.35: sigma_2 must reach 0.85
    assert not bounds_of(whole, np.array([3.0, 1.5]), 2.5, 1.2, F).holds  # ||C|| may be 2.35
    assert not bounds_of(whole, np.array([3.0, 1.5]), 1.0, 1.6, F).holds
    assert not bounds_of(whole, np.array([1.6, 1.5]), 1.0, 1.2, F).holds  # sigma_1 must reach 1.70


# Optimality


@settings(deadline=None, max_examples=25)
@given(seed=seeds, k=st.integers(1, 7), f=st.sampled_from([1.0, 1.5]))
def test_volume_against_every_subset_of_eight_columns(seed, k, f):
    matrix = np.abs(gaussian(16, 8, seed))
    gram = matrix.T @ matrix
    chosen = set(strong_rrqr_gram(gram, k, f).kept.tolist())
    volume = {subset: np.sqrt(np.linalg.det(gram[np.ix_(subset, subset)])) for subset in combinations(range(8), k)}
    own = volume[tuple(sorted(chosen))]
    neighbours = [volume[subset] for subset in volume if len(chosen & set(subset)) == k - 1]
    accuracy = 1 + gram_error(matrix, np.arange(8))
    assert max(neighbours) <= f * own * accuracy  # no exchange gains more than f
    # prod sigma_i(A) >= prod sigma_i(M) / c^k, and no subset's volume exceeds prod sigma_i(M).
    assert max(volume.values()) <= np.sqrt(1 + f * f * k * (8 - k)) ** k * own * accuracy


def test_one_exchange_multiplies_the_volume_by_rho():
    gram = kahan(64, 0.1).T @ kahan(64, 0.1)
    start = np.arange(40)
    chosen = strong_rrqr_gram(gram, 40).kept
    before, after = (np.linalg.slogdet(gram[np.ix_(kept, kept)])[1] / 2 for kept in (start, chosen))
    assert np.exp(after - before) == pytest.approx(largest_rho(kahan(64, 0.1), start), rel=1e-9)


# Closed forms


def test_orthogonal_columns_keep_the_longest(form):
    lengths = np.array([3.0, 1.0, 7.0, 2.0, 9.0, 4.0])
    chosen = form(np.linalg.qr(gaussian(20, 6, 1))[0] * lengths, 3)
    np.testing.assert_array_equal(chosen.kept, [2, 4, 5])
    assert chosen.rho == pytest.approx(3 / 4)
    np.testing.assert_allclose(chosen.scores, lengths)


def test_a_diagonal_matrix_keeps_its_largest_entries(form):
    diagonal = np.random.default_rng(0).permutation(np.arange(1.0, 33.0))
    np.testing.assert_array_equal(form(np.diag(diagonal), 10).kept, np.sort(np.argsort(diagonal)[-10:]))


def test_keeping_every_column_and_one(form):
    matrix = gaussian(30, 9, 2)
    everything = form(matrix, 9)
    np.testing.assert_array_equal(everything.kept, np.arange(9))
    assert (everything.rho, everything.bounds.c_norm, everything.bounds.holds) == (0, 0, True)
    longest = np.linalg.norm(matrix, axis=0).argmax()
    np.testing.assert_array_equal(form(matrix, 1).kept, [longest])


# Matrices that pivoted QR gets wrong


@pytest.mark.parametrize(("n", "c", "first_rho", "first_sigma"), KAHAN)
def test_kahan_violates_before_and_holds_after_one_exchange(n, c, first_rho, first_sigma):
    matrix = kahan(n, c)
    gram = matrix.T @ matrix
    order = pivoted_cholesky(gram, 0.0)[1]
    np.testing.assert_array_equal(order, np.arange(n))
    np.testing.assert_array_equal(scipy.linalg.qr(matrix, mode="r", pivoting=True)[1], np.arange(n))

    whole = np.linalg.svd(matrix, compute_uv=False)
    violates_rho, violates_sigma = [], []
    # All k of the smaller ones; of the larger ones every fourth, and both sides of where it begins to be wrong.
    edges = {first_rho - 1, first_rho, first_sigma - 1, first_sigma, n - 1}
    ks = sorted({*range(1, n, 1 if n <= 128 else 4), *edges})
    for k in ks:
        leading = matrix[:k, :k]
        inverse = scipy.linalg.solve_triangular(leading, np.eye(k))
        coupling = inverse @ matrix[:k, k:]
        over = np.linalg.norm(matrix[k:, k:], axis=0)
        if np.hypot(coupling, np.outer(np.linalg.norm(inverse, axis=1), over)).max() > F:
            violates_rho.append(k)
        if k >= first_sigma - 1:  # it holds for the few columns before
            smallest = np.linalg.svd(leading, compute_uv=False)[-1]
            if smallest < whole[k - 1] / np.sqrt(1 + F**2 * k * (n - k)):
                violates_sigma.append(k)
        chosen = strong_rrqr_gram(gram, k, F, measure=k % 8 == 0)
        assert chosen.swaps == int(k >= first_rho)
        assert chosen.rho <= F
        assert chosen.bounds is None or chosen.bounds.holds
    assert violates_rho == [k for k in ks if k >= first_rho]
    assert violates_sigma == [k for k in ks if k >= first_sigma]


@pytest.mark.parametrize(("n", "c", "first_rho", "first_sigma"), KAHAN)
def test_kahan_keeps_the_same_set_from_gram_and_qr(n, c, first_rho, first_sigma):
    matrix = kahan(n, c)
    for k in (first_rho, n // 2, n - 1):
        gram, qr = FORMS["gram"](matrix, k), FORMS["qr"](matrix, k)
        np.testing.assert_array_equal(gram.kept, qr.kept)
        assert gram.swaps == qr.swaps == 1
        assert qr.bounds.holds


@pytest.mark.parametrize("k", [32, 64, 96, 120])
def test_blocks_need_an_exchange_each(k):
    matrix = kahan_blocks(8, 16, 0.5)
    gram, qr = FORMS["gram"](matrix, k), FORMS["qr"](matrix, k)
    np.testing.assert_array_equal(gram.kept, qr.kept)
    assert gram.swaps == qr.swaps == 8
    assert gram.rho <= F
    assert gram.rho == pytest.approx(largest_rho(matrix, gram.kept), rel=gram_error(matrix, gram.kept))
    assert gram.bounds.holds
    assert qr.bounds.holds


def test_many_exchanges_are_all_made():
    matrix = kahan_blocks(32, 8, 0.7)
    chosen = FORMS["gram"](matrix, 128)
    assert chosen.swaps == 32
    assert chosen.rho <= F
    assert chosen.bounds.holds


# Rounding


def hard_cases():
    copies = np.tile(gaussian(400, 16, 5), (1, 4))
    yield "kahan beyond fp64", kahan(128, 0.5), 96
    yield "kahan at the edge of a Gram matrix", kahan(256, 0.1), 255
    yield "hilbert", scipy.linalg.hilbert(40), 20
    yield "vandermonde", np.vander(np.linspace(0, 1, 100), 48), 24
    yield "four copies of all", copies, 16
    yield "four copies of all, more kept than there are", copies, 32
    yield "four near copies of all", copies * (1 - 1e-9 * np.arange(64)), 32
    yield "singular values down to 1e-14", graded(200, 96, 7, 1e-14), 64
    yield "columns down to 1e-12", gaussian(200, 96, 8) * np.geomspace(1, 1e-12, 96), 64
    yield "orthogonal and equal", scipy.linalg.hadamard(64).astype(float), 32
    yield "one direction", np.ones((40, 16)), 8


@pytest.mark.parametrize("f", [1.0, 1.5])
@pytest.mark.parametrize(("matrix", "k"), [pytest.param(*case, id=name) for name, *case in hard_cases()])
def test_it_ends_and_holds_where_rounding_decides(form, matrix, k, f):
    chosen = form(matrix, k, f)
    assert len(set(chosen.kept)) == k
    assert set(chosen.basis) <= set(chosen.kept)
    assert len(chosen.basis) == min(k, chosen.rank)
    if f > 1:
        assert chosen.rho <= f
        assert chosen.bounds.holds
    else:  # exchanges that gain less than the Gram matrix resolves in rho cannot be told from losses
        assert chosen.rho <= 1 + len(matrix.T) * EPS * chosen.bounds.kappa**2


def test_rounds_of_any_length_give_the_same_set(monkeypatch):
    matrix = kahan_blocks(8, 16, 0.5)
    sets = []
    for limit in (1, 3, 64):
        monkeypatch.setattr(strong_rrqr, "_EXCHANGES_PER_ROUND", limit)
        chosen = FORMS["gram"](matrix, 64)
        assert chosen.swaps == 8
        sets.append(chosen.kept.tolist())
    assert sets[0] == sets[1] == sets[2]


def test_a_tableau_that_drifts_is_caught(monkeypatch):
    exact = strong_rrqr._exchange
    random = np.random.default_rng(0)

    def drifting(table, i, j):
        done = exact(table, i, j)
        table += 0.3 * random.standard_normal(table.shape)
        return done

    monkeypatch.setattr(strong_rrqr, "_exchange", drifting)
    matrix = kahan_blocks(8, 16, 0.5)
    chosen = FORMS["gram"](matrix, 64)
    assert chosen.swaps >= 8
    assert largest_rho(matrix, chosen.kept) <= F
    assert chosen.rho == pytest.approx(largest_rho(matrix, chosen.kept), rel=gram_error(matrix, chosen.kept))


def test_an_exchange_that_cannot_be_made_ends_the_search(monkeypatch):
    monkeypatch.setattr(strong_rrqr, "_exchange", lambda table, i, j: False)
    chosen = FORMS["gram"](kahan(64, 0.1), 40)
    assert chosen.swaps == 0
    assert chosen.rho == pytest.approx(largest_rho(kahan(64, 0.1), np.arange(40)))
    assert not chosen.bounds.holds


# Zero, repeated and dependent columns, at any scale


@settings(deadline=None, max_examples=150)
@given(seed=seeds, n=st.integers(2, 24), scaled=st.booleans(), data=st.data())
def test_no_zero_or_repeated_column_is_kept_while_an_independent_one_is_left(seed, n, scaled, data):
    random = np.random.default_rng(seed)
    matrix = gaussian(int(random.integers(n, 100)), n, seed)
    if scaled:
        matrix *= 10 ** random.uniform(-8, 8, n)
    direction = np.arange(n)  # -1: none
    for _ in range(data.draw(st.integers(0, n // 2))):
        source, target = random.integers(0, n, 2)
        if random.random() < 0.3:
            matrix[:, target], direction[target] = 0, -1
        else:
            matrix[:, target], direction[target] = matrix[:, source], direction[source]
    k = data.draw(st.integers(1, n))
    there = set(direction[direction >= 0].tolist())
    for name, choose in FORMS.items():
        kept = direction[choose(matrix, k).kept]
        covered = set(kept[kept >= 0].tolist())
        assert len(covered) == min(k, len(there)), name


def test_rank_is_reported_and_the_bound_is_that_of_the_rank(form):
    matrix = gaussian(100, 6, 0) @ gaussian(6, 16, 1)
    chosen = form(matrix, 10)
    assert (chosen.rank, len(chosen.basis), len(chosen.kept)) == (6, 6, 10)
    assert chosen.rho <= F
    assert chosen.bounds.factor == pytest.approx(np.sqrt(1 + F**2 * 6 * 10))
    assert chosen.bounds.sigma_kept_min > 0.01 * chosen.bounds.sigma_kept_max
    assert chosen.bounds.holds


def test_the_rank_counts_pivots_above_n_eps_of_the_largest():
    for square, rank in ((0.9, 3), (1.1, 4)):
        gram = np.diag([1.0, 1.0, 1.0, 4 * EPS * square])
        assert strong_rrqr_gram(gram, 2).rank == rank


def test_beyond_the_rank_the_largest_residual_comes_first(form):
    # Columns: 1e8, a copy of it, two independent ones far below what the first resolves, a copy of the larger, zero.
    matrix = np.zeros((6, 6))
    matrix[0, 0] = matrix[0, 1] = 1e8
    matrix[1, 2], matrix[2, 3], matrix[2, 4] = 1e-8, 2e-8, 2e-8
    kept = [set(form(matrix, k).kept.tolist()) for k in range(1, 7)]
    assert kept[0] == {0}
    assert kept[1] in ({0, 3}, {0, 4})
    assert kept[2] == kept[1] | {2}
    assert kept[3] == kept[2] | {1}  # nothing independent is left: the longest
    assert kept[4] == {0, 1, 2, 3, 4}


def test_all_zero_keeps_the_first(form):
    chosen = form(np.zeros((20, 8)), 3)
    np.testing.assert_array_equal(chosen.kept, [0, 1, 2])
    assert (chosen.rank, chosen.swaps, chosen.rho, chosen.bounds.holds) == (0, 0, 0, True)


def test_fewer_rows_than_columns(form):
    chosen = form(gaussian(5, 12, 4), 8)
    assert (chosen.rank, len(chosen.kept)) == (5, 8)
    assert chosen.bounds.holds


# Invariance


@settings(deadline=None, max_examples=30)
@given(seed=seeds, n=st.integers(3, 16), data=st.data())
def test_permuting_columns_permutes_the_choice(seed, n, data):
    matrix = np.abs(gaussian(40, n, seed))
    k = data.draw(st.integers(1, n - 1))
    order = np.random.default_rng(seed).permutation(n)
    for choose in FORMS.values():
        np.testing.assert_array_equal(np.sort(order[choose(matrix[:, order], k).kept]), choose(matrix, k).kept)


@settings(deadline=None, max_examples=20)
@given(seed=seeds, cuts=st.lists(st.integers(0, 500), max_size=4))
def test_splitting_the_calibration_changes_nothing(seed, cuts):
    matrix = np.abs(gaussian(500, 24, seed))
    blocks = np.split(matrix, sorted(cuts))
    whole = strong_rrqr_gram(matrix.T @ matrix, 10)
    summed = strong_rrqr_gram(sum(block.T @ block for block in blocks), 10)
    np.testing.assert_array_equal(summed.kept, whole.kept)
    triangle = np.zeros((0, 24))
    for block in blocks:
        triangle = stack_triangles(triangle, block)
    np.testing.assert_array_equal(strong_rrqr_qr(triangle, 10).kept, whole.kept)


@pytest.mark.parametrize("scale", [2.0**-400, 2.0**400])
def test_scaling_everything_changes_nothing(form, scale):
    matrix = np.abs(gaussian(50, 16, 9))
    chosen, scaled = form(matrix, 6, 1.01), form(matrix * scale, 6, 1.01)
    np.testing.assert_array_equal(chosen.kept, scaled.kept)
    assert chosen.rho == scaled.rho


def test_qr_resolves_what_a_gram_matrix_cannot():
    matrix = np.linalg.qr(gaussian(100, 20, 1))[0] * np.geomspace(1, 1e-12, 20)
    assert FORMS["gram"](matrix, 8).rank < 20
    assert FORMS["qr"](matrix, 8).rank == 20


# Bad input


def test_what_is_no_gram_matrix_is_refused():
    good = gaussian(20, 5, 0).T @ gaussian(20, 5, 0)
    for value in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        bad[1, 2] = bad[2, 1] = value
        with pytest.raises(ValueError, match="NaN or infinite"):
            strong_rrqr_gram(bad, 2)
    bad = good.copy()
    bad[1, 2] += 1
    with pytest.raises(ValueError, match=r"not symmetric: \[1, 2\]"):
        strong_rrqr_gram(bad, 2)
    with pytest.raises(ValueError, match="negative diagonal"):
        strong_rrqr_gram(good - 100 * np.eye(5), 2)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        strong_rrqr_gram(np.array([[1.0, 2.0], [2.0, 1.0]]), 1)
    with pytest.raises(ValueError, match="square"):
        strong_rrqr_gram(np.ones((3, 2)), 1)


def test_asymmetry_of_rounding_is_averaged_out():
    gram = gaussian(200, 12, 0).T @ gaussian(200, 12, 0)
    noisy = gram + np.triu(gram, 1) * 1e-14
    assert (noisy != noisy.T).any()
    below, above = strong_rrqr_gram(noisy, 5), strong_rrqr_gram(noisy.T, 5)
    np.testing.assert_array_equal(below.scores, above.scores)


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        strong_rrqr_qr(np.array([[1.0, np.nan]]), 1)
    with pytest.raises(ValueError, match="takes a matrix"):
        strong_rrqr_qr(np.ones(4), 1)


@pytest.mark.parametrize("k", [0, 6])
def test_a_width_outside_the_columns_is_refused(form, k):
    with pytest.raises(ValueError, match=r"1\.\.5"):
        form(gaussian(9, 5, 0), k)


@pytest.mark.parametrize("f", [0.99, np.inf, np.nan])
def test_a_tolerance_below_one_is_refused(form, f):
    with pytest.raises(ValueError, match="tolerance"):
        form(gaussian(9, 5, 0), 2, f)
