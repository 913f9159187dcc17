"""Kubernetes quantities, per cents and durations as numbers, and back.

Follows the quantity grammar of the Kubernetes API (decimal and binary suffixes, decimal exponent).
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_SUFFIXES: dict[str, Decimal] = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
_QUANTITY = re.compile(
    r"(?P<number>[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+))(?P<suffix>[eE][+-]?[0-9]{1,2}|[KMGTPE]i|[numkMGTPE])?",
    re.ASCII,
)
_PER_CENT = re.compile(r"[0-9]+(\.[0-9]+)?%", re.ASCII)
_DURATION = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>ms|s|m|h)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LARGEST = Decimal(2**63 - 1)


class QuantityError(ValueError):
    """A quantity, per cent or duration that cannot be read; the text says what would be right."""


def parse_quantity(value: str | int) -> Decimal:
    """The number a Kubernetes quantity stands for: `"500m"` is 0.5, `"1Ki"` is 1024. Raises QuantityError."""
    text = str(value)
    match = _QUANTITY.fullmatch(text)
    if match is None or isinstance(value, bool):
        raise QuantityError(f"{text!r} is not a quantity; write a number such as 512Mi, 2Gi or 1500000000")
    suffix = match["suffix"] or ""
    # `E` and `Ei` are suffixes, `E6` is an exponent.
    factor = _SUFFIXES[suffix] if suffix in _SUFFIXES else Decimal(10) ** int(suffix[1:])
    number = Decimal(match["number"]) * factor
    if abs(number) > _LARGEST:
        raise QuantityError(f"{text!r} is too large; the largest quantity is 8Ei - 1")
    return number


def parse_bytes(value: str | int) -> int:
    """Bytes that a quantity stands for, rounded up to a whole byte. Raises QuantityError unless positive."""
    number = parse_quantity(value)
    if number <= 0:
        raise QuantityError(f"{str(value)!r} is not a size; write more than 0, such as 512Mi or 2Gi")
    return int(number.to_integral_value(rounding=ROUND_CEILING))


def parse_per_cent(value: str) -> float:
    """The fraction that a per cent stands for: `"50%"` is 0.5. Raises QuantityError outside 0 < x <= 100."""
    if not _PER_CENT.fullmatch(value) or not 0 < float(value[:-1]) <= 100:
        raise QuantityError(f"{value!r} is not a per cent from 1% to 100%; write for instance 50%")
    return float(value[:-1]) / 100


def parse_memory_cap(value: str | int, pool_bytes: int) -> int:
    """Bytes of a cap written as a quantity or as a per cent of the pool; never more than the pool.

    pool_bytes: size of the KV pool. Raises QuantityError.
    """
    if isinstance(value, str) and value.endswith("%"):
        return int(pool_bytes * parse_per_cent(value))
    return min(parse_bytes(value), pool_bytes)


def check_memory_cap(value: str | int) -> str | int:
    """The value itself when `parse_memory_cap` can read it. Raises QuantityError."""
    try:
        parse_memory_cap(value, 1)
    except QuantityError as error:
        raise QuantityError(f"{error}; a memory cap is bytes (256Mi) or a per cent of the KV pool") from None
    return value


def check_bytes(value: str | int) -> str | int:
    """The value itself when `parse_bytes` can read it. Raises QuantityError."""
    parse_bytes(value)
    return value


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that keeps three figures: `1610612736` is `1.5Gi`."""
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        size = int(_SUFFIXES[suffix])
        if abs(count) >= size:
            return f"{count / size:.4g}{suffix}"
    return str(count)


def parse_duration(value: str) -> float:
    """Seconds of `"500ms"`, `"2s"`, `"1.5m"`, `"1h"`. Raises QuantityError unless positive."""
    match = _DURATION.fullmatch(value)
    seconds = float(match["number"]) * _SECONDS[match["unit"]] if match else 0.0
    if seconds <= 0:
        raise QuantityError(f"{value!r} is not a duration above zero; write for instance 500ms or 2s")
    return seconds


def check_duration(value: str) -> str:
    """The value itself when `parse_duration` can read it. Raises QuantityError."""
    parse_duration(value)
    return value


def format_duration(seconds: float) -> str:
    """A duration as status shows it: four figures, in ms below ten seconds. `0.0123` is `12.3ms`."""
    if seconds < 10:
        return f"{_plain(seconds * 1000)}ms"
    return f"{_plain(seconds)}s"


def _plain(number: float) -> str:
    text = f"{number:.4g}" if number < 1000 else f"{number:.0f}"
    return "0" if "e" in text else text
