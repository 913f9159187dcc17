"""The work queue: one reconcile at a time per key, bursts are one, failures wait."""

from __future__ import annotations

import asyncio

import pytest
from tests.operator.fakes import FakeClock

from firsttoken_operator.workqueue import Backoff, WorkQueue


async def turns(count: int = 5) -> None:
    """Let the loop turn, so that what was added has begun."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_burst_of_events_is_one_reconcile():
    seen = []

    async def reconcile(key):
        seen.append(key)

    queue = WorkQueue(reconcile)
    for _ in range(10):
        queue.add("a")
    await queue.idle()
    assert seen == ["a"]


async def test_an_event_during_a_reconcile_is_one_more_reconcile_and_never_two_at_once():
    running, most, count = 0, 0, 0
    gate = asyncio.Event()

    async def reconcile(key):
        nonlocal running, most, count
        running, count = running + 1, count + 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    queue = WorkQueue(reconcile)
    queue.add("a")
    await turns()
    for _ in range(5):
        queue.add("a")
    gate.set()
    await queue.idle()
    assert (count, most) == (2, 1)


async def test_keys_run_side_by_side_up_to_the_number_of_workers():
    gate, running = asyncio.Event(), []

    async def reconcile(key):
        running.append(key)
        await gate.wait()

    queue = WorkQueue(reconcile, workers=2)
    for key in "abc":
        queue.add(key)
    await turns()
    assert running == ["a", "b"]
    assert queue.depth() == 1
    gate.set()
    await queue.idle()
    assert running == ["a", "b", "c"]


async def test_failures_back_off_doubling_and_a_success_resets():
    clock, times, fail = FakeClock(), [], True

    async def reconcile(key):
        times.append(clock.time())
        if fail:
            raise RuntimeError("no")

    queue = WorkQueue(reconcile, backoff=Backoff(1.0, 4.0), clock=clock)
    queue.add("a")
    await queue.idle()
    for _ in range(13):
        clock.advance(1.0)
        await queue.idle()
    assert times == [0.0, 1.0, 3.0, 7.0, 11.0]
    fail = False
    clock.advance(2.0)
    await queue.idle()
    fail = True
    queue.add("a")
    await queue.idle()
    clock.advance(1.0)
    await queue.idle()
    assert times[-3:] == [15.0, 15.0, 16.0], "the first failure after a success waits the first backoff"


async def test_a_fresh_event_does_not_wait_for_the_backoff():
    clock, count = FakeClock(), 0

    async def reconcile(key):
        nonlocal count
        count += 1
        raise RuntimeError("no")

    queue = WorkQueue(reconcile, backoff=Backoff(60.0, 60.0), clock=clock)
    queue.add("a")
    await queue.idle()
    queue.add("a")
    await queue.idle()
    assert count == 2


async def test_the_earlier_of_two_dates_stays():
    clock, times = FakeClock(), []

    async def reconcile(key):
        times.append(clock.time())

    queue = WorkQueue(reconcile, clock=clock)
    queue.add_after("a", 5.0)
    queue.add_after("a", 9.0)
    queue.add_after("a", 2.0)
    for _ in range(10):
        clock.advance(1.0)
        await queue.idle()
    assert times == [2.0]


async def test_a_reconcile_asks_for_its_next_look_and_forget_drops_it():
    clock, times = FakeClock(), []

    async def reconcile(key):
        times.append(clock.time())
        return 3.0

    queue = WorkQueue(reconcile, clock=clock)
    queue.add("a")
    await queue.idle()
    clock.advance(3.0)
    await queue.idle()
    assert times == [0.0, 3.0]
    queue.forget("a")
    clock.advance(30.0)
    await queue.idle()
    assert times == [0.0, 3.0]


async def test_close_stops_what_runs_and_takes_no_more():
    async def reconcile(key):
        await asyncio.Event().wait()

    queue = WorkQueue(reconcile)
    queue.add("a")
    await turns()
    await queue.close()
    queue.add("b")
    assert queue.depth() == 0


@pytest.mark.parametrize("failures", [1, 5, 40, 1000])
def test_a_backoff_is_never_longer_than_its_most(failures):
    assert 0 < Backoff(0.1, 60.0).after(failures) <= 60.0
