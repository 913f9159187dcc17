"""TTFT: four segments that add up, whatever the stamps."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.timing import Segments, TtftWindow, quantiles, segments

ns = st.integers(min_value=0, max_value=2**62)


@given(st.lists(ns, min_size=5, max_size=5).map(sorted))
def test_the_segments_add_up_to_written_minus_arrival(stamps):
    parts = segments(*stamps)
    assert parts.ttft_ns == stamps[4] - stamps[0]
    assert parts.queue_ns == stamps[1] - stamps[0]
    assert parts.transport_ns == stamps[4] - stamps[3]


@given(st.lists(ns, min_size=5, max_size=5))
def test_no_segment_is_negative_even_when_stamps_are_out_of_order(stamps):
    parts = segments(*stamps)
    assert min(parts.queue_ns, parts.prefill_ns, parts.decode_ns, parts.transport_ns) >= 0
    assert parts.ttft_ns == max(stamps) - stamps[0]


@given(*[st.integers(min_value=0, max_value=10**13)] * 4)
def test_milliseconds_keep_every_nanosecond(queue, prefill, decode, transport):
    parts = Segments(queue, prefill, decode, transport)
    body = parts.to_json()
    total = sum(round(body[f"{name}_ms"] * 1e6) for name in ("queue", "prefill", "decode", "transport"))
    assert total == round(body["ttft_ms"] * 1e6) == parts.ttft_ns


def test_the_header_goes_up_to_the_hand_over():
    header = Segments(1_000_000, 2_000_000, 500_000, 9_000_000).server_timing()
    assert re.findall(r"(\w+);dur=([0-9.]+)", header) == [
        ("queue", "1.000000"),
        ("prefill", "2.000000"),
        ("decode", "0.500000"),
        ("total", "3.500000"),
    ]


@pytest.mark.parametrize(
    ("values", "p50", "p95", "p99"),
    [([5], 5, 5, 5), (range(1, 101), 50, 95, 99), ([1, 2], 1, 2, 2)],
)
def test_quantiles_are_values_that_were_measured(values, p50, p95, p99):
    assert quantiles(values, "_ms") == {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


def test_the_window_forgets_what_is_too_old_and_what_is_too_many():
    window = TtftWindow(limit=3, seconds=10)
    second = 1_000_000_000
    for at in range(5):
        window.add(at * second, Segments(at * 1_000_000, 0, 0, 1_000_000), prompt_tokens=at)
    state = window.ttft(5 * second)
    assert state["count"] == 3
    assert state["p50_ms"] == 4.0
    assert state["segments_ms"] == {"queue": 3.0, "prefill": 0.0, "decode": 0.0, "transport": 1.0}
    assert window.prompt_tokens(5 * second) == {"p50": 3, "p95": 4, "p99": 4}
    assert window.ttft(14 * second)["count"] == 1


def test_an_empty_window_says_that_it_knows_nothing():
    state = TtftWindow().ttft(0)
    assert (state["count"], state["p99_ms"], state["segments_ms"]["queue"]) == (0, None, None)
