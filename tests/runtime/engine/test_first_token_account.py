"""The way to a first token as the engine tells it: stamps in order, computing apart from being blocked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_model import Bench, message, prompt

from firsttoken_runtime.engine.requests import NO_TOKEN, Finish, TokenEvent

MS = 1_000_000


def prefill_ns(event: TokenEvent) -> int:
    assert event.prefill_start_ns is not None
    assert event.prefill_end_ns is not None
    return event.prefill_end_ns - event.prefill_start_ns


def in_order(event: TokenEvent) -> bool:
    stamps = (
        event.queued_ns,
        event.admitted_ns,
        event.prefill_start_ns,
        event.prefill_end_ns,
        event.sampled_ns,
    )
    return None not in stamps and list(stamps) == sorted(stamps)


def test_a_prompt_alone_is_never_blocked() -> None:
    bench = Bench(seconds_per_token=0.001, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    bench.add(prompt(40), max_tokens=1)
    bench.run()
    (event,) = bench.events["r0"]
    assert in_order(event)
    assert event.chunks == 3
    assert event.computing_ns == prefill_ns(event) == 40 * MS


def test_in_a_shared_step_each_prompt_has_its_share_and_the_rest_is_blocked() -> None:
    bench = Bench(seconds_per_token=0.001)
    bench.add(prompt(30, 1), max_tokens=1)
    bench.add(prompt(10, 2), max_tokens=1)
    bench.run()
    (long,), (short,) = bench.events["r0"], bench.events["r1"]
    assert prefill_ns(long) == prefill_ns(short) == 40 * MS
    assert (long.computing_ns, short.computing_ns) == (30 * MS, 10 * MS)


def test_steps_for_others_between_two_chunks_are_blocked_time() -> None:
    switches = message(
        1,
        chunkedPrefill={"chunkSize": 16},
        continuousBatching={"maxBatchTokens": 17},
        priorityScheduling={"maxWaitSeconds": 3600, "ageingTokensPerSecond": 0},
    )
    bench = Bench(seconds_per_token=0.001, switches=switches)
    bench.add(prompt(64, 1), max_tokens=1, id="long")
    bench.step()
    for number in range(6):
        bench.add(prompt(8, 3 + number), max_tokens=1, id=f"short{number}")
    bench.run()
    (event,) = bench.events["long"]
    assert in_order(event)
    assert event.computing_ns == 64 * MS
    assert prefill_ns(event) - event.computing_ns == 6 * 8 * MS


def test_preemption_before_the_first_token_is_in_the_account() -> None:
    switches = message(1, chunkedPrefill={"chunkSize": 16}, prefixCache=False)
    bench = Bench(total_pages=16, page_tokens=4, seconds_per_token=0.001, switches=switches)
    bench.add(prompt(56, 1), max_tokens=1, id="low", priority=5)
    bench.steps(2)
    bench.add(prompt(40, 2), max_tokens=1, id="high", priority=0)
    bench.run()
    (event,) = bench.events["low"]
    assert event.preemptions == 1
    assert in_order(event)
    computed_twice = event.computing_ns - 56 * MS
    assert computed_twice > 0, "what was computed before the preemption was its own work too"
    assert prefill_ns(event) - event.computing_ns >= 40 * MS, "the other one's prompt"
    assert event.cached_tokens == 0


def test_an_abort_in_the_queue_tells_that_it_was_queued_and_no_more() -> None:
    bench = Bench(switches=message(1, continuousBatching={"maxSequences": 1}))
    bench.add(prompt(8, 1), max_tokens=50, id="running")
    bench.steps(3)
    bench.add(prompt(8, 2), id="waiting")
    bench.step()
    bench.engine.abort("waiting")
    bench.step()
    (event,) = bench.events["waiting"]
    assert (event.token, event.finish) == (NO_TOKEN, Finish.ABORT)
    assert event.queued_ns is not None
    assert (event.admitted_ns, event.prefill_start_ns, event.prefill_end_ns) == (None, None, None)


def test_an_abort_in_prefill_tells_what_was_computed() -> None:
    bench = Bench(seconds_per_token=0.001, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    bench.add(prompt(60), id="r")
    bench.steps(2)
    bench.engine.abort("r")
    bench.step()
    (event,) = bench.events["r"]
    assert event.prefill_start_ns is not None
    assert (event.prefill_end_ns, event.chunks, event.computing_ns) == (None, 2, 32 * MS)


def test_only_the_first_token_carries_an_account() -> None:
    bench = Bench(seconds_per_token=0.001)
    bench.add(prompt(20), max_tokens=3)
    bench.run()
    first, *others = bench.events["r0"]
    assert first.computing_ns > 0
    assert all((event.queued_ns, event.computing_ns, event.chunks) == (None, 0, 0) for event in others)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=10))
def test_whatever_comes_no_account_is_out_of_order_and_shares_are_never_more_than_the_model_took(
    requests: list[tuple[int, int, int]],
) -> None:
    switches = message(1, chunkedPrefill={"chunkSize": 16})
    bench = Bench(total_pages=24, page_tokens=4, max_model_len=96, seconds_per_token=0.001, switches=switches)
    for number, (length, priority, steps) in enumerate(requests):
        bench.add(prompt(length, number), max_tokens=3, priority=priority)
        bench.steps(steps)
    bench.run()
    events = [events[0] for events in bench.events.values()]
    assert all(in_order(event) and 0 < event.computing_ns <= prefill_ns(event) for event in events)
    model_ns = sum(bench.computed_per_step()) * MS
    assert sum(event.computing_ns for event in events) <= model_ns


@pytest.mark.parametrize("chunk", [16, 32])
def test_a_chunked_prompt_has_a_prefill(chunk: int) -> None:
    bench = Bench(seconds_per_token=0.001, switches=message(1, chunkedPrefill={"chunkSize": chunk}))
    bench.add(prompt(100), max_tokens=1)
    bench.run()
    (event,) = bench.events["r0"]
    assert event.chunks >= 2
    assert prefill_ns(event) == 100 * MS
