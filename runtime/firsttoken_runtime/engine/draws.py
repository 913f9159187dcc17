"""Drawing tokens on the CPU without sorting the vocabulary.

A draw needs the place of one number in the running sum of the weights. Sums over parts find the part, and
only that part is summed token by token. Where top-k, top-p or min-p cut, the order is that of falling weight;
there the parts are buckets of nearly equal weights: the upper bits of a positive float32 order like the
number itself, so one pass counts the buckets, and one bucket at a time is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firsttoken_runtime.engine.requests import SamplingParams

Weights = NDArray[np.float32]
# 5 bits of the mantissa stay: a bucket is 3 % wide. Weights are at most 1.
_SHIFT = 18
_BUCKETS = (int(np.float32(1.0).view(np.int32)) >> _SHIFT) + 1
_PART_TOKENS = 256


def draw_plain(weights: Weights, numbers: Sequence[float]) -> list[int]:
    """Place of each row's number (0 … 1) in the running sum of its weights, in the order of token ids.

    weights: float32 [rows, vocab], none negative.
    """
    starts = np.arange(0, weights.shape[1], _PART_TOKENS)
    sums = np.add.reduceat(weights, starts, axis=1, dtype=np.float64).cumsum(axis=1)
    chosen = []
    for row, ends, number in zip(weights, sums, numbers, strict=True):
        mark = number * ends[-1]
        part = min(int(ends.searchsorted(mark, side="right")), len(ends) - 1)
        before = ends[part - 1] if part else 0.0
        first = int(starts[part])
        chosen.append(first + _place(row[first : first + _PART_TOKENS], before, mark))
    return chosen


def draw_truncated(weights: Weights, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """The same among the tokens that top-k, top-p (of what top-k left) and min-p leave, in falling order.

    Tokens of equal weight are in order of their ids. weights: float32 [rows, vocab], largest of a row 1.
    """
    return [
        _Falling(row).draw(param, number) for row, param, number in zip(weights, params, numbers, strict=True)
    ]


class _Falling:
    """One row in falling order, of which only the buckets that are asked for get sorted."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        # -0.0 would be a negative bucket; there is none, as weights come from exp.
        self.bucket = weights.view(np.int32) >> _SHIFT
        sums = np.bincount(self.bucket, weights=weights, minlength=_BUCKETS)
        self.ends: NDArray[np.float64] = sums[::-1].cumsum()  # [place], place 0 has the largest weights
        self._sorted: dict[int, tuple[NDArray[Any], NDArray[np.float64]]] = {}

    def draw(self, params: SamplingParams, number: float) -> int:
        kept = float(self.ends[-1])
        if params.top_k > 0:
            kept = self._sum_of_first(params.top_k)
        if params.top_p < 1.0:
            # A token stays while those before it have not reached top_p.
            target = params.top_p * kept
            place = min(int(self.ends.searchsorted(target)), len(self.ends) - 1)
            _, sums = self._open(place)
            kept = min(kept, float(sums[min(int(sums.searchsorted(target)), len(sums) - 1)]))
        if params.min_p > 0.0:
            kept = min(kept, self._sum_down_to(np.float32(params.min_p)))
        mark = number * kept
        place = min(int(self.ends.searchsorted(mark, side="right")), len(self.ends) - 1)
        tokens, sums = self._open(place)
        within = min(int(sums.searchsorted(mark, side="right")), len(sums) - 1)
        return int(tokens[within])

    def _sum_of_first(self, count: int) -> float:
        if count >= len(self.weights):
            return float(self.ends[-1])
        counts = np.bincount(self.bucket, minlength=_BUCKETS)[::-1].cumsum()
        place = int(counts.searchsorted(count))
        _, sums = self._open(place)
        before = int(counts[place - 1]) if place else 0
        return float(sums[min(count - before, len(sums)) - 1])

    def _sum_down_to(self, least: np.float32) -> float:
        place = _BUCKETS - 1 - int(least.view(np.int32) >> _SHIFT)
        tokens, sums = self._open(place)
        inside = int((self.weights[tokens] >= least).sum())
        if inside:
            return float(sums[inside - 1])
        return float(self.ends[place - 1]) if place else float(sums[0])

    def _open(self, place: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Tokens of a bucket in falling order, and the running sums (float64) down to each.

        Tokens of weight zero are left out: none may be drawn. The nearest bucket above that has tokens stands
        in for one without.
        """
        while place not in self._sorted:
            tokens = np.flatnonzero(self.bucket == _BUCKETS - 1 - place)
            tokens = tokens[self.weights[tokens] > 0]
            if not len(tokens) and place:
                place -= 1
                continue
            values = self.weights[tokens]
            if values.min() < values.max():
                order = np.argsort(-values, kind="stable")
                tokens, values = tokens[order], values[order]
            before = self.ends[place - 1] if place else 0.0
            self._sorted[place] = tokens, before + values.cumsum(dtype=np.float64)
        return self._sorted[place]


def _place(weights: Weights, before: float, mark: float) -> int:
    """First place at which the running sum exceeds the mark; the last with a weight where rounding missed."""
    sums = before + weights.cumsum(dtype=np.float64)
    place = int(sums.searchsorted(mark, side="right"))
    return place if place < len(weights) else int(np.flatnonzero(weights)[-1])
