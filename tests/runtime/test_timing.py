"""TTFT: four segments that add up, whatever the stamps."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.timing import (
    PARTS,
    SEGMENTS,
    Account,
    Segments,
    Stamps,
    TtftWindow,
    account,
    histogram,
    quantiles,
)

ns = st.integers(min_value=0, max_value=2**62)
NAMES = [
    field.name for field in fields(Stamps) if field.name.endswith("_ns") and field.name != "computing_ns"
]


def stamped(moments, computing=0):
    return Stamps(**dict(zip(NAMES, moments, strict=True)), computing_ns=computing)


@given(st.lists(ns, min_size=12, max_size=12).map(sorted), ns)
def test_every_part_is_the_time_between_two_stamps_and_they_add_up_to_written_minus_arrival(
    moments, computing
):
    whole = account(stamped(moments, computing))
    parts, segments = whole.parts(), whole.segments
    assert sum(parts.values()) == segments.ttft_ns == moments[-1] - moments[0]
    assert segments.queue_ns == moments[5] - moments[0]
    assert segments.transport_ns == moments[11] - moments[10]
    assert parts["queue", "wait"] == moments[4] - moments[3]
    assert parts["prefill", "compute"] == min(computing, moments[6] - moments[5])
    for segment, names in PARTS.items():
        assert sum(parts[segment, name] for name in names) == getattr(segments, f"{segment}_ns")


@given(st.lists(ns, min_size=12, max_size=12), ns)
def test_no_part_is_negative_even_when_stamps_are_out_of_order(moments, computing):
    whole = account(stamped(moments, computing))
    assert min(whole.parts_ns) >= 0
    assert whole.segments.ttft_ns == max(moments) - moments[0]


@given(st.lists(st.none() | ns, min_size=11, max_size=11), ns)
def test_stamps_that_are_not_known_leave_the_sum_exact(moments, arrival):
    known = [moment for moment in moments if moment is not None]
    whole = account(stamped([arrival, *moments]))
    assert min(whole.parts_ns) >= 0
    assert whole.segments.ttft_ns == max([arrival, *known]) - arrival


@given(st.lists(ns, min_size=13, max_size=13).map(sorted), st.integers(min_value=0, max_value=11))
def test_a_request_that_ended_early_is_accounted_up_to_its_end(moments, known):
    *moments, end = moments
    stamps = stamped([*moments[: known + 1], *[None] * (11 - known)])
    whole = account(stamps, end)
    assert whole.segments.ttft_ns == end - moments[0] or known == 11
    later = [name for name in PARTS if name not in ("queue", "prefill", "decode", "transport")[: known + 1]]
    assert stamps.segment is None or stamps.segment in SEGMENTS
    if known < 5:  # the prefill had not begun
        assert stamps.segment == "queue"
        assert whole.segments.queue_ns == end - moments[0]
    assert all(getattr(whole.segments, f"{name}_ns") == 0 for name in later if known < 5)


@given(*[st.integers(min_value=0, max_value=10**13)] * 4)
def test_milliseconds_keep_every_nanosecond(queue, prefill, decode, transport):
    parts = Segments(queue, prefill, decode, transport)
    body = parts.to_json()
    total = sum(round(body[f"{name}_ms"] * 1e6) for name in ("queue", "prefill", "decode", "transport"))
    assert total == round(body["ttft_ms"] * 1e6) == parts.ttft_ns


def test_the_header_goes_up_to_the_hand_over_and_names_segments_before_parts():
    whole = Account(
        (100_000, 200_000, 300_000, 400_000, 0, 1_500_000, 500_000, 10_000, 20_000, 30_000, 440_000, 9)
    )
    shown = re.findall(r"(\w+);dur=([0-9.]+)", whole.server_timing())
    assert shown[:4] == [
        ("queue", "1.000000"),
        ("prefill", "2.000000"),
        ("decode", "0.500000"),
        ("total", "3.500000"),
    ]
    assert dict(shown[4:])["blocked"] == "0.500000"
    assert round(sum(float(value) for _, value in shown[4:]), 6) == 3.5
    assert "write" not in dict(shown)


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
        window.add(at * second, Segments(at * 1_000_000, 0, 0, 1_000_000), at, cached_tokens=at // 2)
    state = window.ttft(5 * second)
    assert state["count"] == 3
    assert state["p50_ms"] == 4.0
    assert state["segments_ms"] == {"queue": 3.0, "prefill": 0.0, "decode": 0.0, "transport": 1.0}
    assert window.prompt_tokens(5 * second) == {"p50": 3, "p95": 4, "p99": 4}
    assert window.lengths(5 * second)["prompt_tokens"] == {"16": 3}
    assert window.ttft(14 * second)["count"] == 1


@given(st.lists(st.integers(min_value=0, max_value=10**6)))
def test_the_histogram_of_lengths_has_every_prompt_in_its_range(lengths):
    found = histogram(lengths)
    assert sum(found.values()) == len(lengths)
    assert found.get("128", 0) == sum(64 < length <= 128 for length in lengths)
    assert found.get("+Inf", 0) == sum(length > 131072 for length in lengths)


def test_lengths_tell_prompts_from_what_had_to_be_computed():
    window = TtftWindow()
    for prompt, cached in ((1000, 992), (1000, 0), (30, 0)):
        window.add(1, Segments(0, 0, 0, 0), prompt, cached)
    lengths = window.lengths(1)
    assert lengths["prompt_tokens"] == {"32": 1, "1024": 2}
    assert lengths["computed_tokens"] == {"16": 1, "32": 1, "1024": 1}


def test_an_empty_window_says_that_it_knows_nothing():
    state = TtftWindow().ttft(0)
    assert (state["count"], state["p99_ms"], state["segments_ms"]["queue"]) == (0, None, None)
