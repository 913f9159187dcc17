"""Quantiles, and how sure they are: everything here holds whatever the distribution of the values.

The interval of a median comes from order statistics (the binomial distribution of how many values lie below
the median); the interval of a difference of two samples is Hodges and Lehmann's, from the exact distribution
of the Mann-Whitney statistic. Neither resamples, so the same values always give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """`low` to `high`, and how likely it covers the true value (0 to 1), exactly and not as asked for."""

    low: float
    high: float
    coverage: float


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


def mean(values: Sequence[float]) -> float:
    """Raises ValueError on an empty sample."""
    if not values:
        raise ValueError("no values: nothing was measured")
    return math.fsum(values) / len(values)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest symmetric pair of order statistics that covers the median with at least `confidence`.

    Below 6 values no pair reaches 95 %: the whole range is given, with the coverage it has (5 values 93.75 %,
    3 values 75 %). One value says nothing about its spread: None.
    """
    count = len(values)
    if count < 2:
        return None
    ordered = sorted(values)
    outside = 0.0  # P(the median lies outside) / 2, for the pair (rank, count - 1 - rank)
    rank, coverage = 0, 1 - 2 * 0.5**count
    for candidate in range((count - 1) // 2 + 1):
        outside += math.comb(count, candidate) * 0.5**count
        if 1 - 2 * outside < confidence:
            break
        rank, coverage = candidate, 1 - 2 * outside
    return Interval(ordered[rank], ordered[count - 1 - rank], coverage)


def difference_interval(
    before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """How far `after` lies from `before`, at least `confidence` sure; None when there are too few values.

    Hodges and Lehmann's interval of the shift: order statistics of all pairwise differences, their rank from
    the exact distribution of Mann and Whitney's U. With 3 values on each side nothing can be 95 % sure; with
    4 the two samples have to be apart altogether.
    """
    m, n = len(before), len(after)
    if not m or not n:
        return None
    ways = _mann_whitney(m, n)
    total = math.comb(m + n, m)
    below, rank, outside = 0, -1, 0.0
    for u, count in enumerate(ways):
        below += count
        if 2 * below / total > 1 - confidence + 1e-12:
            break
        rank, outside = u, 2 * below / total
    if rank < 0:
        return None
    differences = sorted(late - early for early in before for late in after)
    return Interval(differences[rank], differences[len(differences) - 1 - rank], 1 - outside)


@cache
def _mann_whitney(m: int, n: int) -> tuple[int, ...]:
    """How many of the orders of m + n values give each U from 0 to m·n: the Gaussian binomial's
    coefficients.
    """
    ways = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):
            ways[u] -= ways[u - n - i]
        for u in range(i, m * n + 1):
            ways[u] += ways[u - i]
    return tuple(ways)
