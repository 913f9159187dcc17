"""What goes wrong is said in words, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from e2e.conftest import EXAMPLE
from e2e.kube import SYSTEM_NAMESPACE, Cluster, condition, switch_state, wait_for, wait_ready

MANIFEST = """
apiVersion: firsttoken.dev/v1alpha1
kind: InferenceService
metadata:
  name: {name}
spec:
  model:
    uri: {uri}
  accelerator:
    type: {accelerator}
  template:
    resources:
      requests: {{cpu: 100m, memory: 256Mi}}
"""


def reason_of(cluster: Cluster, namespace: str, name: str) -> tuple[str, str]:
    ready = condition(cluster.get("ftis", name, "-n", namespace), "Ready")
    return ready.get("reason", ""), ready.get("message", "")


@pytest.fixture
def restored(cluster: Cluster, namespace: str, service: str) -> Iterator[None]:
    """Afterwards nothing is taken back any more, however the test ended."""
    yield
    cluster.patch(namespace, service, {"rollback": None})


@pytest.mark.parametrize(
    ("name", "uri", "accelerator", "reason", "words"),
    [
        ("missing", "file:///models/nowhere.gguf", "cpu", "ModelLoadFailed", "/models/nowhere.gguf"),
        ("not-a-model", "file:///etc/passwd", "cpu", "ModelLoadFailed", "/etc/passwd"),
        (
            "no-gpu",
            "file:///models/smollm2-135m-instruct-q4_1.gguf",
            "nvidia-h100-80gb",
            "InsufficientGPU",
            "nvidia-h100-80gb",
        ),
        ("no-type", "file:///models/smollm2-135m-instruct-q4_1.gguf", "abacus", "AcceleratorUnknown", "cpu"),
    ],
)
def test_a_service_that_cannot_start_says_why(
    cluster: Cluster, namespace: str, name: str, uri: str, accelerator: str, reason: str, words: str
) -> None:
    text = MANIFEST.format(name=name, uri=uri, accelerator=accelerator)
    cluster.apply_text(text, "-n", namespace)
    try:
        wait_for(f"{name} to say {reason}", lambda: reason_of(cluster, namespace, name)[0] == reason, 60, 0.5)
        message = reason_of(cluster, namespace, name)[1]
        assert words in message
        assert "Traceback" not in message
    finally:
        cluster.kubectl("delete", "ftis", name, "-n", namespace, "--timeout=60s")


@pytest.mark.usefixtures("restored")
def test_a_pod_killed_mid_stream_gives_the_client_an_error_and_comes_back_as_it_was(
    cluster: Cluster, namespace: str, service: str
) -> None:
    cluster.patch(namespace, service, {"rollback": {"priorityScheduling": True}})
    pod = cluster.pods(namespace, service)[0]["metadata"]["name"]
    outcome: dict[str, Any] = {}
    streaming = threading.Event()

    def consume(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            stream = client.completions.create(
                model=service,
                prompt="Once upon a time",
                max_tokens=400,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                streaming.set()
                if chunk.choices and chunk.choices[0].finish_reason:
                    outcome["finish"] = chunk.choices[0].finish_reason
        except (openai.OpenAIError, httpx.HTTPError) as error:
            outcome["error"] = str(error)

    with cluster.port_forward(namespace, f"pod/{pod}", 8000) as url:
        caller = threading.Thread(target=consume, args=(url,), daemon=True)
        caller.start()
        assert streaming.wait(30)
        cluster.kubectl("delete", "pod", pod, "-n", namespace, "--grace-period=0", "--force")
        caller.join(30)
        assert not caller.is_alive(), "the client hangs"
    assert "error" in outcome, f"the stream ended as if all were well: {outcome}"

    def newcomer() -> str | None:
        names = [found["metadata"]["name"] for found in cluster.pods(namespace, service)]
        return next((name for name in names if name != pod), None)

    fresh = wait_for("a new pod", newcomer, 30)
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{fresh}", "-n", namespace, "--timeout=90s")
    wait_ready(cluster, namespace, service)
    with cluster.admin(namespace, service, fresh) as admin:
        assert switch_state(admin.get("/admin/v1/state").json(), "priorityScheduling") == "rolledBack"


@pytest.mark.usefixtures("restored")
def test_the_operator_killed_changes_nothing_and_what_was_patched_meanwhile_is_done(
    cluster: Cluster, namespace: str, service: str
) -> None:
    before = cluster.identity(namespace, service)
    cluster.kubectl("delete", "pod", "--all", "-n", SYSTEM_NAMESPACE, "--grace-period=0", "--force")
    cluster.patch(namespace, service, {"rollback": {"prefixCache": True}})
    cluster.wait_switch(namespace, service, "prefixCache", "rolledBack", 60)
    cluster.patch(namespace, service, {"rollback": None})
    cluster.wait_switch(namespace, service, "prefixCache", "on")
    assert cluster.identity(namespace, service) == before


@pytest.mark.usefixtures("restored")
def test_another_operator_version_restarts_no_model_pod(
    cluster: Cluster, namespace: str, service: str
) -> None:
    before = cluster.identity(namespace, service)
    cluster.install_operator(
        "--set", "runtime.image=example.invalid/runtime:next", "--set", "podAnnotations.x=y"
    )
    try:
        cluster.patch(namespace, service, {"rollback": {"prefixCache": True}})

        def taken() -> bool:
            status = cluster.get("ftis", service, "-n", namespace)["status"]
            return any(
                entry["name"] == "prefixCache" and entry["effective"] == "rolledBack"
                for entry in status.get("optimizations", ())
            )

        wait_for("the new operator to take the switch over", taken, 60)
        assert cluster.identity(namespace, service) == before
    finally:
        cluster.install_operator()


def test_deleting_the_service_mid_way_leaves_no_orphan(cluster: Cluster, namespace: str) -> None:
    text = EXAMPLE.read_text().replace("name: smollm2", "name: short-lived", 1)
    cluster.apply_text(text, "-n", namespace)
    wait_for("its deployment", lambda: _owned(cluster, namespace, "short-lived"), 30)
    cluster.kubectl("delete", "ftis", "short-lived", "-n", namespace, "--timeout=30s")
    wait_for("everything it owned to go", lambda: not _owned(cluster, namespace, "short-lived"), 90, 1)


def _owned(cluster: Cluster, namespace: str, service: str) -> list[str]:
    kinds = "deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts,pdb,networkpolicies"
    done = cluster.kubectl(
        "get", kinds, "-n", namespace, "-l", f"firsttoken.dev/service={service}", "-o", "name"
    )
    return done.stdout.split()


def test_an_idle_cluster_sees_no_writes(cluster: Cluster, namespace: str, service: str) -> None:
    kinds = (
        "ftis,killswitch,deployments,services,configmaps,secrets,serviceaccounts,pdb,networkpolicies,events"
    )

    def versions() -> dict[str, str]:
        items = cluster.get(kinds, "-n", namespace)["items"]
        metadata = [
            (item["kind"], item["metadata"])
            for item in items
            if item["kind"] != "Event" or "firsttoken" in item["reportingComponent"]
        ]
        return {f"{kind}/{found['name']}": found["resourceVersion"] for kind, found in metadata}

    def settled() -> bool:
        before = versions()
        time.sleep(10)
        return versions() == before

    wait_for("the namespace to settle", settled, 120)
    before = versions()
    time.sleep(40)  # longer than the slow poll and resync of pods' state
    assert versions() == before
