from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapcli.errors import UsageError
from lapcli.selectors.budget import default_align, kept_width, kept_width_from_keep


@pytest.mark.parametrize(
    ("width", "ratio", "kept"),
    [(128, "0.3", 89), (20, "0.8", 4), (10, "0.9", 1), (128, "0.5", 64), (256, "0.75", 64)],
)
def test_unaligned_widths_are_floored_from_the_decimal_that_was_typed(width, ratio, kept):
    assert kept_width(width, ratio, align=1).width == kept


@pytest.mark.parametrize(
    ("ratio", "kept"),
    [("0.2", 96), ("0.3", 80), ("0.4", 64), ("0.5", 64), ("0.6", 48), ("0.75", 32), ("0.9", 16)],
)
def test_default_alignment_of_128_channels(ratio, kept):
    assert kept_width(128, ratio).width == kept


@pytest.mark.parametrize(("width", "align"), [(16, 1), (31, 1), (32, 8), (63, 8), (64, 16), (256, 16)])
def test_default_alignment_follows_the_width(width, align):
    assert default_align(width) == align


def test_a_float_counts_as_the_decimal_it_prints_as():
    assert kept_width(10, 0.9, align=1) == kept_width(10, "0.9", align=1) == kept_width(10, Decimal("0.9"), align=1)


def test_what_became_of_the_ratio_is_said():
    budget = kept_width(128, "0.3")
    assert budget.achieved == pytest.approx(48 / 128)
    assert str(budget) == "80 of 128 channels kept (37.50% removed; 0.3 asked for, K' a multiple of 16)"
    assert str(kept_width(128, "0.5")) == "64 of 128 channels kept (50.00% removed)"


@given(
    width=st.integers(1, 512),
    ratio=st.decimals(min_value=0, max_value=1, places=3),
    align=st.integers(1, 64),
)
def test_the_rule_holds_or_the_ratio_is_refused(width, ratio, align):
    exact = width * (1 - Fraction(ratio))
    rule = max(align, align * (exact // align))
    refused = not 0 < ratio < 1 or align > width or exact < 1 or rule >= width
    if refused:
        with pytest.raises(UsageError):
            kept_width(width, ratio, align)
    else:
        budget = kept_width(width, ratio, align)
        assert budget.width == rule
        assert budget.width % align == 0
        assert 1 <= budget.width < width


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("50", "did you mean 0.5?"), ("50%", "did you mean 0.5?"), ("0,5", "did you mean 0.5?"), ("12.5", "0.125")],
)
def test_a_percentage_or_a_comma_is_answered_with_the_likely_ratio(typed, meant):
    with pytest.raises(UsageError) as caught:
        kept_width(128, typed)
    assert meant in (caught.value.hint or "")


@pytest.mark.parametrize(
    "typed", ["0", "1", "-0.5", "nan", "inf", "-inf", "half", "", "0.99", "1e-999999999", "0." + "9" * 5000, "1e400"]
)
def test_a_ratio_that_cannot_be_used_is_refused_at_once(typed):
    with pytest.raises(UsageError):
        kept_width(64, typed, align=1)


def test_alignment_above_the_width_is_refused():
    with pytest.raises(UsageError, match=r"outside 1\.\.32"):
        kept_width(32, "0.5", align=64)
    with pytest.raises(UsageError, match=r"outside 1\.\.32"):
        kept_width(32, "0.5", align=0)


def test_an_alignment_that_removes_nothing_is_refused():
    with pytest.raises(UsageError, match="removes no channel"):
        kept_width(64, "0.5", align=64)


def test_a_named_width_is_taken_as_it_is():
    budget = kept_width_from_keep(128, 89)
    assert (budget.width, budget.asked) == (89, None)
    assert str(budget) == "89 of 128 channels kept (30.47% removed)"


@pytest.mark.parametrize("keep", [0, -1, 128, 129])
def test_a_named_width_outside_the_head_is_refused(keep):
    with pytest.raises(UsageError, match=r"keep .* of 128"):
        kept_width_from_keep(128, keep)


def test_a_named_width_must_fit_an_alignment_that_was_asked_for():
    assert kept_width_from_keep(128, 96, align=32).width == 96
    with pytest.raises(UsageError) as caught:
        kept_width_from_keep(128, 100, align=32)
    assert "--keep 96" in (caught.value.hint or "")
