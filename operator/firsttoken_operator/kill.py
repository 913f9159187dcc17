"""`firsttoken kill` and `release`: the kill switch by hand, with the operator dead or alive.

Writes the KillSwitch, then every service's switches ConfigMap, then tells every pod through the API server's
pod proxy. It decides with the very functions the operator decides with, so that an operator that comes back
finds nothing to change.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firsttoken_api.resources import KillSwitch
from firsttoken_api.resources.kill_switch import KILL_SWITCH_NAME
from firsttoken_api.switches import SwitchMessage
from firsttoken_operator.apply import Applier, NameTakenError
from firsttoken_operator.cluster import (
    CONFIG_MAP,
    INFERENCE_SERVICE,
    KILL_SWITCH,
    POD,
    SECRET,
    Body,
    ClusterError,
    ConflictError,
    ConnectError,
    KubeCluster,
)
from firsttoken_operator.desired.access import read_token
from firsttoken_operator.desired.names import SERVICE_LABEL, admin_secret_name, switches_name
from firsttoken_operator.desired.switches import read_switches, switches_config_map, written_generation
from firsttoken_operator.invalid_spec import Asked, read_asked, read_kill_switch
from firsttoken_operator.kill_status import PodReport, ServiceReport, kill_status
from firsttoken_operator.observe import PodFacts, pod_facts
from firsttoken_operator.runtime_client import PodError, PodErrorKind, PodState, answer_of, parse_state
from firsttoken_operator.switches import killed_here, plan

# The API server keeps Authorization for itself, so the pod's token travels in a header of its own.
TOKEN_HEADER = "X-Firsttoken-Token"  # noqa: S105 - the name of a header
RETRY_SECONDS = 0.25
ATTEMPTS = 5
USER_ERROR, NOT_CONFIRMED = 2, 1


@dataclass(frozen=True)
class KillOptions:
    """selector: labels as `KEY=VALUE,…`. timeout_seconds: how long pods may take to confirm."""

    engaged: bool
    optimizations: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    selector: str | None = None
    reason: str | None = None
    kubeconfig: Path | None = None
    context: str | None = None
    timeout_seconds: float = 10.0
    json: bool = False


class KillError(Exception):
    """Something that the person at the terminal can put right; the text says how."""


@dataclass(frozen=True)
class PodResult:
    """seconds: from the start of the command to the confirmation. why: None when confirmed."""

    pod: str
    confirmed: bool
    seconds: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class ServiceResult:
    """generation: of the switches the pods are to run; None when they could not be written."""

    namespace: str
    name: str
    generation: int | None
    pods: tuple[PodResult, ...] = ()
    why: str | None = None

    @property
    def confirmed(self) -> bool:
        return self.why is None and all(pod.confirmed for pod in self.pods)


def run(options: KillOptions) -> int:
    """Exit code: 0 when every pod confirmed, 1 when one did not, 2 when it could not be tried."""
    try:
        return asyncio.run(_run(options))
    except (KillError, ConnectError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR


async def _run(options: KillOptions) -> int:
    started = time.monotonic()
    spec = kill_spec(options)
    kubeconfig = str(options.kubeconfig) if options.kubeconfig else None
    cluster = await KubeCluster.connect(kubeconfig, options.context)
    try:
        kill_switch, warning = await _write_kill_switch(cluster, options.engaged, spec)
        bodies = await cluster.list(INFERENCE_SERVICE, None, {})
        push = _Push(cluster, kill_switch, started, options.timeout_seconds)
        results = await asyncio.gather(*(push.service(body) for body in bodies))
        await _write_status(cluster, bodies, results)
    finally:
        await cluster.aclose()
    concerned = [
        result
        for result, body in zip(results, bodies, strict=True)
        if kill_switch is None
        or kill_switch.spec.concerns(result.namespace, body["metadata"].get("labels") or {})
    ]
    seconds = time.monotonic() - started
    show = _show_json if options.json else _show_text
    show(options, concerned, warning, seconds)
    return 0 if warning is None and all(result.confirmed for result in concerned) else NOT_CONFIRMED


def kill_spec(options: KillOptions) -> Body:
    """`spec` of the KillSwitch. Raises KillError for a selector that is none."""
    spec: Body = {
        "engaged": True,
        "optimizations": sorted(set(options.optimizations)),
        "namespaces": sorted(set(options.namespaces)),
    }
    if options.selector:
        pairs = [part.partition("=") for part in options.selector.split(",")]
        if any(not separator or not name.strip() for name, separator, _ in pairs):
            raise KillError(f"selector {options.selector!r}: write KEY=VALUE, with commas between several")
        labels = {name.strip(): value.removeprefix("=").strip() for name, _, value in pairs}
        spec["selector"] = {"matchLabels": labels}
    if options.reason:
        spec["reason"] = options.reason
    return spec


async def _write_kill_switch(
    cluster: KubeCluster, engaged: bool, spec: Body
) -> tuple[KillSwitch | None, str | None]:
    """Write the KillSwitch; returns it, and a warning when it could not be written.

    A kill goes on without it, because the pods can still be told; a release without one to release too.
    """
    operation = (
        {"op": "replace", "path": "/spec", "value": spec}
        if engaged
        else {"op": "replace", "path": "/spec/engaged", "value": False}
    )
    try:
        body = await cluster.patch(KILL_SWITCH, None, KILL_SWITCH_NAME, [operation])
    except ClusterError as error:
        if error.status != 404:
            return _without_kill_switch(engaged, spec, error)
        if not engaged:
            return None, None
        manifest = {
            "apiVersion": KILL_SWITCH.api_version,
            "kind": KILL_SWITCH.kind,
            "metadata": {"name": KILL_SWITCH_NAME},
            "spec": spec,
        }
        try:
            body = await cluster.create(manifest)
        except ConflictError:
            body = await cluster.patch(KILL_SWITCH, None, KILL_SWITCH_NAME, [operation])
        except ClusterError as failure:
            return _without_kill_switch(engaged, spec, failure)
    # What the command writes it can read: the whole spec, or `engaged: false`, beside which nothing counts.
    return read_kill_switch(body), None


async def _write_status(
    cluster: KubeCluster, services: Sequence[Body], results: Sequence[ServiceResult]
) -> None:
    """Say in the KillSwitch who confirmed, as the operator would; it may be dead, or be writing the same."""
    labels = {
        (body["metadata"]["namespace"], body["metadata"]["name"]): body["metadata"].get("labels") or {}
        for body in services
    }
    try:
        body = await cluster.get(KILL_SWITCH, None, KILL_SWITCH_NAME)
        if body is None:
            return
        found = read_kill_switch(body)
        reports = {
            (result.namespace, result.name): ServiceReport(
                killed_here(found, result.namespace, labels[result.namespace, result.name]),
                tuple(PodReport(pod.pod, pod.why) for pod in result.pods),
            )
            for result in results
            if result.why is None
        }
        status = kill_status(found, labels, reports, datetime.now(UTC)).to_json()
        if status != body.get("status"):
            await cluster.replace_status({**body, "status": status})
    except (ClusterError, ValidationError):
        # The pods have been told, and that is what counts; the answer on the screen says who confirmed.
        return


def _without_kill_switch(
    engaged: bool, spec: Body, error: ClusterError
) -> tuple[KillSwitch | None, str | None]:
    if not engaged or error.status in (0, 400, 401, 422):
        raise error
    imagined = {"metadata": {"name": KILL_SWITCH_NAME}, "spec": spec}
    words = f"the KillSwitch was not written ({error}); a running operator will give the optimizations back"
    return KillSwitch.model_validate(imagined), words


class _Push:
    """Writes one service's switches and tells its pods."""

    def __init__(
        self, cluster: KubeCluster, kill_switch: KillSwitch | None, started: float, timeout_seconds: float
    ) -> None:
        self._cluster = cluster
        self._kill_switch = kill_switch
        self._started = started
        self._deadline = started + timeout_seconds

    async def service(self, body: Body) -> ServiceResult:
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        try:
            asked = read_asked(body)
            observed = 0
            for _ in range(ATTEMPTS):
                try:
                    message, token, pods = await self._write(asked, observed)
                except ConflictError:
                    continue  # the operator wrote it meanwhile: read again
                told = [pod for pod in pods if pod.counts and pod.started]
                answers = await asyncio.gather(*(self._tell(namespace, pod, token, message) for pod in told))
                ahead = [answer for answer in answers if isinstance(answer, int)]
                if ahead:
                    observed = max(ahead)
                    continue
                results = tuple(answer for answer in answers if isinstance(answer, PodResult))
                return ServiceResult(namespace, name, message.generation, results)
        except (ClusterError, NameTakenError, ValueError) as error:
            return ServiceResult(namespace, name, None, why=str(error))
        return ServiceResult(namespace, name, None, why="somebody else keeps writing its switches; try again")

    async def _write(
        self, asked: Asked, observed: int
    ) -> tuple[SwitchMessage, str | None, Sequence[PodFacts]]:
        owner = asked.owner
        namespace, name = owner.metadata.namespace or "", owner.metadata.name
        config_map, secret, pod_bodies = await asyncio.gather(
            self._cluster.get(CONFIG_MAP, namespace, switches_name(name)),
            self._cluster.get(SECRET, namespace, admin_secret_name(name)),
            self._cluster.list(POD, namespace, {SERVICE_LABEL: name}),
        )
        token = read_token(secret) if secret else None
        pods = [pod_facts(pod) for pod in pod_bodies]
        written = read_switches(config_map)
        if written is None:
            states = await asyncio.gather(
                *(self._state(namespace, pod, token) for pod in pods if pod.started)
            )
            observed = max([observed, *(state.generation for state in states if state is not None)])
        killed = killed_here(self._kill_switch, namespace, owner.metadata.labels)
        found = plan(asked.switches(killed, written), written, written_generation(config_map), observed)
        await Applier(self._cluster).apply(owner, switches_config_map(owner, found.message), config_map)
        return found.message, token, pods

    async def _tell(
        self, namespace: str, pod: PodFacts, token: str | None, message: SwitchMessage
    ) -> PodResult | int:
        """The pod's answer, or the generation it is ahead with."""
        if token is None:
            return PodResult(pod.name, False, why="its admin Secret is missing; it follows its ConfigMap")
        while True:
            try:
                state = await self._ask("PUT", namespace, pod, token, "switches", message.to_json())
            except (PodError, ClusterError) as error:
                if isinstance(error, PodError) and error.kind is PodErrorKind.AHEAD:
                    return max(error.generation or 0, message.generation + 1)
                if time.monotonic() + RETRY_SECONDS >= self._deadline:
                    words = f"{error}; it follows its ConfigMap within about a minute"
                    return PodResult(pod.name, False, why=words)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if state.generation != message.generation:
                return PodResult(pod.name, False, why=f"runs generation {state.generation}")
            return PodResult(pod.name, True, seconds=time.monotonic() - self._started)

    async def _state(self, namespace: str, pod: PodFacts, token: str | None) -> PodState | None:
        try:
            return await self._ask("GET", namespace, pod, token or "", "state", None)
        except (PodError, ClusterError):
            return None

    async def _ask(
        self, method: str, namespace: str, pod: PodFacts, token: str, route: str, body: Any
    ) -> PodState:
        port = pod.address.admin_port if pod.address else 0
        target = f"/api/v1/namespaces/{namespace}/pods/{pod.name}:{port}/proxy/admin/v1/{route}"
        headers = {TOKEN_HEADER: token, "Content-Type": "application/json"}
        seconds = max(0.5, self._deadline - time.monotonic())
        status, text = await self._cluster.exchange(
            method, target, body=body, headers=headers, timeout_seconds=seconds
        )
        return parse_state(answer_of(status, text))


def _show_json(
    options: KillOptions, results: Sequence[ServiceResult], warning: str | None, seconds: float
) -> None:
    pods = [pod for result in results for pod in result.pods]
    print(
        json.dumps(
            {
                "engaged": options.engaged,
                "effective": all(result.confirmed for result in results),
                "seconds": round(seconds, 3),
                "pods_confirmed": sum(pod.confirmed for pod in pods),
                "pods_total": len(pods),
                "warning": warning,
                "services": [asdict(result) for result in results],
            },
            indent=2,
        )
    )


def _show_text(
    options: KillOptions, results: Sequence[ServiceResult], warning: str | None, seconds: float
) -> None:
    what = ", ".join(options.optimizations) or "all but the essential optimizations"
    print(f"kill switch engaged: {what}" if options.engaged else "kill switch released")
    if warning:
        print(f"warning: {warning}")
    for result in results:
        state = f"generation {result.generation}" if result.why is None else f"NOT WRITTEN: {result.why}"
        print(f"{result.namespace}/{result.name}  {state}")
        if result.why is None and not result.pods:
            print("  no pod runs; the next one comes up with these switches")
        for pod in result.pods:
            words = (
                f"confirmed after {pod.seconds:.2f} s"
                if pod.seconds is not None
                else f"NOT confirmed: {pod.why}"
            )
            print(f"  {pod.pod}  {words}")
    pods = [pod for result in results for pod in result.pods]
    print(f"{sum(pod.confirmed for pod in pods)} of {len(pods)} pods confirmed, {seconds:.2f} s")
