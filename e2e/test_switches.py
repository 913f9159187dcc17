"""Every optimization is taken back live: by one patch, by the kill switch, with the operator down."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from e2e.conftest import EXAMPLE
from e2e.kube import ROOT, SYSTEM_NAMESPACE, Cluster, wait_for, wait_ready, wait_switch_state
from e2e.traffic import Traffic, ask

KILL = ROOT / "examples" / "killswitch.yaml"
LIVE = ("prefixCache", "chunkedPrefill", "priorityScheduling")


def states(cluster: Cluster, namespace: str, service: str) -> dict[str, str]:
    pod = cluster.pods(namespace, service)[0]["metadata"]["name"]
    with cluster.admin(namespace, service, pod) as admin:
        return {entry["name"]: entry["state"] for entry in admin.get("/admin/v1/state").json()["switches"]}


def wait_reported(cluster: Cluster, namespace: str, service: str, name: str, wanted: str) -> dict[str, Any]:
    """Wait until the status of the InferenceService says so for every pod."""

    def probe() -> dict[str, Any] | None:
        status = cluster.get("ftis", service, "-n", namespace)["status"]
        for entry in status.get("optimizations", ()):
            pods = str(entry.get("pods", "0/1")).split("/")
            if entry["name"] == name and entry["effective"] == wanted and pods[0] == pods[1]:
                return dict(entry)
        return None

    return wait_for(f"status to say {name} is {wanted}", probe, 20, 0.2)


@pytest.fixture(autouse=True)
def released(cluster: Cluster, namespace: str, service: str) -> Iterator[None]:
    """Afterwards nothing is taken back any more, however the test ended."""
    yield
    cluster.kubectl("delete", "killswitch", "global", "--ignore-not-found")
    cluster.patch(namespace, service, {"rollback": None})
    pod = cluster.pods(namespace, service)[0]["metadata"]["name"]
    with cluster.admin(namespace, service, pod) as admin:
        for name in LIVE:
            wait_switch_state(admin, name, "on")


@pytest.mark.parametrize("name", LIVE)
def test_one_patch_takes_an_optimization_back_and_forth_under_load(
    cluster: Cluster, namespace: str, service: str, name: str
) -> None:
    before = cluster.identity(namespace, service)
    with cluster.port_forward(namespace, f"service/{service}", 80) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        expected = ask(client, service)
        with Traffic(url, service) as traffic:
            traffic.wait_for_answers(2)
            cluster.patch(namespace, service, {"rollback": {name: True}})
            cluster.wait_switch(namespace, service, name, "rolledBack")
            wait_reported(cluster, namespace, service, name, "rolledBack")
            traffic.wait_for_answers(2)
            cluster.patch(namespace, service, {"rollback": {name: None}})
            cluster.wait_switch(namespace, service, name, "on")
            traffic.wait_for_answers(2)
    assert traffic.errors == []
    assert set(traffic.answers) == {expected}, "the greedy answer changed while a switch was flipped"
    assert cluster.identity(namespace, service) == before, "a pod was restarted by a switch"


def test_a_parameter_is_changed_live(cluster: Cluster, namespace: str, service: str) -> None:
    before = cluster.identity(namespace, service)
    cluster.patch(namespace, service, {"optimizations": {"chunkedPrefill": {"chunkSize": 64}}})
    pod = cluster.pods(namespace, service)[0]["metadata"]["name"]

    def chunk_size() -> int:
        state = admin.get("/admin/v1/state").json()
        entry = next(entry for entry in state["switches"] if entry["name"] == "chunkedPrefill")
        return int(entry["parameters"]["chunkSize"])

    with cluster.admin(namespace, service, pod) as admin:
        wait_for("chunk size 64", lambda: chunk_size() == 64, 15, 0.05)
        cluster.kubectl("apply", "-n", namespace, "-f", str(EXAMPLE))
        wait_for("the example's own chunk size", lambda: chunk_size() == 128, 15, 0.05)
    assert cluster.identity(namespace, service) == before


def test_rollback_all_leaves_only_the_essential_ones(cluster: Cluster, namespace: str, service: str) -> None:
    cluster.patch(namespace, service, {"rollback": {"all": True}})
    cluster.wait_switch(namespace, service, "prefixCache", "rolledBack")
    now = states(cluster, namespace, service)
    assert now["continuousBatching"] == "on"
    assert {now[name] for name in LIVE} == {"rolledBack"}


def test_the_kill_switch_is_confirmed_pod_by_pod_and_released_to_exactly_what_was(
    cluster: Cluster, namespace: str, service: str
) -> None:
    cluster.patch(namespace, service, {"rollback": {"priorityScheduling": True}})
    cluster.wait_switch(namespace, service, "priorityScheduling", "rolledBack")
    before, was = states(cluster, namespace, service), cluster.identity(namespace, service)

    cluster.kubectl("apply", "-f", str(KILL))
    cluster.wait_switch(namespace, service, "prefixCache", "killed")

    def effective() -> dict[str, Any] | None:
        status = cluster.get("killswitch", "global").get("status", {})
        return status if status.get("effectiveAt") else None

    status = wait_for("effectiveAt", effective, 20)
    assert status["pods"]["confirmed"] >= 1
    assert status["pods"]["confirmed"] == status["pods"]["total"]
    assert status.get("notConfirmed", []) == []
    now = states(cluster, namespace, service)
    assert now["continuousBatching"] == "on"
    assert {now[name] for name in LIVE} == {"killed"}
    shown = cluster.get("ftis", service, "-n", namespace)["status"]["killSwitch"]
    assert shown["engaged"] is True
    assert set(LIVE) <= set(shown["optimizations"])

    cluster.kubectl("patch", "killswitch", "global", "--type=merge", "-p", '{"spec":{"engaged":false}}')
    cluster.wait_switch(namespace, service, "prefixCache", "on")
    assert states(cluster, namespace, service) == before
    assert cluster.identity(namespace, service) == was


def test_a_pod_that_starts_while_killed_comes_up_killed(
    cluster: Cluster, namespace: str, service: str
) -> None:
    cluster.kubectl("apply", "-f", str(KILL))
    cluster.wait_switch(namespace, service, "prefixCache", "killed")
    old = cluster.identity(namespace, service)
    cluster.kubectl(
        "delete", "pod", "-n", namespace, "-l", f"firsttoken.dev/service={service}", "--wait=true"
    )
    wait_for("a new pod", lambda: cluster.identity(namespace, service) not in ([], old), 60)
    wait_ready(cluster, namespace, service)
    assert states(cluster, namespace, service)["prefixCache"] == "killed"


def test_kill_and_release_work_with_the_operator_gone(cluster: Cluster, namespace: str, service: str) -> None:
    deployment = cluster.get("deployments", "-n", SYSTEM_NAMESPACE)["items"][0]["metadata"]["name"]
    cluster.kubectl("scale", "deployment", deployment, "-n", SYSTEM_NAMESPACE, "--replicas=0")
    try:
        cluster.kubectl("wait", "--for=delete", "pod", "--all", "-n", SYSTEM_NAMESPACE, "--timeout=60s")
        report = _firsttoken(cluster, "kill", "--reason", "operator is gone", "--json")
        assert report["pods_confirmed"] == report["pods_total"] >= 1, report
        assert states(cluster, namespace, service)["prefixCache"] == "killed"
    finally:
        cluster.kubectl("scale", "deployment", deployment, "-n", SYSTEM_NAMESPACE, "--replicas=1")
        cluster.kubectl("rollout", "status", f"deployment/{deployment}", "-n", SYSTEM_NAMESPACE)
    generation = _generation(cluster, namespace, service)
    wait_reported(cluster, namespace, service, "prefixCache", "killed")
    assert _generation(cluster, namespace, service) == generation, "the operator, back again, did not agree"
    _firsttoken(cluster, "release", "--json")
    cluster.wait_switch(namespace, service, "prefixCache", "on")


def _firsttoken(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [str(ROOT / ".venv/bin/firsttoken"), *arguments],
        env={"KUBECONFIG": cluster.kubeconfig, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _generation(cluster: Cluster, namespace: str, service: str) -> int:
    stored = cluster.get("configmap", f"{service}-switches", "-n", namespace)["data"]["switches.json"]
    return int(json.loads(stored)["generation"])
