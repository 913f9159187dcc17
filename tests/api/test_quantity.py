"""Quantities, per cents and durations as Kubernetes users write them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_api.quantity import (
    QuantityError,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_memory_cap,
    parse_per_cent,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1Ki", 1024),
        ("1.5Gi", 1.5 * 2**30),
        ("2G", 2_000_000_000),
        ("500m", "0.5"),
        ("1e3", 1000),
        ("12E6", 12_000_000),
        ("1E", 10**18),
        ("7Ei", 7 * 2**60),
        (".5", "0.5"),
        ("5.", 5),
        ("-1Mi", -(2**20)),
        (42, 42),
    ],
)
def test_the_number_of_a_quantity(text: str | int, number: float | str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize(
    "text", ["", "Gi", "1gb", "1 Gi", "1KB", "0x10", "1e999", "one", "1Gi\n", "١Gi", "nan", "9Ei"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(text)


@pytest.mark.parametrize("text", ["0", "-1", "-1Gi", "0Mi"])
def test_a_size_is_above_zero(text: str) -> None:
    with pytest.raises(QuantityError, match="write more than 0"):
        parse_bytes(text)


def test_a_fraction_of_a_byte_is_rounded_up() -> None:
    assert parse_bytes("1500m") == 2


@given(st.integers(1, 2**50))
def test_bytes_written_as_a_number_are_read_as_they_are(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == count


@given(st.integers(1, 2**60))
def test_formatted_bytes_can_be_read_again(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=1e-3)


@pytest.mark.parametrize(
    ("value", "expected"), [("50%", 500), ("100%", 1000), ("0.2k", 200), (64, 64), ("1Gi", 1000)]
)
def test_a_cap_is_bytes_or_a_part_of_the_pool_and_never_more_than_the_pool(
    value: str | int, expected: int
) -> None:
    assert parse_memory_cap(value, pool_bytes=1000) == expected


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "1e2%", "fifty%"])
def test_a_per_cent_is_from_1_to_100(text: str) -> None:
    with pytest.raises(QuantityError, match="from 1% to 100%"):
        parse_per_cent(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2), ("1.5s", 1.5), ("2m", 120), ("1h", 3600)]
)
def test_seconds_of_a_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "1 s", "1sec", "s"])
def test_what_is_no_duration_above_zero_is_refused(text: str) -> None:
    with pytest.raises(QuantityError, match="500ms or 2s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0000123, "0.0123ms"), (0.0123, "12.3ms"), (0.81234, "812.3ms"), (2.5, "2500ms"),
     (12.34, "12.34s")],
)  # fmt: skip
def test_a_duration_as_status_shows_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(1e-3, 1e5))
def test_a_shown_duration_can_be_read_again(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=2e-3)
