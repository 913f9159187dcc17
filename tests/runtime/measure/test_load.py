"""Open loop sends at its times, closed loop keeps its number; both end when told to."""

from __future__ import annotations

import asyncio
import time

import pytest

from firsttoken_runtime.measure.client import RequestError, Sample
from firsttoken_runtime.measure.load import GONE_AFTER, Job, run_round
from firsttoken_runtime.measure.plan import Planned
from firsttoken_runtime.measure.prompts import Text

pytestmark = pytest.mark.asyncio
DONE = Sample(1.0, 2.0, 2, "a b", output_tokens=2)


def jobs(*times: float | None) -> list[Job]:
    return [Job(Planned(at, Text(5, index), 2), str(index)) for index, at in enumerate(times)]


class Slow:
    """Answers after `seconds`; knows how many ran at once and when each began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = self.most = 0
        self.began: list[float] = []

    async def __call__(self, prompt: str, max_tokens: int) -> Sample:
        self.began.append(time.perf_counter())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return DONE


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    send = Slow(0.3)
    done = await run_round(send, jobs(0.0, 0.05, 0.1, 0.15), asyncio.Event())
    assert send.most == 4
    offsets = [began - send.began[0] for began in send.began]
    assert offsets == pytest.approx([0, 0.05, 0.1, 0.15], abs=0.04)
    assert len(done.samples) == 4
    assert 0.45 <= done.seconds < 0.7


async def test_lateness_of_the_client_is_reported() -> None:
    async def busy(prompt: str, max_tokens: int) -> Sample:
        if prompt == "0":
            time.sleep(0.12)  # noqa: ASYNC251 - a client that has no time for the next request
        return DONE

    done = await run_round(busy, jobs(0.0, 0.05), asyncio.Event())
    first, second = (outcome.lateness_ms for outcome in done.outcomes)
    assert first is not None
    assert second is not None
    assert first < 30
    assert second > 50


async def test_a_closed_loop_keeps_its_callers_busy_and_no_more() -> None:
    send = Slow(0.02)
    done = await run_round(send, jobs(*[None] * 10), asyncio.Event(), concurrency=3)
    assert send.most == 3
    assert len(done.samples) == 10
    assert {outcome.lateness_ms for outcome in done.outcomes} == {None}


async def test_a_closed_loop_ends_with_its_duration() -> None:
    done = await run_round(Slow(0.05), jobs(*[None] * 100), asyncio.Event(), 2, duration_seconds=0.12)
    assert 4 <= len(done.outcomes) <= 8


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_an_interrupt_keeps_what_ended_and_counts_what_did_not(concurrency: int | None) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.15, stop.set)

    async def send(prompt: str, max_tokens: int) -> Sample:
        await asyncio.sleep(0 if prompt in "01" else 30)
        return DONE

    began = time.perf_counter()
    times: list[float | None] = [0.0, 0.01, 0.02, 0.03, 5.0] if concurrency is None else [None] * 5
    done = await run_round(send, jobs(*times), stop, concurrency)
    assert time.perf_counter() - began < 2
    assert len(done.outcomes) == 2
    assert done.unfinished == 2


async def test_failures_are_outcomes_and_the_round_goes_on() -> None:
    async def send(prompt: str, max_tokens: int) -> Sample:
        if prompt == "1":
            raise RequestError("HTTP 429", "HTTP 429: full")
        return DONE

    done = await run_round(send, jobs(None, None, None), asyncio.Event(), 1)
    assert [outcome.error for outcome in done.outcomes] == [None, "HTTP 429", None]
    assert not done.gone


async def test_a_fault_of_the_bench_itself_is_no_outcome() -> None:
    async def send(prompt: str, max_tokens: int) -> Sample:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_round(send, jobs(None), asyncio.Event(), 1)


async def test_a_server_that_is_gone_ends_the_round() -> None:
    async def send(prompt: str, max_tokens: int) -> Sample:
        raise RequestError("connect", "refused")

    done = await run_round(send, jobs(*[None] * 500), asyncio.Event(), 1)
    assert done.gone
    assert len(done.outcomes) == GONE_AFTER
