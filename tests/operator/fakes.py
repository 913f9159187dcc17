"""In-memory stand-ins: a cluster that applies like an API server, pods that answer, a clock one moves."""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.switches import SwitchMessage
from firsttoken_operator.cluster import BY_KIND, Body, ClusterError, ConflictError, Kind
from firsttoken_operator.runtime_client import PodAddress, PodError, PodErrorKind, PodState, SwitchState

Key = tuple[str, str | None, str]


class FakeCluster:
    """Objects by kind, namespace and name; every write is recorded in `writes`."""

    def __init__(self) -> None:
        self.objects: dict[Key, Body] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.refuse: dict[tuple[str, str], ClusterError] = {}
        self._count = itertools.count(1)

    def put(self, body: Body) -> Body:
        """Place an object as somebody else would, without recording a write."""
        metadata = body["metadata"]
        key = (body["kind"], metadata.get("namespace"), metadata["name"])
        stored = copy.deepcopy(body)
        before = self.objects.get(key)
        stored["metadata"].setdefault(
            "uid", before["metadata"]["uid"] if before else f"uid-{next(self._count)}"
        )
        stored["metadata"].setdefault("generation", 1)
        if before and before.get("spec") != stored.get("spec"):
            stored["metadata"]["generation"] = before["metadata"]["generation"] + 1
        stored["metadata"]["resourceVersion"] = str(next(self._count))
        self.objects[key] = stored
        return copy.deepcopy(stored)

    def named(self, kind: str, name: str, namespace: str | None = "default") -> Body:
        return self.objects[kind, namespace, name]

    def remove(self, kind: str, name: str, namespace: str | None = "default") -> None:
        del self.objects[kind, namespace, name]

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> list[Body]:
        return [
            copy.deepcopy(body)
            for (name, where, _), body in self.objects.items()
            if name == kind.kind
            and (namespace is None or where == namespace)
            and labels.items() <= (body["metadata"].get("labels") or {}).items()
        ]

    async def apply(self, manifest: Body) -> Body:
        self._write("apply", manifest)
        metadata = manifest["metadata"]
        live = self.objects.get((manifest["kind"], metadata.get("namespace"), metadata["name"]))
        version = metadata.get("resourceVersion")
        if version is not None and (live is None or live["metadata"]["resourceVersion"] != version):
            raise ConflictError(409, "the object has been modified")
        return self.put(_merged(live or {}, manifest))

    async def create(self, manifest: Body) -> Body:
        self._write("create", manifest)
        metadata = manifest["metadata"]
        if (manifest["kind"], metadata.get("namespace"), metadata["name"]) in self.objects:
            raise ConflictError(409, "already exists")
        return self.put(manifest)

    async def replace_status(self, body: Body) -> Body:
        self._write("status", body)
        metadata = body["metadata"]
        live = self.objects[body["kind"], metadata.get("namespace"), metadata["name"]]
        if live["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise ConflictError(409, "the object has been modified")
        return self.put({**live, "status": copy.deepcopy(body["status"])})

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        self.writes.append(("delete", kind.kind, name))
        live = self.objects.get((kind.kind, namespace, name))
        if live is not None and live["metadata"]["uid"] == uid:
            del self.objects[kind.kind, namespace, name]

    def _write(self, verb: str, body: Body) -> None:
        assert body["kind"] in BY_KIND
        self.writes.append((verb, body["kind"], body["metadata"]["name"]))
        error = self.refuse.get((verb, body["kind"]))
        if error is not None:
            raise error


def _merged(live: Any, given: Any) -> Any:
    if isinstance(live, dict) and isinstance(given, dict):
        return {**live, **{key: _merged(live.get(key), value) for key, value in given.items()}}
    return copy.deepcopy(given)


@dataclass
class FakePod:
    """A pod that answers: it runs the newest generation it was told, or raises what it is told to raise."""

    generation: int = 0
    states: dict[str, str] = field(default_factory=dict)
    error: PodError | None = None
    generate_error: PodError | None = None
    ttft: dict[str, Any] = field(default_factory=dict)
    messages: list[SwitchMessage] = field(default_factory=list)
    generated: int = 0
    token: str | None = None
    verified_with: str | None = None

    def state(self) -> PodState:
        names = [entry.name for entry in CATALOGUE]
        switches = tuple(SwitchState(name, self.states.get(name, "off")) for name in names)
        return PodState(self.generation, switches, ready=True, ttft=self.ttft)


class FakeRuntime:
    """A RuntimeClient over fake pods, by address."""

    def __init__(self) -> None:
        self.pods: dict[str, FakePod] = {}

    def pod(self, host: str) -> FakePod:
        return self.pods.setdefault(host, FakePod())

    async def state(self, pod: PodAddress, token: str) -> PodState:
        found = self.pod(pod.host)
        if found.error is not None:
            raise found.error
        return found.state()

    async def put_switches(self, pod: PodAddress, token: str, message: SwitchMessage) -> PodState:
        found = self.pod(pod.host)
        found.token = token
        if found.error is not None:
            raise found.error
        if message.generation < found.generation:
            raise PodError(PodErrorKind.AHEAD, f"generation {found.generation} is newer", found.generation)
        found.messages.append(message)
        found.generation = message.generation
        for name, setting in message.switches.items():
            found.states[name] = (
                setting.cause.value if setting.cause else ("on" if setting.enabled else "off")
            )
        return found.state()

    async def generate_one(self, pod: PodAddress, token: str, model: str) -> None:
        found = self.pod(pod.host)
        found.verified_with = token
        if found.generate_error is not None:
            raise found.generate_error
        found.generated += 1


class FakeClock:
    """Time that moves only in `advance`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._due: list[tuple[float, int, FakeTimer]] = []
        self._count = itertools.count()

    def time(self) -> float:
        return self.seconds

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._due, (self.seconds + delay, next(self._count), timer))
        return timer

    def advance(self, seconds: float) -> None:
        until = self.seconds + seconds
        while self._due and self._due[0][0] <= until:
            self.seconds, _, timer = heapq.heappop(self._due)
            if not timer.cancelled:
                timer.callback()
        self.seconds = until


@dataclass
class FakeTimer:
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


def service_body(name: str = "smollm", **spec: Any) -> Body:
    """An InferenceService as the API server returns it."""
    return {
        "apiVersion": "firsttoken.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "default", "uid": f"{name}-uid", "generation": 1},
        "spec": {
            "model": {"uri": "file:///models/smollm2.gguf"},
            "accelerator": {"type": "cpu", "count": 1},
            "replicas": 1,
            **spec,
        },
    }


def kill_switch_body(**spec: Any) -> Body:
    return {
        "apiVersion": "firsttoken.dev/v1alpha1",
        "kind": "KillSwitch",
        "metadata": {"name": "global", "uid": "kill-uid", "generation": 1},
        "spec": {"engaged": True, **spec},
    }


def pod_body(
    name: str = "smollm-a", *, template_hash: str = "h1", ip: str = "10.0.0.1", **change: Any
) -> Body:
    """A pod that runs and is ready; `change` replaces its containerStatus fields or, by name, more."""
    ready = change.pop("ready", True)
    started = change.pop("started", True)
    conditions = change.pop("conditions", [{"type": "Ready", "status": "True" if ready else "False"}])
    metadata = change.pop("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"{name}-uid",
            "labels": {
                "firsttoken.dev/service": "smollm",
                "pod-template-hash": template_hash,
            },
            **metadata,
        },
        "spec": {"containers": [{"name": "runtime", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {
            "phase": change.pop("phase", "Running"),
            "podIP": ip,
            "conditions": conditions,
            "containerStatuses": [
                {
                    "name": "runtime",
                    "ready": ready,
                    "started": started,
                    "restartCount": 0,
                    "containerID": f"containerd://{name}-0",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                    **change,
                }
            ],
        },
    }


def replica_set_body(deployment: Body, template_hash: str = "h1", revision: str = "1") -> Body:
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{deployment['metadata']['name']}-{template_hash}",
            "namespace": "default",
            "labels": {
                "app.kubernetes.io/name": "firsttoken-runtime",
                "app.kubernetes.io/instance": deployment["metadata"]["name"],
                "pod-template-hash": template_hash,
            },
            "annotations": {"deployment.kubernetes.io/revision": revision},
            "ownerReferences": [{"uid": deployment["metadata"]["uid"]}],
        },
    }
