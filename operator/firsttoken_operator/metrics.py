"""The operator's own metrics, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from firsttoken_api.switches import SwitchMessage
from firsttoken_operator.cluster import Body, Cluster, ClusterError, Kind
from firsttoken_operator.runtime_client import PodAddress, PodError, PodState, RuntimeClient

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics:
    """All metrics, under `firsttoken_operator_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "firsttoken_operator_reconciles_total",
            "Reconciles, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "firsttoken_operator_reconcile_seconds",
            "Time one reconcile took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.writes = Counter(
            "firsttoken_operator_writes_total",
            "Writes to the API server; none on an idle cluster.",
            ["kind", "verb"],
            registry=self.registry,
        )
        self.api_errors = Counter(
            "firsttoken_operator_api_errors_total",
            "Requests that the API server refused or did not answer, by HTTP status (0: no answer).",
            ["status"],
            registry=self.registry,
        )
        self.pushes = Counter(
            "firsttoken_operator_switch_pushes_total",
            "Switch messages sent to pods, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.push_seconds = Histogram(
            "firsttoken_operator_switch_push_seconds",
            "From sending a switch message to a pod until it answered that it is effective.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.services = Gauge(
            "firsttoken_operator_services", "InferenceServices seen.", registry=self.registry
        )
        self.queue_depth = Gauge(
            "firsttoken_operator_queue_depth", "Services that wait to be looked at.", registry=self.registry
        )
        self.watch_lag = Gauge(
            "firsttoken_operator_watch_lag_seconds",
            "For how long the watch has missed a change that a list shows; 0 when it has missed none.",
            registry=self.registry,
        )

    def reconciled(self, key: object, error: BaseException | None, seconds: float) -> None:
        """Count one reconcile (for WorkQueue's on_result)."""
        self.reconciles.labels("error" if error else "ok").inc()
        self.reconcile_seconds.observe(seconds)


class CountingCluster:
    """A Cluster that counts writes and errors of the one inside it."""

    def __init__(self, cluster: Cluster, metrics: OperatorMetrics) -> None:
        self._cluster = cluster
        self._metrics = metrics

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        with _Errors(self._metrics):
            return await self._cluster.get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> Sequence[Body]:
        with _Errors(self._metrics):
            return await self._cluster.list(kind, namespace, labels)

    async def apply(self, manifest: Body) -> Body:
        self._metrics.writes.labels(manifest["kind"], "apply").inc()
        with _Errors(self._metrics):
            return await self._cluster.apply(manifest)

    async def create(self, manifest: Body) -> Body:
        self._metrics.writes.labels(manifest["kind"], "create").inc()
        with _Errors(self._metrics):
            return await self._cluster.create(manifest)

    async def replace_status(self, body: Body) -> Body:
        self._metrics.writes.labels(body["kind"], "status").inc()
        with _Errors(self._metrics):
            return await self._cluster.replace_status(body)

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        self._metrics.writes.labels(kind.kind, "delete").inc()
        with _Errors(self._metrics):
            await self._cluster.delete(kind, namespace, name, uid)


class _Errors:
    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ClusterError):
            self._metrics.api_errors.labels(str(error.status)).inc()


class CountingRuntimeClient:
    """A RuntimeClient that counts and times the switch messages of the one inside it."""

    def __init__(self, client: RuntimeClient, metrics: OperatorMetrics, time: Callable[[], float]) -> None:
        """time: seconds on a clock that never goes back."""
        self._client = client
        self._metrics = metrics
        self._time = time

    async def state(self, pod: PodAddress, token: str) -> PodState:
        return await self._client.state(pod, token)

    async def put_switches(self, pod: PodAddress, token: str, message: SwitchMessage) -> PodState:
        started = self._time()
        try:
            state = await self._client.put_switches(pod, token, message)
        except PodError as error:
            self._metrics.pushes.labels(error.kind.value).inc()
            raise
        self._metrics.pushes.labels("ok").inc()
        self._metrics.push_seconds.observe(self._time() - started)
        return state

    async def generate_one(self, pod: PodAddress, token: str, model: str) -> None:
        await self._client.generate_one(pod, token, model)
