"""Liveness, readiness and metrics of the operator itself.

Alive means more than a turning loop: a watch that silently stopped is found by comparing what a list shows
with what the watch has told. An API server that is down is no reason to restart the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from firsttoken_operator.metrics import OperatorMetrics

# kopf reconnects a silent watch after 70 s; one that is behind for longer than this is broken for good.
STALE_SECONDS = 180.0


@dataclass
class Freshness:
    """Whether the watch tells of what a list shows. now: seconds on a clock that never goes back.

    Objects are compared by (uid, generation): the generation grows with every change of a spec.
    """

    now: Callable[[], float]
    _seen: dict[str, int] = field(default_factory=dict)
    _missed_since: dict[str, float] = field(default_factory=dict)

    def seen(self, uid: str, generation: int, deleted: bool) -> None:
        """The watch told of this object."""
        if deleted:
            self._seen.pop(uid, None)
            self._missed_since.pop(uid, None)
            return
        self._seen[uid] = max(generation, self._seen.get(uid, 0))
        self._missed_since.pop(uid, None)

    def listed(self, objects: dict[str, int]) -> None:
        """A list showed exactly these: uid to generation."""
        missed = {uid for uid, generation in objects.items() if self._seen.get(uid, -1) < generation}
        missed |= set(self._seen) - set(objects)
        now = self.now()
        self._missed_since = {uid: self._missed_since.get(uid, now) for uid in missed}

    def lag_seconds(self) -> float:
        """For how long the longest missed change has been missed; 0 when none is."""
        return self.now() - min(self._missed_since.values()) if self._missed_since else 0.0


@dataclass
class Health:
    """What the probes answer. waiting_for: what the start waits for, empty once it is under way."""

    freshness: Freshness
    waiting_for: str = "the API server"
    listed_once: bool = False

    def alive(self) -> tuple[bool, str]:
        lag = self.freshness.lag_seconds()
        if lag > STALE_SECONDS:
            return False, f"the watch has missed a change for {lag:.0f} s"
        return True, "ok"

    def ready(self) -> tuple[bool, str]:
        if self.waiting_for:
            return False, f"waiting for {self.waiting_for}"
        if not self.listed_once:
            return False, "waiting for the first list of InferenceServices"
        return self.alive()


async def start_servers(
    health: Health, metrics: OperatorMetrics, host: str, metrics_port: int, health_port: int
) -> list[web.AppRunner]:
    """Serve /metrics on one port, /healthz and /readyz on the other; clean the runners up to stop."""

    def probe(check: Callable[[], tuple[bool, str]]) -> Callable[[web.Request], object]:
        async def answer(request: web.Request) -> web.Response:
            good, words = check()
            return web.Response(status=200 if good else 503, text=words + "\n")

        return answer

    async def exposition(request: web.Request) -> web.Response:
        metrics.watch_lag.set(health.freshness.lag_seconds())
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    probes, scrape = web.Application(), web.Application()
    probes.router.add_get("/healthz", probe(health.alive))  # type: ignore[arg-type]
    probes.router.add_get("/readyz", probe(health.ready))  # type: ignore[arg-type]
    scrape.router.add_get("/metrics", exposition)
    runners = []
    for application, port in ((probes, health_port), (scrape, metrics_port)):
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        runners.append(runner)
    return runners
