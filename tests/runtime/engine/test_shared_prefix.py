"""Requests that come together and share a long prefix compute it once. Counted in tokens, not in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_model import Bench, message, prompt
from test_scheduler import ON, SIZE, grants, plan, running, waiting

from firsttoken_runtime.engine.requests import Finish
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.tables import common_prefix

PREFIX, ANSWER = 1000, 4
AGENTS = 8


def computed(bench: Bench) -> int:
    return sum(bench.computed_per_step())


def together(bench: Bench, agents: int = AGENTS) -> list[str]:
    return [bench.add(prompt(PREFIX) + prompt(24, 50 + agent), max_tokens=ANSWER) for agent in range(agents)]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("by_priority", [True, False])
def test_eight_agents_that_start_together_compute_their_prefix_once(chunked: bool, by_priority: bool) -> None:
    switches = {"chunkedPrefill": chunked, "priorityScheduling": by_priority}
    bench = Bench(total_pages=2000, page_tokens=16, switches=message(1, **switches))
    ids = together(bench)
    bench.run()
    bench.assert_right()
    bench.assert_drained()
    decodes = AGENTS * (ANSWER - 1)
    rest = PREFIX + 24 - PREFIX // 16 * 16
    assert computed(bench) - decodes == PREFIX + 24 + (AGENTS - 1) * rest
    assert [bench.cached(id) for id in ids] == [0] + [PREFIX // 16 * 16] * (AGENTS - 1)
    without = Bench(total_pages=2000, page_tokens=16, switches=message(1, prefixCache=False, **switches))
    together(without)
    without.run()
    without.assert_right()
    assert computed(without) - decodes == AGENTS * (PREFIX + 24)


def test_who_comes_while_the_prefix_is_computed_waits_for_the_rest_of_it() -> None:
    bench = Bench(total_pages=2000, page_tokens=16, switches=message(1, chunkedPrefill={"chunkSize": 128}))
    bench.add(prompt(PREFIX) + prompt(200, 2), id="first", max_tokens=1)
    bench.steps(2)
    # Shorter, so it goes first; and what it computes are the pages both need
    bench.add(prompt(PREFIX) + prompt(8, 3), id="second", max_tokens=1)
    bench.run()
    bench.assert_right()
    assert bench.cached("second") == PREFIX // 16 * 16
    assert computed(bench) == PREFIX + 200 + PREFIX + 8 - PREFIX // 16 * 16


def test_the_waiting_one_lends_its_turn_so_it_waits_no_longer_than_it_would_have_computed() -> None:
    def second_token_at(cache: bool) -> float:
        bench = Bench(
            total_pages=4000,
            page_tokens=16,
            seconds_per_token=0.001,
            switches=message(1, prefixCache=cache, chunkedPrefill={"chunkSize": 128}),
            prefill_tokens_per_second=1000,
        )
        bench.add(prompt(PREFIX) + prompt(3000, 2), id="first", max_tokens=1)
        bench.steps(2)
        for agent in range(3):  # they would go before the first, but not before the second
            bench.add(prompt(400, 9 + agent) + prompt(900, 60 + agent), max_tokens=1)
        begin = bench.clock.now_ns
        bench.add(prompt(PREFIX) + prompt(8, 3), id="second", max_tokens=1)
        bench.run()
        bench.assert_right()
        return (bench.first_at["second"] - begin) / 1e9

    assert second_token_at(cache=True) <= second_token_at(cache=False)


def test_nobody_waits_for_one_who_was_aborted_or_failed() -> None:
    for end in ("abort", "fail"):
        bench = Bench(total_pages=2000, page_tokens=16, switches=message(1, chunkedPrefill={"chunkSize": 64}))
        first, second = together(bench, 2)
        bench.steps(3)
        if end == "abort":
            assert bench.engine.abort(first)
        else:
            bench.failures.append(RuntimeError("a step failed"))
            bench.step()
        bench.run()
        assert bench.finish(first) in (Finish.ABORT, Finish.ERROR)
        bench.assert_right(second)
        bench.assert_drained()
        assert bench.cached(second) > 0, "what the first one had computed is not lost"


def test_nobody_waits_for_pages_that_the_cache_would_not_take() -> None:
    """At its cap, and after a flush: then waiting would bring nothing."""
    capped = Bench(total_pages=1000, page_tokens=16, switches=message(1, prefixCache={"maxMemory": "1%"}))
    first, second = together(capped, 2)
    while not capped.events[second]:
        capped.step()
        assert len(capped.model.steps) < 40
    capped.run()
    capped.assert_right()
    flushed = Bench(total_pages=1000, page_tokens=16, switches=message(1, chunkedPrefill={"chunkSize": 64}))
    first, second = together(flushed, 2)
    flushed.steps(2)
    flushed.engine.flush_prefix_cache()
    flushed.step()
    assert {entry["id"] for entry in flushed.engine.requests() if entry["state"] == "prefill"} == {
        first,
        second,
    }
    flushed.run()
    flushed.assert_right()


def test_tenants_do_not_wait_for_each_others_pages() -> None:
    bench = Bench(
        total_pages=1000, page_tokens=16, switches=message(1, continuousBatching={"maxBatchTokens": 512})
    )
    for salt in ("one", "two"):
        bench.add(prompt(200), cache_salt=salt)
    bench.step()
    assert {entry["state"] for entry in bench.engine.requests()} == {"decode"}


SHARING = replace(ON, share_prefixes=True)


def computing(name: str, tokens: int, done: int, **more: object) -> Sequence:
    """In prefill, with what it has computed in the cache."""
    sequence = running(name, tokens, done, **more)
    sequence.handle = replace(sequence.handle, pages=done // SIZE)
    return sequence


def test_a_short_common_prefix_is_not_worth_a_step() -> None:
    pair = [waiting("a", 31), waiting("b", 31, number=1)]
    assert set(grants(plan([], pair, SHARING))) == {"a", "b"}
    pair = [waiting("a", 33), waiting("b", 33, number=1)]
    assert set(grants(plan([], pair, SHARING))) == {"a"}
    assert set(grants(plan([], pair, ON))) == {"a", "b"}


def test_who_is_overdue_waits_for_nobody() -> None:
    leader, late = computing("a", 900, 64, arrived=5.0), waiting("b", 700, arrived=0.0)
    assert set(grants(plan([leader], [late], SHARING, now=9.9))) == {"a"}
    assert set(grants(plan([leader], [late], SHARING, now=10.0))) == {"a", "b"}


def test_nobody_waits_for_one_of_lower_priority() -> None:
    leader, urgent = computing("a", 900, 64, priority=1), waiting("b", 700, priority=0)
    assert "b" in grants(plan([leader], [urgent], SHARING))


def test_its_place_and_its_pages_are_kept() -> None:
    leader, follower, other = computing("a", 900, 64), waiting("b", 700), waiting("c", 20, priority=1)
    other.request = replace(other.request, prompt=tuple(range(5000, 5020)))
    two_places = replace(SHARING, max_sequences=2)
    assert set(grants(plan([leader], [follower, other], two_places, now=8.0))) == {"a"}
    three_places = replace(SHARING, max_sequences=3)
    assert set(grants(plan([leader], [follower, other], three_places, now=8.0))) == {"a", "c"}


@given(
    st.lists(st.integers(1, 3), max_size=60),
    st.lists(st.integers(1, 3), max_size=60),
    st.lists(st.integers(1, 3), max_size=60),
)
@settings(deadline=None)
def test_the_common_prefix_is_that_of_comparing_one_by_one(head, ours, theirs) -> None:
    left, right = tuple(head + ours), tuple(head + theirs)
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    assert common_prefix(left, right) == same
