"""Quantiles of small samples."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) of `values` by linear interpolation between order statistics.

    Raises ValueError on an empty sample or a q outside 0..1.
    """
    if not values:
        raise ValueError("no values: nothing was measured")
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile lies between 0 and 1, not {q}")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)
