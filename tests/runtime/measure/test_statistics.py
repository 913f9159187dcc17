"""Quantiles: what a benchmark prints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.measure.statistics import median, quantile


def test_quantiles_of_a_known_sample() -> None:
    assert median([3, 1, 2]) == 2
    assert median([1, 2, 3, 4]) == 2.5
    assert quantile([10, 20, 30, 40, 50], 0.99) == pytest.approx(49.6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_within_the_sample(values: list[float], q: float) -> None:
    assert min(values) - 1e-6 <= quantile(values, q) <= max(values) + 1e-6


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_nonsense_is_refused(values: list[float], q: float) -> None:
    with pytest.raises(ValueError):
        quantile(values, q)
