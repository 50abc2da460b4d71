import math
import random

import pytest

from lapcli.evaluation.estimates import accuracy, bits, gap, jackknife, mean, perplexity


def test_mean_has_the_textbook_standard_error():
    found = mean([1.0, 0.0, 1.0, 1.0])
    assert found.value == 0.75
    # sample variance 0.25, over 4 items
    assert found.stderr == pytest.approx(0.25)
    assert math.fsum(found.influences) == pytest.approx(0, abs=1e-15)


def test_perplexity_golden():
    # Two items of 2 and 4 words with log-likelihoods -2 and -10: exp(12 / 6).
    found = perplexity([-2.0, -10.0], [2, 4])
    assert found.value == pytest.approx(math.exp(2))
    # Residuals a - r b of the rate r = -2 are 2 and -2; over the total weight, times the perplexity, n / (n - 1) = 2.
    assert found.influences == pytest.approx((-math.exp(2) * 2 / 6, math.exp(2) * 2 / 6))
    assert found.stderr == pytest.approx(math.sqrt(2 * 2 * (math.exp(2) / 3) ** 2))


def test_bits_per_byte_golden():
    assert bits([-8 * math.log(2)], [4]).value == pytest.approx(2.0)
    assert bits([-8 * math.log(2)], [4]).stderr is None


def test_a_perplexity_beyond_floats_is_infinite_and_has_no_error():
    found = perplexity([-800.0, -900.0], [1, 1])
    assert found.value == math.inf
    assert found.stderr is None


def test_delta_method_agrees_with_the_jackknife():
    rng = random.Random(3)
    weights = [rng.randint(20, 60) for _ in range(150)]
    values = [-weight * rng.gauss(3.0, 0.4) for weight in weights]
    delta = perplexity(values, weights)
    pairs = list(zip(values, weights, strict=True))
    other = jackknife(pairs, lambda items: math.exp(-sum(a for a, _ in items) / sum(b for _, b in items)))
    assert other.value == pytest.approx(delta.value)
    # Both are first order; they differ in the second, about 1 / n.
    assert other.stderr == pytest.approx(delta.stderr, rel=2 / 150 * 3)


def test_jackknife_of_a_mean_is_the_mean():
    values = [0.5, 2.0, 1.0, 7.0]
    found = jackknife(values, lambda items: sum(items) / len(items))
    assert found.stderr == pytest.approx(mean(values).stderr)
    assert found.influences == pytest.approx(mean(values).influences)


def test_jackknife_takes_blocks_of_many_items():
    calls = []
    values = [float(index % 7) for index in range(5000)]

    def centre(items):
        calls.append(len(items))
        return sum(items) / len(items)

    found = jackknife(values, centre)
    assert len(calls) == 201
    assert set(calls[1:]) == {4975}
    assert found.n == 5000


def test_accuracy_is_wilsons():
    found = accuracy([True] * 10)
    assert found.value == 1.0
    # Wilson 1927: 10 of 10 gives [0.7225, 1] at 95 %.
    assert found.interval == pytest.approx((0.7225, 1.0), abs=5e-5)
    # At one standard deviation the interval is [1 - 1 / 11, 1].
    assert found.stderr == pytest.approx(1 / 22)
    many = accuracy([True] * 500 + [False] * 500)
    assert many.stderr == pytest.approx(math.sqrt(0.25 / 1000), rel=1e-3)


def test_paired_accuracies_count_only_what_changed():
    base = accuracy([True] * 60 + [False] * 40)
    other = accuracy([True] * 55 + [False] * 5 + [True] * 10 + [False] * 30)
    found = gap(base, other)
    assert found.paired
    assert found.value == pytest.approx(0.05)
    # Agresti and Min 2005: 10 gained, 5 lost, half a count added to each of the four cells.
    assert found.stderr == pytest.approx(math.sqrt(16 - 25 / 102) / 102)
    assert gap(base, base).stderr == pytest.approx(1 / 102)


def test_pairing_removes_what_both_find_hard():
    rng = random.Random(11)
    hard = [rng.gauss(-3, 1) for _ in range(400)]
    base = perplexity([value * 50 for value in hard], [50] * 400)
    other = perplexity([(value + rng.gauss(-0.1, 0.02)) * 50 for value in hard], [50] * 400)
    found = gap(base, other)
    assert found.paired
    assert found.stderr is not None
    assert base.stderr is not None
    assert other.stderr is not None
    # Nearly a constant factor of 1.1: its error is 0.1 of the base's, not that of two independent numbers.
    assert found.stderr < 0.2 * math.hypot(base.stderr, other.stderr)


def test_paired_error_is_that_of_repeated_draws():
    """The spread of the difference over fresh sets of items is what the standard error claims."""
    rng = random.Random(5)

    def draw():
        left, right = [], []
        for _ in range(60):
            common = rng.gauss(-3, 0.5)
            left.append(20 * common)
            right.append(20 * (common + rng.gauss(-0.2, 0.2)))
        return gap(perplexity(left, [20] * 60), perplexity(right, [20] * 60))

    draws = [draw() for _ in range(400)]
    centre = sum(found.value for found in draws) / 400
    spread = math.sqrt(sum((found.value - centre) ** 2 for found in draws) / 399)
    claimed = sum(found.stderr or 0 for found in draws) / 400
    # The spread of 400 draws is itself known to 1 / sqrt(800) = 3.5 %; four of those.
    assert claimed == pytest.approx(spread, rel=0.14)


def test_unlike_items_are_not_paired():
    found = gap(mean([1.0, 2.0, 3.0]), mean([1.0, 2.0, 3.0, 4.0]))
    assert not found.paired
    assert found.stderr == pytest.approx(math.hypot(1 / math.sqrt(3), math.sqrt(5 / 3 / 4)))
