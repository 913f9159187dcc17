"""The queues between events and reconciles: who is looked at, and when.

watch events ──► saw_* ──► services queue ──► Reconciler.service ──► polls queue ──► Reconciler.poll
                    └────► kill-switch queue ──► Reconciler.kill_switch       (news) ──► services queue
slow resync ──► every service, whatever the watches say
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from firsttoken_operator.cluster import INFERENCE_SERVICE, Body, Cluster, ClusterError
from firsttoken_operator.health import Health
from firsttoken_operator.metrics import OperatorMetrics
from firsttoken_operator.reconcile import Reconciler
from firsttoken_operator.runtime_client import RuntimeClient
from firsttoken_operator.settings import Settings
from firsttoken_operator.switches import Pusher, ServiceKey
from firsttoken_operator.verify import Verifier
from firsttoken_operator.workqueue import WorkQueue

logger = logging.getLogger("firsttoken.operator")

KILL_KEY = "global"
# After this long a list is compared with the watch again, while a change is missed.
LAG_CHECK_SECONDS = 30.0


class Dispatcher:
    """Everything but the watch streams."""

    def __init__(
        self,
        cluster: Cluster,
        runtime_client: RuntimeClient,
        settings: Settings,
        metrics: OperatorMetrics,
        health: Health,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._metrics = metrics
        self._health = health
        self._seen: dict[ServiceKey, tuple[Any, ...]] = {}
        self._seen_kill: tuple[Any, ...] | None = None
        self.services: WorkQueue[ServiceKey] = WorkQueue(self._service, on_result=metrics.reconciled)
        self.kill: WorkQueue[str] = WorkQueue(self._kill)
        self.polls: WorkQueue[ServiceKey] = WorkQueue(self._poll)
        self._pusher = Pusher(runtime_client, self.services.add)
        self._verifier = Verifier(runtime_client, self.services.add)
        self.reconciler = Reconciler(
            cluster, self._pusher, self._verifier, settings, on_report=lambda: self.kill.add(KILL_KEY)
        )

    def saw_service(self, body: Mapping[str, Any], deleted: bool) -> None:
        """An InferenceService was listed, added, changed or deleted."""
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        self._health.freshness.seen(metadata["uid"], metadata.get("generation", 0), deleted)
        # Our own status writes come back as events too; only what can change the outcome is looked at.
        print_now = (
            metadata["uid"],
            metadata.get("generation"),
            metadata.get("labels"),
            metadata.get("annotations"),
            metadata.get("deletionTimestamp"),
        )
        if deleted:
            self._seen.pop(key, None)
            self.kill.add(KILL_KEY)
        elif self._seen.get(key) == print_now:
            return
        else:
            self._seen[key] = print_now
        self._metrics.services.set(len(self._seen))
        self.services.add(key)

    def saw_kill_switch(self, body: Mapping[str, Any], deleted: bool) -> None:
        """The KillSwitch was listed, added, changed or deleted: every service is looked at, at once."""
        metadata = body["metadata"]
        print_now = (metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp"), deleted)
        if print_now == self._seen_kill:
            # A status write, ours or another operator's (with other namespaces): answering it with one of
            # our own would have the two write in turns for ever.
            return
        self._seen_kill = print_now
        for key in list(self._seen):
            self.services.add(key)
        self.kill.add(KILL_KEY)

    def saw_child(self, namespace: str, service: str | None) -> None:
        """A Deployment, Pod or ConfigMap of a service changed."""
        if service:
            self.services.add((namespace, service))

    async def resync(self) -> None:
        """Look at every service, and compare the list with what the watch told. Raises ClusterError."""
        bodies: list[Body] = []
        for namespace in self._settings.namespaces or (None,):
            bodies += await self._cluster.list(INFERENCE_SERVICE, namespace, {})
        self._health.freshness.listed(
            {body["metadata"]["uid"]: body["metadata"].get("generation", 0) for body in bodies}
        )
        for body in bodies:
            self.services.add((body["metadata"]["namespace"], body["metadata"]["name"]))
        self.kill.add(KILL_KEY)
        self._health.listed_once = True

    async def resync_forever(self) -> None:
        """Resync now and then; sooner while the watch is behind or the API server does not answer."""
        while True:
            wait = self._settings.resync_seconds
            try:
                await self.resync()
                if self._health.freshness.lag_seconds() > 0 or not self._seen:
                    wait = LAG_CHECK_SECONDS
            except ClusterError as error:
                logger.warning("resync: %s", error)
                wait = LAG_CHECK_SECONDS
            await asyncio.sleep(wait)

    async def aclose(self) -> None:
        for queue in (self.polls, self.services, self.kill):
            await queue.close()
        await self._verifier.aclose()
        await self._pusher.aclose()

    async def _service(self, key: ServiceKey) -> float | None:
        self._metrics.queue_depth.set(self.services.depth())
        again = await self.reconciler.service(key)
        if self.reconciler.knows(key):
            self.polls.add_after(key, self._settings.poll_seconds)
        else:
            self.services.forget(key)
            self.polls.forget(key)
        return again

    async def _kill(self, key: str) -> float | None:
        return await self.reconciler.kill_switch()

    async def _poll(self, key: ServiceKey) -> float | None:
        if not self.reconciler.knows(key):
            return None
        if await self.reconciler.poll(key):
            self.services.add(key)
        return self._settings.poll_seconds
