"""The measures that the other tests rest on: what must not pass does not."""

import math

import pytest
import torch

from lapkernels.delta_step import delta_step
from lapkernels.testing import assert_as_precise, relative_error
from lapkernels.testing_steps import DELTA_CASES, delta_oracle, delta_step_case, delta_summands, follow


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


def test_what_cancels_may_err_by_its_summands():
    """1 that is left of 1000 may be off by the rounding of 1000; a name that is not given, by that of 1."""
    truth = {"x": torch.ones(100, dtype=torch.float64), "y": torch.ones(2, dtype=torch.float64)}
    exact, summands = {name: x.float() for name, x in truth.items()}, {"x": torch.ones(100)}
    summands["x"][3] = 1000
    off = {"x": exact["x"].clone(), "y": exact["y"]}
    off["x"][3] += 1e-4
    with pytest.raises(AssertionError, match="x: largest error"):
        assert_as_precise(off, truth, exact, torch.float32)
    assert_as_precise(off, truth, exact, torch.float32, summands=summands)
    off["x"][10:40] += 1e-4
    with pytest.raises(AssertionError, match="x: rms error"):
        assert_as_precise(off, truth, exact, torch.float32, summands=summands)
    with pytest.raises(AssertionError, match="y: largest error"):
        assert_as_precise({**exact, "y": exact["y"] + 1e-6}, truth, exact, torch.float32, summands=summands)
    with pytest.raises(AssertionError, match="y: summands of shape"):
        assert_as_precise(exact, truth, exact, torch.float32, summands={"y": torch.ones(3)})


@pytest.mark.parametrize("name", DELTA_CASES)
def test_summands_are_the_scale_of_errors(name):
    """Measured in them, a plain fp32 step errs about as much in every layer; measured in results, a thousand times."""
    case = delta_step_case(**{**DELTA_CASES[name], "batch": 20}).to(torch.float32)
    output, states = delta_oracle(case)
    found = follow(delta_step, case, "reference", torch.float32, False, 1, None)["output"]
    size = torch.maximum(delta_summands(case, states)["output"], output.abs())
    error = ((found - output) / size).square().mean().sqrt() / torch.finfo(torch.float32).eps
    # Each of six tokens is rounded: by half an eps at most, of numbers a few of which are as large as their root.
    assert 0.5 < error < 6**0.5
