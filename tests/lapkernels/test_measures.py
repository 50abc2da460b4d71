"""The measures that the other tests rest on: what must not pass does not."""

import math

import pytest
import torch

from lapkernels.testing import assert_as_precise, relative_error


def test_relative_error_is_the_largest_difference_by_the_largest_entry():
    truth = torch.tensor([[1.0, -4.0], [2.0, 0.0]])
    assert relative_error(truth + torch.tensor([[0.0, 0.0], [0.0, 2.0]]), truth) == 0.5
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_what_broadcasts_is_no_match():
    with pytest.raises(AssertionError, match=r"shape \[1, 3\], not \[2, 3\]"):
        relative_error(torch.ones(1, 3), torch.ones(2, 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_one_entry_that_is_not_finite_passes_no_bound(bad):
    spoilt = torch.ones(3)
    spoilt[1] = bad
    assert not relative_error(spoilt, torch.ones(3)) < math.inf
    assert not relative_error(torch.ones(3), spoilt) < math.inf
    # Not even where the truth has the same.
    assert not relative_error(spoilt, spoilt) < math.inf
    with pytest.raises(AssertionError, match="x is not finite"):
        assert_as_precise({"x": spoilt}, {"x": torch.ones(3)}, {"x": torch.ones(3)}, torch.float32)


def test_one_entry_that_is_off_is_seen_among_many_and_so_are_many_that_are_a_little():
    truth = torch.linspace(-1, 1, 10001, dtype=torch.float64)
    yardstick = truth.float()
    one, many = truth.clone(), truth + 1.3e-7
    one[77] += 1e-6
    assert_as_precise({"x": yardstick}, {"x": truth}, {"x": yardstick}, torch.float32)
    with pytest.raises(AssertionError, match="x: largest error"):
        assert_as_precise({"x": one}, {"x": truth}, {"x": yardstick}, torch.float32)
    with pytest.raises(AssertionError, match="x: rms error"):
        assert_as_precise({"x": many}, {"x": truth}, {"x": yardstick}, torch.float32)
