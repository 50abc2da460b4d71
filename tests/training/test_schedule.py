"""The learning rate at the corners of its curve."""

from itertools import pairwise

import pytest

from lapcli.training.schedule import learning_rate_factor


def factors(steps, **shares):
    return [learning_rate_factor(step, steps, **shares) for step in range(steps)]


def test_rises_straight_and_falls_as_a_cosine():
    found = factors(100)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[-1] == pytest.approx(0.1, abs=1e-12)
    # Half of the 95 steps after the peak, half of the way down.
    assert (found[51] + found[52]) / 2 == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(found[4:]))


@pytest.mark.parametrize(
    ("steps", "wanted"), [(1, [1.0]), (2, [1.0, 0.1]), (3, [1.0, 0.55, 0.1])], ids=["one", "two", "three"]
)
def test_few_steps(steps, wanted):
    assert factors(steps) == pytest.approx(wanted)


def test_without_a_rise_the_first_step_is_at_the_peak():
    assert factors(3, warmup=0.0) == pytest.approx([1.0, 0.55, 0.1])


def test_a_rise_that_takes_all_steps():
    assert factors(4, warmup=1.0) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_constant_rate_and_one_that_ends_at_nothing():
    assert factors(5, warmup=0.0, floor=1.0) == [1.0] * 5
    assert factors(5, warmup=0.0, floor=0.0)[-1] == pytest.approx(0.0, abs=1e-12)


def test_whole_shares_are_not_rounded_up():
    for steps in range(20, 4001, 20):
        rising = steps // 20
        assert learning_rate_factor(rising - 1, steps) == 1.0
        assert learning_rate_factor(0, steps) == 1 / rising


@pytest.mark.parametrize(
    "arguments",
    [{"step": 5}, {"step": -1}, {"warmup": 1.1}, {"floor": -0.1}],
    ids=["after", "before", "warmup", "floor"],
)
def test_what_there_is_not(arguments):
    with pytest.raises(ValueError, match=r"step|warmup"):
        learning_rate_factor(**{"step": 0, "steps": 5, **arguments})
