"""Facts: what the API server says of a service's children, read into plain values.

Everything here is pure. `status.py` and the reconciler decide from these facts and from nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from firsttoken_operator.cluster import Body
from firsttoken_operator.desired.pod import ADMIN_PORT, ADMIN_PORT_NAME, API_PORT, API_PORT_NAME, CONTAINER
from firsttoken_operator.runtime_client import PodAddress
from firsttoken_operator.switches import Instance

REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
HASH_LABEL = "pod-template-hash"


@dataclass(frozen=True)
class Exit:
    """How a container ended. at: when, None when the kubelet did not say."""

    code: int
    reason: str
    message: str
    at: datetime | None = None
    ran_seconds: float | None = None


@dataclass(frozen=True)
class PodFacts:
    """One pod.

    container: id of the running container, None while none runs. started: its startup probe has passed.
    waiting: why the container does not run (ImagePullBackOff, CrashLoopBackOff, …), with the kubelet's words.
    last_exit: how the last container of it ended. unschedulable: the scheduler's words.
    """

    name: str
    uid: str
    template_hash: str | None
    address: PodAddress | None
    container: str | None
    running: bool
    started: bool
    ready: bool
    terminating: bool
    finished: bool
    restarts: int
    waiting: str | None = None
    waiting_message: str = ""
    last_exit: Exit | None = None
    unschedulable: str | None = None
    created_at: datetime | None = None
    container_started_at: datetime | None = None

    @property
    def counts(self) -> bool:
        """Whether it is one of the pods that are to serve: not stopping and not over."""
        return not self.terminating and not self.finished

    @property
    def instance(self) -> Instance | None:
        """The running container to talk to, or None when there is none."""
        if self.address is None or not self.running or not self.container:
            return None
        return Instance(self.uid, self.container, self.name, self.address)


@dataclass(frozen=True)
class WorkloadFacts:
    """The Deployment. settled: its controller has seen the newest spec.

    newest_hash: pod-template-hash of the newest ReplicaSet; None until it is known.
    refused: why the API server refuses its pods. deadline_exceeded: it gave up waiting.
    """

    exists: bool = False
    settled: bool = False
    desired: int = 0
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    newest_hash: str | None = None
    refused: str | None = None
    deadline_exceeded: bool = False


def workload_facts(deployment: Body | None, replica_sets: Sequence[Body]) -> WorkloadFacts:
    if deployment is None:
        return WorkloadFacts()
    status, spec = deployment.get("status") or {}, deployment.get("spec") or {}
    generation = deployment["metadata"].get("generation", 0)
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    failure, progressing = conditions.get("ReplicaFailure", {}), conditions.get("Progressing", {})
    settled = status.get("observedGeneration", 0) >= generation
    return WorkloadFacts(
        exists=True,
        settled=settled,
        desired=spec.get("replicas", 1),
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        newest_hash=_newest_hash(deployment, replica_sets) if settled else None,
        refused=failure.get("message") if failure.get("status") == "True" else None,
        deadline_exceeded=progressing.get("reason") == "ProgressDeadlineExceeded",
    )


def _newest_hash(deployment: Body, replica_sets: Sequence[Body]) -> str | None:
    uid = deployment["metadata"].get("uid")
    revision = (deployment["metadata"].get("annotations") or {}).get(REVISION_ANNOTATION)
    for replica_set in replica_sets:
        metadata = replica_set["metadata"]
        owned = any(reference.get("uid") == uid for reference in metadata.get("ownerReferences") or [])
        if owned and revision and (metadata.get("annotations") or {}).get(REVISION_ANNOTATION) == revision:
            found = (metadata.get("labels") or {}).get(HASH_LABEL)
            return str(found) if found else None
    return None


def pod_facts(pod: Body) -> PodFacts:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    container_status = _named(status.get("containerStatuses"), CONTAINER)
    state = container_status.get("state") or {}
    last = state.get("terminated") or (container_status.get("lastState") or {}).get("terminated")
    waiting = state.get("waiting") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    running = state.get("running") or {}
    return PodFacts(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        template_hash=(metadata.get("labels") or {}).get(HASH_LABEL),
        address=_address(spec, status),
        container=container_status.get("containerID") or None,
        running="running" in state,
        started=bool(container_status.get("started")),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating=bool(metadata.get("deletionTimestamp")),
        finished=status.get("phase") in ("Succeeded", "Failed"),
        restarts=container_status.get("restartCount", 0),
        waiting=waiting.get("reason"),
        waiting_message=waiting.get("message") or "",
        last_exit=_exit(last) if last else None,
        unschedulable=(scheduled.get("message") or "no node fits")
        if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
        else None,
        created_at=parse_time(metadata.get("creationTimestamp")),
        container_started_at=parse_time(running.get("startedAt")),
    )


def parse_time(text: str | None) -> datetime | None:
    """An API server time stamp; None when missing or not one."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
    except ValueError:
        return None


def _address(spec: Body, status: Body) -> PodAddress | None:
    host = status.get("podIP")
    if not host:
        return None
    ports = {
        port.get("name"): port.get("containerPort")
        for port in _named(spec.get("containers"), CONTAINER).get("ports") or []
    }
    return PodAddress(host, ports.get(API_PORT_NAME) or API_PORT, ports.get(ADMIN_PORT_NAME) or ADMIN_PORT)


def _exit(terminated: dict[str, Any]) -> Exit:
    started, finished = parse_time(terminated.get("startedAt")), parse_time(terminated.get("finishedAt"))
    return Exit(
        code=terminated.get("exitCode", -1),
        reason=terminated.get("reason") or "",
        message=(terminated.get("message") or "").strip(),
        at=finished,
        ran_seconds=(finished - started).total_seconds() if started and finished else None,
    )


def _named(items: Any, name: str) -> dict[str, Any]:
    for item in items or []:
        if item.get("name") == name:
            return dict(item)
    return {}
