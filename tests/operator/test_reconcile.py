"""Reconcile: from whatever state the cluster is in to what the spec asks for, and not a write more."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime

import pytest
from tests.operator.fakes import (
    FakeCluster,
    FakeRuntime,
    kill_switch_body,
    pod_body,
    replica_set_body,
    service_body,
)

from firsttoken_operator.accelerators import BUILT_IN
from firsttoken_operator.cluster import ClusterError
from firsttoken_operator.desired.switches import read_switches
from firsttoken_operator.reconcile import Reconciler
from firsttoken_operator.runtime_client import PodError, PodErrorKind
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


@pytest.fixture
async def world():
    found = World()
    yield found
    await found.verifier.aclose()
    await found.pusher.aclose()


@pytest.fixture
async def serving(world):
    """A service with one pod that serves."""
    world.serve()
    await world.reconcile()
    world.run_pods(pod_body())
    await world.reconcile(3)
    world.cluster.writes.clear()
    world.news.clear()
    return world


async def test_a_new_service_gets_all_its_children(world):
    world.serve(replicas=2)
    await world.reconcile()
    names = {(kind, name) for _, kind, name in world.writes()}
    assert names == {
        ("ConfigMap", "smollm-switches"),
        ("Secret", "smollm-admin"),
        ("ServiceAccount", "smollm"),
        ("NetworkPolicy", "smollm"),
        ("Service", "smollm"),
        ("PodDisruptionBudget", "smollm"),
        ("Deployment", "smollm"),
        ("InferenceService", "smollm"),
    }
    order = [kind for _, kind, _ in world.writes()]
    assert order.index("ConfigMap") < order.index("Deployment"), "a pod must find its switches"
    assert world.condition("Ready") == ("False", "Deploying")


async def test_a_service_becomes_ready_after_its_pod_has_generated(world):
    world.serve()
    await world.reconcile()
    world.run_pods(pod_body())
    await world.reconciler.service(KEY)
    assert world.condition("Ready") == ("False", "Verifying")
    await asyncio.sleep(0.01)
    assert KEY in world.news
    await world.reconcile()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.runtime.pod("10.0.0.1").generated == 1


async def test_an_idle_service_sees_no_write_and_no_second_verification(serving):
    await serving.reconcile(5)
    assert serving.writes() == []
    assert serving.runtime.pod("10.0.0.1").generated == 1
    assert len(serving.runtime.pod("10.0.0.1").messages) == 1


async def test_a_restarted_operator_verifies_and_confirms_again_without_a_write(serving):
    serving.run_pods(pod_body(state={"running": {"startedAt": "2025-12-31T00:00:00Z"}}))
    serving.start_operator()
    await serving.reconciler.service(KEY)
    await asyncio.sleep(0.01)
    await serving.reconcile(2)
    assert serving.runtime.pod("10.0.0.1").generated == 2
    assert serving.writes() == []
    assert serving.condition("Ready") == ("True", "Serving")


async def test_a_newer_operator_restarts_no_pod(serving):
    from dataclasses import replace

    serving.start_operator(replace(SETTINGS, runtime_image="runtime:2", pull_policy="Always"))
    await serving.reconcile(3)
    assert serving.writes("Deployment") == []


async def test_a_restarted_container_is_verified_anew_before_it_counts(serving):
    serving.run_pods(pod_body(containerID="containerd://second"))
    await serving.reconciler.service(KEY)
    assert serving.condition("Ready") == ("False", "Verifying")


async def test_a_rollback_reaches_the_pod_and_touches_nothing_but_the_config_map(serving):
    serving.serve(rollback={"chunkedPrefill": True})
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").states["chunkedPrefill"] == "rolledBack"
    assert serving.switches().generation == 2
    assert {kind for _, kind, _ in serving.writes()} == {"ConfigMap", "InferenceService", "Event"}
    line = next(item for item in serving.status()["optimizations"] if item["name"] == "chunkedPrefill")
    assert (line["effective"], line["pods"]) == ("rolledBack", "1/1")
    serving.serve()
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").states["chunkedPrefill"] == "on"
    assert serving.switches().generation == 3


async def test_the_config_map_is_written_before_any_pod_is_told(serving):
    serving.runtime.pod("10.0.0.1").error = PodError(PodErrorKind.UNREACHABLE, "no answer within 2 s")
    serving.serve(rollback={"all": True})
    await serving.reconcile()
    assert serving.switches().switches["prefixCache"].cause == "rolledBack"
    assert serving.condition("SwitchesApplied") == ("False", "NotConfirmed")
    assert serving.condition("Degraded") == ("True", "SwitchesNotApplied")
    line = next(item for item in serving.status()["optimizations"] if item["name"] == "prefixCache")
    assert line["notConfirmed"] == ["smollm-a"]
    assert serving.condition("Ready") == ("True", "Serving")


async def test_a_deleted_config_map_comes_back_with_a_higher_generation(serving):
    serving.serve(rollback={"prefixCache": True})
    await serving.reconcile()
    serving.cluster.remove("ConfigMap", "smollm-switches")
    serving.start_operator()
    await serving.reconcile()
    assert serving.switches().generation == 3
    assert serving.condition("SwitchesApplied") == ("True", "Confirmed")


async def test_a_config_map_edited_by_hand_is_put_right_under_a_new_generation(serving):
    config_map = serving.cluster.named("ConfigMap", "smollm-switches")
    config_map["data"]["switches.json"] = '{"generation": 1, "switches": {"prefixCache": {"enabled": false}}}'
    serving.cluster.put(config_map)
    await serving.reconcile()
    assert serving.switches().generation == 2
    assert serving.switches().switches["prefixCache"].enabled


async def test_a_concurrent_write_of_the_config_map_is_noticed_and_read_again(serving, monkeypatch):
    real_get = serving.cluster.get
    seen = []

    async def get(kind, namespace, name):
        found = await real_get(kind, namespace, name)
        if kind.kind == "ConfigMap" and not seen:
            seen.append(name)
            serving.cluster.put(serving.cluster.named("ConfigMap", name))
        return found

    monkeypatch.setattr(serving.cluster, "get", get)
    serving.serve(rollback={"all": True})
    assert await serving.reconciler.service(KEY) is not None
    assert await serving.reconciler.service(KEY) is None
    assert serving.switches().generation == 2


async def test_the_kill_switch_reaches_the_pod_and_a_release_restores_what_was(serving):
    serving.serve(rollback={"prefixCache": True}, optimizations={"chunkedPrefill": {"chunkSize": 64}})
    await serving.reconcile()
    before = dict(serving.runtime.pod("10.0.0.1").states)
    parameters = serving.switches().switches
    serving.cluster.put(kill_switch_body(reason="incident 12"))
    await serving.reconcile()
    states = serving.runtime.pod("10.0.0.1").states
    assert states["continuousBatching"] == "on", "essential"
    assert {state for name, state in states.items() if name != "continuousBatching"} == {"killed"}
    assert serving.status()["killSwitch"]["reason"] == "incident 12"
    released = kill_switch_body()
    released["spec"]["engaged"] = False
    serving.cluster.put(released)
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").states == before
    assert serving.switches().switches == parameters
    assert "killSwitch" not in serving.status()


async def test_a_pod_that_starts_while_the_kill_switch_is_engaged_finds_it_in_its_config_map(world):
    world.cluster.put(kill_switch_body())
    world.serve()
    await world.reconcile()
    assert world.switches().switches["prefixCache"].cause == "killed"


async def test_the_kill_switchs_status_counts_confirmed_pods(serving):
    serving.cluster.put(kill_switch_body())
    await serving.reconciler.kill_switch()
    status = serving.cluster.named("KillSwitch", "global", None)["status"]
    assert status["conditions"][0]["status"] == "False"
    await serving.reconcile()
    assert serving.kill_news > 0
    await serving.reconciler.kill_switch()
    status = serving.cluster.named("KillSwitch", "global", None)["status"]
    assert status["conditions"][0]["status"] == "True"
    assert status["podsConfirmed"] == "1/1"
    assert status["effectiveAt"] == "2026-01-01T00:00:00.000Z"
    events = [body["reason"] for (kind, _, _), body in serving.cluster.objects.items() if kind == "Event"]
    assert events[-1] == "Engaged"
    serving.cluster.writes.clear()
    await serving.reconciler.kill_switch()
    assert serving.writes() == []


async def test_a_restarted_operator_does_not_take_an_effective_kill_switch_back(serving):
    serving.cluster.put(kill_switch_body())
    await serving.reconcile()
    await serving.reconciler.kill_switch()
    serving.cluster.writes.clear()
    serving.start_operator()
    await serving.reconciler.kill_switch()
    await serving.reconcile()
    await serving.reconciler.kill_switch()
    assert serving.writes("KillSwitch") == []


async def test_a_service_that_cannot_be_looked_at_does_not_hold_up_the_kill_switchs_status(serving):
    serving.cluster.put(service_body("broken"))
    serving.cluster.put(kill_switch_body())
    await serving.reconciler.kill_switch()
    await serving.reconcile()
    serving.cluster.refuse["apply", "ConfigMap"] = ClusterError(403, "no ConfigMaps for you")
    before = serving.kill_news
    with pytest.raises(ClusterError):
        await serving.reconciler.service(("default", "broken"))
    assert serving.kill_news == before + 1
    await serving.reconciler.kill_switch()
    status = serving.cluster.named("KillSwitch", "global", None)["status"]
    assert status["podsConfirmed"] == "1/1"
    assert [missing["service"] for missing in status["notConfirmed"]] == ["broken"]


async def test_without_a_kill_switch_nothing_is_written_about_it(serving):
    await serving.reconciler.kill_switch()
    assert serving.writes() == []


async def test_the_admin_token_is_made_once_and_never_again(serving):
    secret = serving.cluster.named("Secret", "smollm-admin")["data"]["token"]
    assert len(base64.b64decode(secret)) >= 32
    assert serving.runtime.pod("10.0.0.1").token == base64.b64decode(secret).decode()
    await serving.reconcile(3)
    serving.start_operator()
    await serving.reconcile()
    assert serving.cluster.named("Secret", "smollm-admin")["data"]["token"] == secret


async def test_somebody_elses_secret_is_neither_used_nor_taken_over(world):
    token = base64.b64encode(b"not yours").decode()
    secret = {"kind": "Secret", "metadata": {"name": "smollm-admin", "namespace": "default"}}
    world.cluster.put({**secret, "data": {"token": token}})
    world.serve()
    await world.reconcile()
    assert world.condition("Ready") == ("False", "PodRefused")
    assert "Secret default/smollm-admin exists" in world.status()["failure"]["message"]
    assert world.cluster.named("Secret", "smollm-admin")["data"] == {"token": token}
    assert world.writes("Deployment") == []


async def test_a_rotated_token_is_used_at_once(serving):
    secret = serving.cluster.named("Secret", "smollm-admin")
    secret["data"]["token"] = base64.b64encode(b"another").decode()
    serving.cluster.put(secret)
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").token == "another"


async def test_a_vanished_service_is_a_no_op(serving):
    serving.cluster.remove("InferenceService", "smollm")
    assert await serving.reconciler.service(KEY) is None
    assert serving.writes() == []
    assert not serving.reconciler.knows(KEY)


async def test_a_service_that_is_being_deleted_is_left_alone(serving):
    body = serving.cluster.named("InferenceService", "smollm")
    body["metadata"]["deletionTimestamp"] = "now"
    serving.cluster.put(body)
    await serving.reconcile()
    assert serving.writes() == []


async def test_an_unknown_accelerator_is_said_with_the_list(world):
    world.serve(accelerator={"type": "h100", "count": 1})
    await world.reconcile()
    assert world.condition("Ready") == ("False", "AcceleratorUnknown")
    assert "nvidia-h100-80gb" in world.status()["failure"]["message"]
    assert world.writes("Deployment") == []


async def test_a_model_source_of_a_later_build_is_said(world):
    world.serve(model={"uri": "hf://HuggingFaceTB/SmolLM2-135M-Instruct"})
    assert await world.reconcile() is not None, "looked at again"
    assert world.condition("Ready") == ("False", "ModelSourceUnsupported")
    assert "pvc://" in world.status()["failure"]["message"]
    assert world.writes("Deployment") == []


async def test_somebody_elses_deployment_is_not_taken_over(world):
    other = {
        "kind": "Deployment",
        "metadata": {"name": "smollm", "namespace": "default"},
        "spec": {"replicas": 9},
    }
    world.cluster.put(other)
    world.serve()
    await world.reconcile()
    assert world.cluster.named("Deployment", "smollm")["spec"] == {"replicas": 9}
    assert world.condition("Ready") == ("False", "PodRefused")
    assert "give the InferenceService another name" in world.status()["failure"]["message"]


async def test_children_of_a_deleted_namesake_are_waited_for(serving):
    body = service_body()
    body["metadata"]["uid"] = "second-uid"
    serving.cluster.remove("InferenceService", "smollm")
    serving.cluster.put(body)
    assert await serving.reconciler.service(KEY) == 1.0
    assert serving.writes("ConfigMap", "Deployment", "Service") == []


async def test_the_api_servers_refusal_of_the_deployment_is_quoted(world):
    world.cluster.refuse["apply", "Deployment"] = ClusterError(403, "exceeded quota: gpus")
    world.serve()
    await world.reconcile()
    assert world.status()["failure"] == {"reason": "PodRefused", "message": "exceeded quota: gpus"}


async def test_an_api_server_that_fails_is_an_error_to_try_again(world):
    world.cluster.refuse["apply", "Service"] = ClusterError(500, "etcd is down")
    world.serve()
    with pytest.raises(ClusterError, match="etcd is down"):
        await world.reconciler.service(KEY)


async def test_a_failed_event_does_not_fail_the_service(world):
    world.cluster.refuse["create", "Event"] = ClusterError(403, "no events for you")
    world.serve(model={"uri": "hf://a/b"})
    await world.reconcile()
    assert world.condition("Ready") == ("False", "ModelSourceUnsupported")


async def test_a_model_that_cannot_be_loaded_is_in_the_containers_own_words(serving):
    line = "error: /models/smollm2.gguf: truncated"
    serving.run_pods(
        pod_body(
            ready=False,
            started=False,
            containerID="",
            state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            lastState={"terminated": {"exitCode": 2, "reason": "Error", "message": f"INFO x\n{line}\n"}},
        )
    )
    await serving.reconcile(2)
    assert serving.status()["failure"] == {"reason": "ModelLoadFailed", "message": line, "pod": "smollm-a"}
    events = [body for (kind, _, _), body in serving.cluster.objects.items() if kind == "Event"]
    assert [(event["type"], event["reason"]) for event in events if event["reason"] == "ModelLoadFailed"] == [
        ("Warning", "ModelLoadFailed")
    ]
    writes = len(serving.writes())
    await serving.reconcile(3)
    assert len(serving.writes()) == writes, "told once"


async def test_a_status_of_another_version_does_not_stop_the_service(serving):
    body = serving.cluster.named("InferenceService", "smollm")
    serving.cluster.put({**body, "status": {"replicas": "many", "conditions": "none"}})
    await serving.reconcile()
    assert serving.condition("Ready") == ("True", "Serving")


async def test_a_spec_that_cannot_be_read_is_said_and_what_runs_is_left_alone(serving):
    body = serving.cluster.named("InferenceService", "smollm")
    serving.cluster.put({**body, "spec": {**body["spec"], "replicas": -1}})
    await serving.reconcile(3)
    assert serving.condition("Ready") == ("False", "SpecInvalid")
    assert "spec.replicas" in serving.status()["conditions"][0]["message"]
    assert [kind for _, kind, _ in serving.writes()] == ["InferenceService"], "once, and nothing else"


async def test_the_budget_comes_and_goes_with_the_second_replica(serving):
    serving.serve(replicas=2)
    await serving.reconcile()
    assert ("PodDisruptionBudget", "default", "smollm") in serving.cluster.objects
    serving.serve(replicas=1)
    await serving.reconcile()
    assert ("PodDisruptionBudget", "default", "smollm") not in serving.cluster.objects


async def test_a_poll_brings_ttft_into_the_status_and_then_leaves_it_alone(serving):
    pod = serving.runtime.pod("10.0.0.1")
    pod.ttft = {"count": 4, "p50_ms": 100, "p95_ms": 200, "p99_ms": 300, "window_seconds": 300}
    assert await serving.reconciler.poll(KEY)
    await serving.reconcile()
    assert serving.status()["ttft"]["p99"] == "300ms"
    assert not await serving.reconciler.poll(KEY)
    pod.ttft = {**pod.ttft, "count": 5, "p99_ms": 303}
    assert not await serving.reconciler.poll(KEY)


async def test_a_draining_pod_is_told_too_but_not_counted(serving):
    stopping = pod_body("smollm-old", ip="10.0.0.9", metadata={"deletionTimestamp": "now"})
    serving.run_pods(pod_body(), stopping)
    serving.cluster.put(kill_switch_body())
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.9").states["prefixCache"] == "killed"
    assert serving.status()["replicas"] == 1


async def test_a_manual_change_of_a_child_is_put_right(serving):
    service = serving.cluster.named("Service", "smollm")
    service["spec"]["ports"][0]["port"] = 8080
    serving.cluster.put(service)
    await serving.reconcile()
    assert serving.cluster.named("Service", "smollm")["spec"]["ports"][0]["port"] == 80
