"""The state behind both ports: what is loaded, whether requests are taken, which switches are in force."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from firsttoken_api.switches import SwitchMessage
from firsttoken_runtime import ipc
from firsttoken_runtime.api.engine_client import EngineClient, EngineLost, lost_line
from firsttoken_runtime.api.errors import ApiError
from firsttoken_runtime.api.prepare import vocabulary
from firsttoken_runtime.api.recorder import Recorder
from firsttoken_runtime.api.respond import engine_lost
from firsttoken_runtime.metrics import Metrics
from firsttoken_runtime.switches import Verdict, judge, refusal

if TYPE_CHECKING:
    from firsttoken_runtime.model.tokenizer import Tokenizer

log = logging.getLogger("firsttoken")
Result = TypeVar("Result")

# A pulse comes every half second, also while a step runs: without it the process is stopped, or starved.
SILENT_SECONDS = 3.0
# Requests that run are given up when it has been silent for so long.
GIVE_UP_SECONDS = 10.0
# One step may be long (a whole prompt on CPU with chunked prefill off). It is doubted after so long, or so
# many times what it should take by the measured speed, whichever is more; later the process counts as dead.
LONG_STEP_SECONDS, LONG_STEP_TIMES = 60.0, 10.0
DEAD_STEP_SECONDS, DEAD_STEP_TIMES = 180.0, 30.0
# Requests wait, none runs, for so long: no step will ever take them.
STUCK_AFTER_SECONDS = 30.0
WATCH_SECONDS = 0.5
ANSWER_SECONDS = 30.0
_STATE_SECONDS = 3.0


class StaleGeneration(Exception):
    """A switch message that is older than, or contradicts, the one in force (`generation`)."""

    def __init__(self, text: str, generation: int) -> None:
        super().__init__(text)
        self.generation = generation


@dataclass
class Service:
    """Everything the routes need; made once per server.

    message: the switches in force. tokenizer and ready are None until they are loaded.
    """

    served_name: str
    engine: EngineClient
    message: SwitchMessage
    metrics: Metrics
    version: str
    max_body_bytes: int = 8 << 20
    # Seeds of requests that bring none: the same order of requests gives the same answers.
    seeds: random.Random = field(default_factory=random.Random)
    recorder: Recorder | None = None
    clock: Callable[[], float] = time.monotonic
    tokenizer: Tokenizer | None = None
    ready: ipc.Ready | None = None
    draining: bool = False
    running: int = 0

    def __post_init__(self) -> None:
        self.records = self.recorder or Recorder(self.metrics)
        self.started_at = self.clock()
        self.created = int(time.time())
        self.engine_state: dict[str, Any] = {}
        self.engine_stats: dict[str, Any] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._none_running_since: float | None = None
        self._switching = asyncio.Lock()
        # Tokenising leaves the interpreter lock: threads keep long prompts from delaying other streams.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def load_vocabulary(self) -> None:
        """Give the engine's line what grammars are made of; once, because it takes tenths of a second."""
        if self.engine.vocabulary is None:
            tokenizer, _ = self.loaded()
            self.engine.vocabulary = await self.in_thread(lambda: vocabulary(tokenizer))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def count(self, change: int) -> None:
        """Requests came (+1) or were answered (-1)."""
        self.running += change
        if self.running:
            self.idle.clear()
        else:
            self.idle.set()

    # What the engine tells

    def on_ready(self, ready: ipc.Ready) -> None:
        self.ready = ready
        self.metrics.cache_config(ready.page_tokens, ready.total_pages)
        self.on_heartbeat(ready.state, ready.stats)

    def on_heartbeat(self, state: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        self.engine_state, self.engine_stats = dict(state), dict(stats)
        self.metrics.engine(self.engine_state, self.engine_stats)
        stuck = bool(stats.get("waiting")) and not stats.get("running")
        if not stuck:
            self._none_running_since = None
        elif self._none_running_since is None:
            self._none_running_since = self.clock()

    # Whether requests are taken

    def not_alive(self) -> str | None:
        """Why this process should be restarted; None when it is well (loading counts as well)."""
        if self.engine.ended.done():
            return f"the engine stopped: {lost_line(self.engine.ended.result())}"
        if self.ready is None:
            return None
        if (silent := self.silent_seconds()) > SILENT_SECONDS:
            return f"the engine process gives no sign of life for {silent:.0f} s; it is stopped, or starved"
        if (stuck := self._stuck_seconds()) > STUCK_AFTER_SECONDS:
            return f"the engine is stuck: {self._stuck_reason()} for {stuck:.0f} s"
        return self._too_long(DEAD_STEP_SECONDS, DEAD_STEP_TIMES)

    def not_ready(self) -> str | None:
        """Why no new requests should be sent here; None when they should."""
        if self.draining:
            return "draining: the server is shutting down"
        if (dead := self.not_alive()) is not None:
            return dead
        if self.ready is None or self.tokenizer is None:
            return "loading the model"
        if (stalled := self.engine_stats.get("stalled")) is not None:
            return f"the engine is stuck: {stalled}"
        return self._too_long(LONG_STEP_SECONDS, LONG_STEP_TIMES)

    def silent_seconds(self) -> float:
        """Since the engine process was heard last."""
        return self.clock() - self.engine.heard_at

    def step_seconds(self) -> float | None:
        """How long the step under way has been running; None when the engine waits."""
        busy = self.engine.pulse.busy_seconds
        return None if busy is None else busy + self.clock() - self.engine.pulse_at

    def hopeless(self) -> str | None:
        """Why requests that run will get no more tokens; None when they may."""
        if SILENT_SECONDS < self.silent_seconds() <= GIVE_UP_SECONDS:
            return None
        return self.not_alive()

    def _stuck_seconds(self) -> float:
        return 0.0 if self._none_running_since is None else self.clock() - self._none_running_since

    def _stuck_reason(self) -> str:
        return self.engine_stats.get("stalled") or f"{self.engine_stats['waiting']} waiting, none running"

    def _too_long(self, seconds: float, times: float) -> str | None:
        step, expected = self.step_seconds(), self.engine.pulse.expected_seconds
        if step is None or step <= max(seconds, times * (expected or 0.0)):
            return None
        told = "" if expected is None else f", which should take {expected:.1f} s"
        return f"the engine has been in one step for {step:.0f} s{told}"

    async def watch(self) -> None:
        """Log when requests are no longer taken, and when they are again; give up those that cannot go on."""
        told = given_up = None
        while True:
            slept_at = self.clock()
            await asyncio.sleep(WATCH_SECONDS)
            # Having been stopped ourselves we have not read what the engine sent: look again.
            if self.clock() - slept_at > WATCH_SECONDS + 1 or self.engine.ended.done():
                continue
            reason = self.not_ready()
            if not self.draining and (reason is None) != (told is None):
                log.error("not ready: %s", reason) if reason is not None else log.info("ready again")
                told = reason
            hopeless = self.hopeless()
            if hopeless is not None and self.engine.active:
                if given_up is None:
                    log.error("giving up those that run (%d): %s", self.engine.active, hopeless)
                self.engine.fail_all(_unresponsive(hopeless))
            given_up = hopeless

    def loaded(self) -> tuple[Tokenizer, ipc.Ready]:
        """Tokenizer and engine, for a request. Raises ApiError 503 when there are none, or no more."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; send the request again, to another replica",
                code="draining",
                retry_after_seconds=1,
                close=True,
            )
        if self.engine.ended.done():
            raise engine_lost(EngineLost(lost_line(self.engine.ended.result())))
        if (dead := self.not_alive()) is not None:
            raise _unresponsive(dead)
        if self.tokenizer is None or self.ready is None:
            raise ApiError(
                503, "the model is still loading; try again", code="loading", retry_after_seconds=2
            )
        return self.tokenizer, self.ready

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here. No name means the served one."""
        if name is not None and name != self.served_name:
            raise ApiError(
                404,
                f"model {name[:200]!r} is not served here; use {self.served_name!r}",
                code="model_not_found",
                param="model",
            )

    # Switches

    async def set_switches(self, message: SwitchMessage) -> dict[str, Any]:
        """The state once the message is in force.

        Raises StaleGeneration, ApiError 503 (loading, or not in force within ANSWER_SECONDS), EngineLost.
        """
        async with self._switching:
            verdict = judge(self.message, message)
            if verdict in (Verdict.OLDER, Verdict.CONFLICT):
                raise StaleGeneration(refusal(self.message, message), self.message.generation)
            if verdict is Verdict.SAME:
                return await self.state()
            if self.ready is None and not self.engine.ended.done():
                raise ApiError(
                    503, "the model is still loading; try again", code="loading", retry_after_seconds=2
                )
            try:
                reply = await self.engine.set_switches(message, ANSWER_SECONDS)
            except TimeoutError:
                raise ApiError(
                    503,
                    f"the engine did not take generation {message.generation} within {ANSWER_SECONDS:.0f} s; "
                    "it may still do so: look at the state",
                    code="engine_busy",
                    retry_after_seconds=1,
                ) from None
            if not reply["taken"]:
                generation = int(reply["generation"])
                raise StaleGeneration(f"the engine has generation {generation}", generation)
            self.message = message
            self._take_state(reply)
            log.info(
                "switches: generation %d is in force (%s)", message.generation, describe(reply["switches"])
            )
            return self.state_json()

    def _take_state(self, reply: Mapping[str, Any]) -> None:
        self.engine_state = {key: reply[key] for key in ("generation", "switches", "pages", "kv", "memory")}
        if "stats" in reply:
            self.engine_stats = dict(reply["stats"])
        self.metrics.engine(self.engine_state, self.engine_stats)

    # What is told

    async def state(self) -> dict[str, Any]:
        """The state JSON, fresh from the engine; its last heartbeat when it is in a long step or gone."""
        if self.ready is not None and not self.engine.ended.done():
            try:
                self._take_state(await self.engine.state(_STATE_SECONDS))
            except (TimeoutError, EngineLost):
                log.warning("state: the engine is in a long step; its last heartbeat is shown")
        return self.state_json()

    def state_json(self) -> dict[str, Any]:
        """The state JSON of the admin port."""
        now_ns, window = time.monotonic_ns(), self.records.window
        pages = dict.fromkeys(("free", "cached", "locked", "owned", "total"), 0)
        reason = self.not_ready()
        return {
            "generation": self.engine_state.get("generation", self.message.generation),
            "switches": self.engine_state.get("switches", []),
            "pages": self.engine_state.get("pages", pages),
            "kv": self.engine_state.get("kv", {}),
            "memory": self.engine_state.get("memory", {}),
            "model": self.served_name,
            "ready": reason is None,
            "reason": reason,
            "draining": self.draining,
            "version": self.version,
            "uptime_seconds": self.clock() - self.started_at,
            "engine": {
                "silent_seconds": round(self.silent_seconds(), 3),
                "step_seconds": self.step_seconds(),
            },
            "requests": {
                "running": self.engine_stats.get("running", 0),
                "waiting": self.engine_stats.get("waiting", 0),
            },
            "ttft": window.ttft(now_ns),
            "prompt_tokens": window.prompt_tokens(now_ns),
            "prompt_lengths": window.lengths(now_ns),
            "prefill_cost": self.engine_stats.get("prefill_cost"),
            "stats": self.engine_stats,
        }


def _unresponsive(reason: str) -> ApiError:
    return ApiError(503, reason, code="engine_unresponsive", retry_after_seconds=5, close=True)


def describe(switches: list[dict[str, Any]]) -> str:
    """Switches for a log line, those that are off left out: `prefixCache on, chunkedPrefill killed`."""
    return ", ".join(f"{item['name']} {item['state']}" for item in switches if item["state"] != "off")
