"""How long a prompt takes to compute, as a function of its length, learnt from the steps that computed
prompts.

The cost model of a step (R4 of the cost literature in four numbers): the weights are read once, every token
costs about two operations per parameter, and attention costs one unit for each pair of a token and a token it
looks at:

    seconds = base + per_token · prompt tokens + per_pair · pairs + per_decode · sequences that decode beside

Attention is quadratic in length, so tokens per second fall with it. The coefficients are those of least
squared relative error over recent steps, none of them negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HALF_LIFE_STEPS = 1024
_KEEP = 0.5 ** (1 / _HALF_LIFE_STEPS)
_LEAST_STEPS = 8
# Brings the four quantities of a step to one order of magnitude.
_SCALE = (1.0, 1e-3, 1e-6, 1e-2)
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def pairs(start: int, tokens: int) -> int:
    """Pairs of a token and one it attends to (itself included), in a chunk that begins at `start`."""
    return tokens * start + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The four coefficients, in seconds; see the module. relative_error: root mean square over the steps."""

    base: float
    per_token: float
    per_pair: float
    per_decode: float
    relative_error: float

    def seconds(self, tokens: int, chunk_size: int | None = None, start: int = 0) -> float:
        """Of `tokens` prompt tokens behind `start` cached ones, alone, in chunks (None: in one step)."""
        steps = 1 if chunk_size is None else math.ceil(tokens / chunk_size)
        return self.base * steps + self.per_token * tokens + self.per_pair * pairs(start, tokens)


class PrefillCosts:
    """Sums over steps from which the coefficients follow at any time; a step costs a few additions."""

    def __init__(self) -> None:
        self.steps = 0
        self.longest = 0
        self._products = [0.0] * 10  # of each two of the four quantities, weighted and decaying
        self._times = [0.0] * 4
        self._weight = 0.0
        self._fit: tuple[int, PrefillCost | None] = (0, None)

    def stepped(self, seconds: float, tokens: int, attended: int, decodes: int, end: int) -> None:
        """A step with prompt tokens took `seconds` in the model. attended: its pairs, see `pairs`. end: the
        last position computed in it, in tokens."""
        if seconds <= 0.0 or not tokens:
            return
        # Divided by the time, so that a step counts by its relative error.
        scale = 1.0 / seconds
        a, b, c, d = scale, tokens * 1e-3 * scale, attended * 1e-6 * scale, decodes * 1e-2 * scale
        new = (a * a, a * b, a * c, a * d, b * b, b * c, b * d, c * c, c * d, d * d)
        self._products = [_KEEP * old + value for old, value in zip(self._products, new, strict=True)]
        self._times = [_KEEP * old + value for old, value in zip(self._times, (a, b, c, d), strict=True)]
        self._weight = _KEEP * self._weight + 1.0
        self.steps += 1
        self.longest = max(self.longest, end)

    def cost(self) -> PrefillCost | None:
        """What fits best; None before eight steps."""
        if self.steps < _LEAST_STEPS:
            return None
        # A fit costs a millisecond, and few steps change little.
        if self.steps - self._fit[0] >= min(64, 1 + self._fit[0] // 16):
            self._fit = (self.steps, self._solve())
        return self._fit[1]

    def _solve(self) -> PrefillCost:
        matrix = np.zeros((4, 4))
        matrix[np.triu_indices(4)] = self._products
        matrix = matrix + np.triu(matrix, 1).T
        times = np.array(self._times)
        best: tuple[float, NDArray[np.float64]] = (self._weight, np.zeros(4))
        # Non-negative least squares by trying which of four may differ from zero.
        for used in product((False, True), repeat=4):
            index = np.flatnonzero(used)
            if not index.size:
                continue
            part = np.linalg.lstsq(matrix[np.ix_(index, index)], times[index], rcond=1e-9)[0]
            if (part < 0).any():
                continue
            error = self._weight - 2 * part @ times[index] + part @ matrix[np.ix_(index, index)] @ part
            if error < best[0] * (1 - 1e-9):
                found = np.zeros(4)
                found[index] = part
                best = (float(error), found)
        base, per_token, per_pair, per_decode = (best[1] * _SCALE).tolist()
        error = math.sqrt(max(best[0], 0.0) / self._weight)
        return PrefillCost(base, per_token, per_pair, per_decode, error)

    def to_json(self, chunk_size: int | None, max_model_len: int) -> dict[str, Any] | None:
        """The coefficients, and tokens per second by prompt length for an uncached prompt alone, chunked as
        now.

        Lengths beyond `longest_tokens`, the longest context seen, are extrapolated. None before eight steps.
        """
        cost = self.cost()
        if cost is None:
            return None
        rates = {
            str(length): round(length / seconds, 1)
            for length in _LENGTHS
            if length <= max_model_len and (seconds := cost.seconds(length, chunk_size)) > 0
        }
        return {
            "base_ms": round(cost.base * 1e3, 4),
            "per_token_us": round(cost.per_token * 1e6, 4),
            "per_pair_ns": round(cost.per_pair * 1e9, 5),
            "per_decode_us": round(cost.per_decode * 1e6, 4),
            "relative_error": round(cost.relative_error, 4),
            "steps": self.steps,
            "longest_tokens": self.longest,
            "tokens_per_second": rates,
        }
