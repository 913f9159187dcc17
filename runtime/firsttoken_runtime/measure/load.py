"""Sending a round: open loop (at its times, whatever the server does) or closed loop (so many at a time)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from firsttoken_runtime.measure.client import RequestError, Sample
from firsttoken_runtime.measure.plan import Planned

# So many requests in a row that cannot even connect mean that the server is gone.
GONE_AFTER = 20

Send = Callable[[str, int], Awaitable[Sample]]


@dataclass(frozen=True)
class Job:
    """A planned request and the prompt that was written for it."""

    planned: Planned
    prompt: str


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times in seconds after the round's start; `error` is its kind."""

    planned: Planned
    sent_seconds: float
    ended_seconds: float
    sample: Sample | None
    error: str | None = None
    message: str = ""

    @property
    def lateness_ms(self) -> float | None:
        """How much later than planned it was sent; None in a closed loop, which plans no times."""
        at = self.planned.at_seconds
        return None if at is None else max(self.sent_seconds - at, 0.0) * 1e3


@dataclass(frozen=True)
class Round:
    """All that ended, how long the round took, how many were cut off by an interrupt, and whether the server
    is gone."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    unfinished: int = 0
    gone: bool = False

    @property
    def samples(self) -> list[Sample]:
        return [outcome.sample for outcome in self.outcomes if outcome.sample is not None]


async def run_round(
    send: Send,
    jobs: Sequence[Job],
    stop: asyncio.Event,
    concurrency: int | None = None,
    duration_seconds: float | None = None,
) -> Round:
    """Send `jobs` and wait for their answers; `stop` ends it early, with what there is.

    concurrency: so many at a time, each next one when one has ended; None: at the planned times.
    duration_seconds: a closed loop sends nothing after it.
    """
    sending = _Sending(send, stop)
    if concurrency is None:
        await sending.open_loop(jobs)
    else:
        await sending.closed_loop(jobs, concurrency, duration_seconds)
    return sending.round()


class _Sending:
    """The state of a round while it runs."""

    def __init__(self, send: Send, stop: asyncio.Event) -> None:
        self._send = send
        self._stop = stop
        self._started = time.perf_counter()
        self._outcomes: list[Outcome] = []
        self._unfinished = 0
        self._refused = 0  # connections, in a row
        self._gone = asyncio.Event()

    async def open_loop(self, jobs: Sequence[Job]) -> None:
        tasks = []
        for job in jobs:
            delay = (job.planned.at_seconds or 0.0) - self._now()
            if delay > 0:
                await self._pause(delay)
            if self._ended():
                break
            tasks.append(asyncio.create_task(self._one(job)))
        await self._finish(tasks)

    async def closed_loop(
        self, jobs: Sequence[Job], concurrency: int, duration_seconds: float | None
    ) -> None:
        left = iter(jobs)

        async def caller() -> None:
            for job in left:
                if self._ended() or (duration_seconds is not None and self._now() > duration_seconds):
                    return
                await self._one(job)

        await self._finish([asyncio.create_task(caller()) for _ in range(min(concurrency, len(jobs)))])

    def round(self) -> Round:
        ended = max((outcome.ended_seconds for outcome in self._outcomes), default=self._now())
        ordered = sorted(self._outcomes, key=lambda outcome: outcome.sent_seconds)
        return Round(tuple(ordered), ended, self._unfinished, self._gone.is_set())

    async def _one(self, job: Job) -> None:
        sent = self._now()
        sample, kind, message = None, None, ""
        try:
            sample = await self._send(job.prompt, job.planned.output_tokens)
        except RequestError as error:
            kind, message = error.kind, str(error)
        except asyncio.CancelledError:
            self._unfinished += 1
            raise
        self._refused = self._refused + 1 if kind == "connect" else 0
        if self._refused >= GONE_AFTER:
            self._gone.set()
        self._outcomes.append(Outcome(job.planned, sent, self._now(), sample, kind, message))

    async def _finish(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for `tasks`; when the run ends before them, cancel those that are left."""
        ends = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._gone.wait())]
        all_done = asyncio.gather(*tasks, return_exceptions=True)
        waited: list[asyncio.Future[Any]] = [all_done, *ends]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in (*ends, *tasks):
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._gone.is_set()

    def _now(self) -> float:
        return time.perf_counter() - self._started
