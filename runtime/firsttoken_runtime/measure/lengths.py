"""How long prompts and answers are: a distribution on the command line, or rows of a file."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from firsttoken_runtime.measure.client import BenchError

_FORMS = "N, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEAN:SD or exponential:MEAN"
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens. `text` is how it was written; draws are at least 1."""

    text: str
    draw: Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """`512`, `uniform:64:1024`, `normal:512:100`, `lognormal:1155:900` or `exponential:211`.

    Raises BenchError for anything else. Values are rounded and cut at 1 and at `MOST_TOKENS`.
    """
    name, *numbers = text.strip().split(":")
    try:
        if not numbers:
            return _made(text, (float(name),), 1, lambda _, value: value)
        values = tuple(float(number) for number in numbers)
        if not all(math.isfinite(value) for value in values):
            raise ValueError(text)
        if name == "uniform" and values[0] <= values[1]:
            return _made(text, values, 2, lambda source, low, high: source.randint(int(low), int(high)))
        if name == "normal":
            return _made(text, values, 2, lambda source, mean, sd: source.gauss(mean, sd))
        if name == "lognormal":
            return _made(text, values, 2, _lognormal)
        if name == "exponential":
            return _made(text, values, 1, lambda source, mean: source.expovariate(1 / mean))
    except (ValueError, IndexError):
        pass
    raise BenchError(f"{text!r} is no length: write {_FORMS}, in tokens and above 0")


def _made(text: str, values: tuple[float, ...], count: int, draw: Callable[..., float]) -> Lengths:
    if len(values) != count or values[0] < 1 or not all(0 <= value <= MOST_TOKENS for value in values):
        raise ValueError(text)
    return Lengths(text.strip(), lambda source: min(max(round(draw(source, *values)), 1), MOST_TOKENS))


def _lognormal(source: random.Random, mean: float, sd: float) -> float:
    """Mean and standard deviation are those of the lengths, not of their logarithms."""
    variance = math.log(1 + (sd / mean) ** 2)
    return source.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
