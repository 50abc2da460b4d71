import numpy as np
import pytest

from lapcli.benchmarks.selection import (
    SelectionCase,
    activations,
    default_cases,
    kahan,
    kahan_blocks,
    refactoring_rrqr,
    selection_benchmark,
    tall,
)
from lapcli.selectors.strong_rrqr import strong_rrqr_gram


def toy(name, matrix, layers=2, heads=3, kept=8):
    return SelectionCase(name, layers, heads, matrix(0).shape[1], kept, matrix)


def test_toy_sizes_run_and_agree():
    easy = toy("easy", lambda head: activations(60, 16, head))
    hard = toy("hard", lambda head: tall(kahan_blocks(2, 8, 0.7), 40, head))
    rows = selection_benchmark([easy, hard], repeats=1, released_heads=4)
    assert [row.case for row in rows] == ["easy", "hard"]
    for row in rows:
        assert (row.heads, row.width, row.kept) == (6, 16, 8)
        assert row.same_sets == row.released_heads == 4
        assert row.ratio == pytest.approx(row.released_seconds / row.choose_seconds)
        assert row.ratio_with_bounds == pytest.approx(row.released_seconds / row.stage_seconds)
        assert row.ratio_fp32 == pytest.approx(row.released_fp32_seconds / row.choose_seconds)
        assert row.note == "released way timed on 4 of 6 heads and scaled up"
        assert row.gram_seconds > 0
    assert rows[0].swaps == 0
    assert rows[1].swaps == 6 * 2


def test_no_ratio_is_given_where_the_answers_differ(monkeypatch):
    monkeypatch.setattr(
        "lapcli.benchmarks.selection.refactoring_rrqr", lambda matrix, k, f, most=None: (np.arange(k), 0)
    )
    (row,) = selection_benchmark([toy("differs", lambda head: activations(60, 16, head))], repeats=1)
    assert row.same_sets < row.released_heads
    assert (row.ratio, row.ratio_with_bounds, row.ratio_fp32) == (None, None, None)
    assert row.note == "released way timed on every head"


@pytest.mark.parametrize("case", default_cases(rows=300), ids=lambda case: case.name)
def test_one_head_of_each_default_case_is_kept_alike(case):
    matrix = case.matrix(0)
    assert matrix.shape == (300, case.width)
    ours = strong_rrqr_gram(matrix.T @ matrix, case.kept, 1.5)
    theirs, swaps = refactoring_rrqr(matrix, case.kept, 1.5)
    np.testing.assert_array_equal(ours.kept, theirs)
    assert ours.swaps == swaps


def test_the_released_way_stops_where_it_gives_up():
    matrix = tall(kahan_blocks(4, 8, 0.7), 60, 0)
    assert refactoring_rrqr(matrix, 16, 1.5)[1] == 4
    assert refactoring_rrqr(matrix, 16, 1.5, 3)[1] == 3


def test_a_tall_matrix_has_the_gram_matrix_it_was_made_from():
    matrix = kahan(24, 0.3)
    made = tall(matrix, 100, 5)
    np.testing.assert_allclose(made.T @ made, matrix.T @ matrix, atol=1e-13)


def test_activations_are_conditioned_like_a_trained_heads():
    conditions = [np.linalg.cond(activations(2000, 64, seed)) for seed in range(4)]
    assert 5 < min(conditions) < max(conditions) < 80
