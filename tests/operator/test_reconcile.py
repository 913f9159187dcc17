"""Reconcile: from whatever state the cluster is in to what the spec asks for, and not a write more."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import pytest
from tests.operator.fakes import pod_body, service_body
from tests.operator.world import KEY, SETTINGS

from firsttoken_operator.cluster import ClusterError


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
    serving.start_operator(replace(SETTINGS, runtime_image="runtime:2", pull_policy="Always"))
    await serving.reconcile(3)
    assert serving.writes("Deployment") == []


async def test_a_restarted_container_is_verified_anew_before_it_counts(serving):
    serving.run_pods(pod_body(containerID="containerd://second"))
    await serving.reconciler.service(KEY)
    assert serving.condition("Ready") == ("False", "Verifying")


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


async def test_a_manual_change_of_a_child_is_put_right(serving):
    service = serving.cluster.named("Service", "smollm")
    service["spec"]["ports"][0]["port"] = 8080
    serving.cluster.put(service)
    await serving.reconcile()
    assert serving.cluster.named("Service", "smollm")["spec"]["ports"][0]["port"] == 80
