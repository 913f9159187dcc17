"""The main job: an InferenceService applied as it stands in examples/ answers real clients and says where
its time to first token went."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from e2e.kube import RELEASE, SYSTEM_NAMESPACE, Cluster, condition, wait_for

SEGMENTS = ("queue", "prefill", "decode", "transport")


def test_the_service_is_ready_and_says_so_in_columns(cluster: Cluster, namespace: str, service: str) -> None:
    listed = cluster.kubectl("get", "ftis", "-n", namespace).stdout.splitlines()
    header, row = listed[0].split(), listed[1].split()
    assert header == ["NAME", "MODEL", "READY", "REASON", "TTFT", "P99", "REPLICAS", "AGE"]
    assert row[0] == service
    assert "True" in row
    found = cluster.get("ftis", service, "-n", namespace)
    assert found["status"]["readyReplicas"] == 1
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]


def test_a_chat_answer_streams_through_the_service_and_its_segments_add_up(
    cluster: Cluster, namespace: str, service: str
) -> None:
    with cluster.port_forward(namespace, f"service/{service}", 80) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        sent = time.perf_counter()
        first_ms = 0.0
        pieces: list[str] = []
        timings: dict[str, Any] = {}
        usage = None
        for chunk in client.chat.completions.create(
            model=service,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            timings = (chunk.model_extra or {}).get("timings") or timings
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                first_ms = first_ms or (time.perf_counter() - sent) * 1e3
                pieces.append(chunk.choices[0].delta.content)
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 1, "the answer came in one piece: it did not stream"
    assert sum(timings[f"{segment}_ms"] for segment in SEGMENTS) == pytest.approx(
        timings["ttft_ms"], abs=0.01
    )
    assert 0 < timings["ttft_ms"] <= first_ms
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_ttft_with_its_segments_reaches_the_status(cluster: Cluster, namespace: str, service: str) -> None:
    with cluster.port_forward(namespace, f"service/{service}", 80) as url:
        for number in range(3):
            body = {"model": service, "prompt": f"Count from {number}:", "max_tokens": 2}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200

    def reported() -> dict[str, Any] | None:
        status: dict[str, Any] = cluster.get("ftis", service, "-n", namespace)["status"]
        return status if (status.get("ttft") or {}).get("count", 0) >= 3 else None

    ttft = wait_for("TTFT in the status", reported, 60, 1)["ttft"]
    assert ttft["p50"] and ttft["p95"] and ttft["p99"]  # noqa: PT018 - one table, one assertion
    assert set(ttft["segments"]) == set(SEGMENTS)


def test_metrics_and_state_of_the_pod(cluster: Cluster, namespace: str, service: str) -> None:
    pod = cluster.pods(namespace, service)[0]["metadata"]["name"]
    with cluster.port_forward(namespace, f"pod/{pod}", 8000) as url:
        text = httpx.get(f"{url}/metrics").text
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "firsttoken_ttft_segment_seconds_bucket",
        "firsttoken_switch_state",
    ):
        assert name in text, f"{name} is not in /metrics"
    with cluster.admin(namespace, service, pod) as admin:
        pages = admin.get("/admin/v1/state").json()["pages"]
        assert pages["free"] + pages["cached"] + pages["locked"] + pages["owned"] == pages["total"]
        assert admin.get("/admin/v1/integrity").json()["ok"] is True


def test_without_the_token_the_admin_port_answers_401_and_nothing_changes(
    cluster: Cluster, namespace: str, service: str
) -> None:
    pod = cluster.pods(namespace, service)[0]["metadata"]["name"]
    with cluster.admin(namespace, service, pod) as admin:
        before = admin.get("/admin/v1/state").json()
        body = {"generation": before["generation"] + 100, "switches": {"prefixCache": {"enabled": False}}}
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = httpx.put(f"{admin.base_url}/admin/v1/switches", json=body, headers=headers)
            assert answer.status_code == 401
        after = admin.get("/admin/v1/state").json()
    assert (after["generation"], after["switches"]) == (before["generation"], before["switches"])


def test_both_images_run_locked_down(cluster: Cluster, namespace: str, service: str) -> None:
    operator = cluster.get("pods", "-n", "firsttoken-system")["items"][0]
    for pod in (operator, cluster.pods(namespace, service)[0]):
        for container in pod["spec"]["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
        overall = pod["spec"]["securityContext"]
        assert overall["runAsNonRoot"] is True
        assert overall["seccompProfile"]["type"] == "RuntimeDefault"


def test_scale_works_and_both_replicas_count(cluster: Cluster, namespace: str, service: str) -> None:
    cluster.kubectl("scale", "ftis", service, "-n", namespace, "--replicas=2")
    try:

        def both() -> dict[str, object] | None:
            found = cluster.get("ftis", service, "-n", namespace)
            ready = condition(found, "Ready").get("status") == "True"
            return found if ready and found["status"].get("readyReplicas") == 2 else None

        wait_for("two ready replicas", both, 120, 1)
        cluster.kubectl("get", "pdb", service, "-n", namespace)
    finally:
        cluster.kubectl("scale", "ftis", service, "-n", namespace, "--replicas=1")
    wait_for("one pod left", lambda: len(cluster.pods(namespace, service)) == 1, 90, 1)


def test_the_operator_lacks_no_right(cluster: Cluster, namespace: str, service: str) -> None:
    """After all of the above: what the chart's roles did not allow would be in its log."""
    found = cluster.get("events", "-n", namespace)["items"]
    told = {event["reason"] for event in found if event["reportingComponent"] == "firsttoken-operator"}
    assert {"Serving", "SwitchesApplied"} <= told
    log = cluster.kubectl("logs", f"deployment/{RELEASE}", "-n", SYSTEM_NAMESPACE, "--tail=-1").stdout
    assert "CRDs are served" in log, "its log from the beginning"
    assert "is forbidden: User" not in log
