"""Quantiles and their intervals: what a benchmark prints, and how sure it may be."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.measure.statistics import (
    difference_interval,
    mean,
    median,
    median_interval,
    quantile,
)

numbers = st.floats(-1e6, 1e6)


def test_quantiles_of_a_known_sample() -> None:
    assert median([3, 1, 2]) == 2
    assert median([1, 2, 3, 4]) == 2.5
    assert quantile([10, 20, 30, 40, 50], 0.99) == pytest.approx(49.6)
    assert mean([1, 2, 6]) == 3


@given(st.lists(numbers, min_size=1), st.floats(0, 1))
def test_a_quantile_lies_within_the_sample(values: list[float], q: float) -> None:
    assert min(values) - 1e-6 <= quantile(values, q) <= max(values) + 1e-6


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_nonsense_is_refused(values: list[float], q: float) -> None:
    with pytest.raises(ValueError):
        quantile(values, q)


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError):
        mean([])


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    [(2, 0, 1, 0.5), (3, 0, 2, 0.75), (5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (9, 1, 7, 0.9609375)],
)
def test_the_interval_of_a_median_says_how_sure_it_is(
    count: int, low: int, high: int, coverage: float
) -> None:
    interval = median_interval(list(range(count)))
    assert interval is not None
    assert (interval.low, interval.high, interval.coverage) == (low, high, coverage)


def test_one_round_has_no_interval() -> None:
    assert median_interval([1.0]) is None


@pytest.mark.parametrize("count", [2, 5, 6, 9])
def test_the_coverage_is_what_counting_all_samples_gives(count: int) -> None:
    """A value lies below the true median with one half: of all 2^n patterns, how many cover it?"""
    interval = median_interval([float(value) for value in range(count)])
    assert interval is not None
    low, high = int(interval.low), int(interval.high)
    below = [sum(pattern) for pattern in itertools.product((0, 1), repeat=count)]
    covering = sum(low < values_below <= high for values_below in below)
    assert covering / 2**count == pytest.approx(interval.coverage)


@given(st.lists(numbers, min_size=2, max_size=30))
def test_an_interval_holds_its_median(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval is not None
    assert interval.low <= median(values) <= interval.high


@pytest.mark.parametrize(("m", "n"), [(4, 4), (5, 5), (4, 6)])
def test_of_two_equal_sources_at_most_one_in_twenty_intervals_misses_zero(m: int, n: int) -> None:
    """All ways to deal m + n values to two samples are equally likely when they come from one source."""
    values = [value**1.5 for value in range(m + n)]
    deals = list(itertools.combinations(range(m + n), m))
    missed = 0
    for chosen in deals:
        before = [values[index] for index in chosen]
        after = [values[index] for index in range(m + n) if index not in chosen]
        interval = difference_interval(before, after)
        assert interval is not None
        missed += not interval.low <= 0 <= interval.high
    assert missed / len(deals) == pytest.approx(1 - interval.coverage)
    assert 0 < missed / len(deals) <= 0.05
    assert len(deals) == math.comb(m + n, m)


def test_a_clear_shift_is_found_and_measured() -> None:
    interval = difference_interval([1, 2, 3, 4, 5], [101, 102, 103, 104, 105])
    assert interval is not None
    assert interval.low > 95
    assert interval.low <= 100 <= interval.high < 105


@pytest.mark.parametrize(("before", "after"), [([1, 2, 3], [101, 102, 103]), ([], [1.0]), ([1.0], [2.0])])
def test_three_rounds_tell_nothing(before: list[float], after: list[float]) -> None:
    assert difference_interval(before, after) is None


@given(st.lists(numbers, min_size=4, max_size=8), st.floats(-1e3, 1e3))
def test_the_interval_of_a_shifted_copy_holds_the_shift(values: list[float], shift: float) -> None:
    interval = difference_interval(values, [value + shift for value in values])
    assert interval is not None
    assert interval.low - 1e-6 <= shift <= interval.high + 1e-6
