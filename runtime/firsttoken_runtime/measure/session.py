"""A run of rounds: warm-up, then every load or scenario once per round, until done or stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from firsttoken_runtime.measure import scenarios
from firsttoken_runtime.measure.client import RequestError
from firsttoken_runtime.measure.figures import Better, Figure, row
from firsttoken_runtime.measure.load import Job, Round, run_round
from firsttoken_runtime.measure.options import BenchOptions
from firsttoken_runtime.measure.plan import Load, plan_round, priming
from firsttoken_runtime.measure.resources import Watch, Watched
from firsttoken_runtime.measure.server import Admin
from firsttoken_runtime.measure.summary import round_figures
from firsttoken_runtime.measure.target import Target

WARM_UP_TOKENS, WARM_UP_ANSWER = 64, 4
_BEHIND = "short behind long"

Answer = TypeVar("Answer")


@dataclass
class Session:
    """rounds: the figures found so far, one list per load and round. done: the rounds of loads, with their
    outcomes.

    cut: requests that were shortened to fit the model. failure: why the run ended before its time, if it did.
    """

    options: BenchOptions
    target: Target
    admin: Admin | None
    watched: Watched
    stop: asyncio.Event
    rounds: list[list[Figure]] = field(default_factory=list)
    done: list[Round] = field(default_factory=list)
    cut: int = 0
    failure: str | None = None

    @property
    def ended(self) -> bool:
        return self.stop.is_set() or self.failure is not None

    async def run_loads(self, loads: Mapping[str, Load]) -> None:
        """Every load once per round; a load's figures are those of its successful requests."""
        await self._warm_up()
        for number in range(self.options.rounds):
            for index, (name, load) in enumerate(loads.items()):
                if not self.ended:
                    self._say(f"round {number + 1} of {self.options.rounds}: {name}")
                    # Unlike the lengths, the words differ from load to load: none finds another's prefix.
                    await self._unless_stopped(self._load_round(name, load, number * len(loads) + index))
                    self._look_for_failure(number)

    async def run_scenarios(self, names: Sequence[str]) -> None:
        """Every scenario once per round. Raises RequestError when a request of one fails."""
        await self._warm_up()
        for number in range(self.options.rounds):
            for name in names:
                if not self.ended:
                    self._say(f"round {number + 1} of {self.options.rounds}: {name}")
                    if name == "short-behind-long" and self.admin is not None:
                        found = await self._unless_stopped(_chunked_and_not(self.target, self.admin))
                    else:
                        found = await self._unless_stopped(scenarios.SCENARIOS[name](self.target))
                    self.rounds.append(found or [])

    async def _warm_up(self) -> None:
        """Requests that count nowhere: they pay for compiled kernels, grown pools and first connections."""
        for _ in range(self.options.warm_up):
            if not self.ended:
                prompt = await self.target.prompts.of(WARM_UP_TOKENS)
                await self._unless_stopped(self.target.send(prompt, WARM_UP_ANSWER))

    async def _load_round(self, name: str, load: Load, number: int) -> None:
        target = self.target
        planned = plan_round(load, self.options.seed, number, target.max_tokens)
        jobs = [Job(entry, await target.prompts.write(entry.text)) for entry in planned]
        for text in priming(load, number):
            await target.send(await target.prompts.write(text), 1)
        watch = Watch(self.watched)
        await watch.start()
        done = await run_round(target.send, jobs, self.stop, load.concurrency, load.duration_seconds)
        used = await watch.stop(name)
        self.done.append(done)
        self.cut += sum(outcome.planned.cut for outcome in done.outcomes)
        if done.outcomes:
            done = await target.counted(done)
            self.rounds.append([*round_figures(name, done, self.options.slo), *used])

    def _look_for_failure(self, number: int) -> None:
        """A server that is gone, or that answers nothing, is not asked for ever."""
        last = self.done[-1] if self.done else Round((), 0.0)
        if last.gone:
            self.failure = (
                f"{self.options.url} stopped accepting connections: the figures are those until then"
            )
        elif last.outcomes and not last.samples and not self.stop.is_set():
            self.failure = (
                f"no request of round {number + 1} succeeded; the first: {last.outcomes[0].message}"
            )

    async def _unless_stopped(self, work: Coroutine[Any, Any, Answer]) -> Answer | None:
        """The result of `work`, None when the run is stopped first; a round of a load then ends by itself."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=2)
        stopped.cancel()
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None
        except RequestError:
            if self.stop.is_set():
                return None
            raise

    @staticmethod
    def _say(what: str) -> None:
        print(f"bench: {what}", file=sys.stderr)


async def _chunked_and_not(target: Target, admin: Admin) -> list[Figure]:
    """Short behind long with chunked prefill and without; the switch is put back as it was, come what may."""
    state = await admin.state()
    before = next(entry for entry in state["switches"] if entry["name"] == "chunkedPrefill")["state"] == "on"
    found: list[Figure] = []
    p99: list[float] = []
    try:
        for enabled in (True, False):
            await admin.set({"chunkedPrefill": {"enabled": enabled}})
            label = f"{_BEHIND}, chunkedPrefill {'on' if enabled else 'off'}"
            figures = await scenarios.short_behind_long(target, label)
            p99 += [entry.median for entry in figures if entry.figure == "short TTFT P99"]
            found += figures
    finally:
        await admin.set({"chunkedPrefill": {"enabled": before}})
    return [*found, row(_BEHIND, "short TTFT P99, off / on", [p99[1] / p99[0]], "x", Better.NEITHER)]
