"""A cluster with one service, its pods and the reconciler, all in memory."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from tests.operator.fakes import FakeCluster, FakeRuntime, replica_set_body, service_body

from firsttoken_operator.accelerators import BUILT_IN
from firsttoken_operator.desired.switches import read_switches
from firsttoken_operator.reconcile import Reconciler
from firsttoken_operator.settings import Settings
from firsttoken_operator.switches import Pusher
from firsttoken_operator.verify import Verifier

KEY = ("default", "smollm")
SETTINGS = Settings(
    runtime_image="runtime:1",
    pull_policy="IfNotPresent",
    namespaces=(),
    operator_namespace="firsttoken",
    accelerators=BUILT_IN,
)


class World:
    """A cluster with one service, its pods, and the reconciler."""

    def __init__(self) -> None:
        self.cluster, self.runtime, self.news = FakeCluster(), FakeRuntime(), []
        self.start_operator()

    def start_operator(self, settings=SETTINGS) -> None:
        """A new operator process: it remembers nothing."""
        self.pusher = Pusher(self.runtime, self.news.append)
        self.verifier = Verifier(self.runtime, self.news.append)
        self.kill_news = 0
        self.reconciler = Reconciler(
            self.cluster,
            self.pusher,
            self.verifier,
            settings,
            on_report=self._count,
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
        )

    def _count(self) -> None:
        self.kill_news += 1

    def serve(self, **spec):
        """Create or change the InferenceService."""
        before = self.cluster.objects.get(("InferenceService", *KEY))
        body = service_body(**spec)
        if before:
            body = {**body, "metadata": {**body["metadata"], "generation": before["metadata"]["generation"]}}
            body["status"] = before.get("status", {})
        return self.cluster.put(body)

    def run_pods(self, *pods, template_hash="h1"):
        """What the Deployment's controller and the kubelet would do."""
        deployment = self.cluster.objects["Deployment", *KEY]
        generation = deployment["metadata"]["generation"]
        deployment["status"] = {"observedGeneration": generation, "replicas": len(pods)}
        deployment["metadata"].setdefault("annotations", {})["deployment.kubernetes.io/revision"] = "1"
        self.cluster.put(deployment)
        self.cluster.put(replica_set_body(deployment, template_hash))
        for pod in pods:
            self.cluster.put(pod)

    async def reconcile(self, times=1):
        for _ in range(times):
            again = await self.reconciler.service(KEY)
            await asyncio.sleep(0.01)
        return again

    def status(self):
        return self.cluster.named("InferenceService", "smollm").get("status", {})

    def condition(self, name):
        found = next(item for item in self.status()["conditions"] if item["type"] == name)
        return found["status"], found["reason"]

    def switches(self):
        return read_switches(self.cluster.named("ConfigMap", "smollm-switches"))

    def writes(self, *kinds):
        return [write for write in self.cluster.writes if not kinds or write[1] in kinds]
