"""A level-based work queue: a key says which object to look at, never what happened to it.

    add ──► waiting ──► running ──► done
              ▲            │ add while running: once more afterwards
              └── timer ◄──┘ failed: again after a backoff; asked for: again after a delay

One worker per key at a time, many keys at once. Adding a key that waits already changes nothing, so a burst
of events is one reconcile, and the last one always sees the state after the last event.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds, and a way to be called later; the event loop is one, tests bring their own."""

    def time(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer: ...


@dataclass(frozen=True)
class Backoff:
    """How long to wait after the n-th failure in a row: first, doubled each time, at most `most`."""

    first_seconds: float = 0.1
    most_seconds: float = 15.0

    def after(self, failures: int) -> float:
        return min(self.first_seconds * 2.0 ** min(failures - 1, 32), self.most_seconds)


class WorkQueue(Generic[K]):
    """Calls `reconcile(key)` for every key added; it may return seconds after which to look again."""

    def __init__(
        self,
        reconcile: Callable[[K], Awaitable[float | None]],
        *,
        backoff: Backoff | None = None,
        workers: int = 32,
        clock: Clock | None = None,
        on_result: Callable[[K, BaseException | None, float], None] | None = None,
    ) -> None:
        """on_result: told the key, the error or None, and the seconds it took, after every reconcile."""
        self._reconcile = reconcile
        self._backoff = backoff or Backoff()
        self._workers = workers
        self._clock = clock
        self._on_result = on_result
        self._waiting: deque[K] = deque()
        self._queued: set[K] = set()
        self._running: dict[K, asyncio.Task[None]] = {}
        self._again: set[K] = set()
        self._timers: dict[K, tuple[float, Timer]] = {}
        self._failures: dict[K, int] = {}
        self._closed = False

    def add(self, key: K) -> None:
        """Look at this key as soon as a worker is free."""
        if self._closed:
            return
        self._cancel_timer(key)
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._waiting.append(key)
            # Soon and not now: what is added in the same turn of the loop is still the same reconcile.
            asyncio.get_running_loop().call_soon(self._start)

    def add_after(self, key: K, seconds: float) -> None:
        """Look at this key in at most that many seconds; an earlier date already set stays."""
        if self._closed:
            return
        due = self._time() + seconds
        timer = self._timers.get(key)
        if key in self._queued or key in self._again or (timer is not None and timer[0] <= due):
            return
        self._cancel_timer(key)
        clock: Clock = self._clock or asyncio.get_running_loop()
        self._timers[key] = (due, clock.call_later(seconds, lambda: self.add(key)))

    def forget(self, key: K) -> None:
        """Drop the failures and the date of a key whose object is gone."""
        self._cancel_timer(key)
        self._failures.pop(key, None)

    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    async def idle(self) -> None:
        """Wait until no key waits and none runs; keys with a date in the future do not count."""
        while self._running or self._waiting:
            if self._running:
                await asyncio.wait(list(self._running.values()))
            else:
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Take no more keys and stop what runs."""
        self._closed = True
        for key in list(self._timers):
            self._cancel_timer(key)
        self._waiting.clear()
        self._queued.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _time(self) -> float:
        return self._clock.time() if self._clock else asyncio.get_running_loop().time()

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer[1].cancel()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._workers and not self._closed:
            key = self._waiting.popleft()
            self._queued.discard(key)
            self._running[key] = asyncio.get_running_loop().create_task(self._work(key))

    async def _work(self, key: K) -> None:
        started = self._time()
        error: BaseException | None = None
        after: float | None = None
        try:
            after = await self._reconcile(key)
        except asyncio.CancelledError:
            raise
        except Exception as failure:
            error = failure
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            after = self._backoff.after(failures)
            logger.warning("%s: %s; again in %.1f s", key, failure or type(failure).__name__, after)
            logger.debug("%s failed", key, exc_info=failure)
        else:
            self._failures.pop(key, None)
        finally:
            self._running.pop(key, None)
        if self._on_result is not None:
            self._on_result(key, error, self._time() - started)
        again = key in self._again
        self._again.discard(key)
        if again and error is None:
            self.add(key)
        elif after is not None:
            # What fails must not spin on events that it causes itself: one second is soon enough then.
            self.add_after(key, min(after, 1.0) if again else after)
        self._start()
