"""What the API server accepts, fills in, explains and shows of the two resources.

Nothing here starts a model: the service is kept at 0 replicas, other objects are only tried
(`--dry-run=server`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.kube import ROOT, Cluster
from e2e.manifests import VALID, Spec, inference_service, kill_switch
from firsttoken_api.optimizations import CATALOGUE, NAMES


def tried(cluster: Cluster, namespace: str, spec: Spec) -> Spec:
    """The spec as the API server would keep it."""
    text = inference_service(spec, "tried")
    answer = cluster.apply_text(text, "-n", namespace, "--dry-run=server", "-o", "json")
    kept: Spec = json.loads(answer.stdout)["spec"]
    return kept


def test_a_kill_switch_for_some_is_accepted(cluster: Cluster) -> None:
    spec = {
        "engaged": True,
        "optimizations": ["continuousBatching", "prefixCache"],
        "namespaces": ["team-a"],
        "selector": {"matchLabels": {"tier": "test"}},
        "reason": "wrong answers since noon",
    }
    cluster.apply_text(kill_switch(spec), "--dry-run=server")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_accepted(cluster: Cluster, namespace: str, path: Path) -> None:
    answer = cluster.kubectl("apply", "-n", namespace, "--dry-run=server", "-f", str(path))
    assert "Warning" not in answer.stderr


def test_every_field_that_can_be_set_is_accepted_and_kept(cluster: Cluster, namespace: str) -> None:
    everything: Spec = {
        "model": {
            "uri": "hf://org/name",
            "revision": "main",
            "tokenSecretRef": {"name": "hub", "key": "token"},
            "servedName": "name",
            "maxLength": 8192,
            "chatTemplateRef": {"name": "templates", "key": "chat.jinja"},
        },
        "accelerator": {"type": "nvidia-h100-80gb", "count": 2},
        "replicas": 2,
        "slo": {"ttft": {"p50": "500ms", "p95": "1.5s", "p99": "2s"}},
        "kvCache": {"memory": "8Gi"},
        "optimizations": {entry.name: {"enabled": True, **entry.defaults} for entry in CATALOGUE},
        "rollback": dict.fromkeys(("all", *NAMES), False),
        "rollout": {
            "strategy": "RollingUpdate",
            "maxSurge": 1,
            "maxUnavailable": 0,
            "drainTimeoutSeconds": 30,
        },
        "startupTimeoutSeconds": 600,
        "template": {
            "image": "runtime:1",
            "labels": {"team": "chat"},
            "annotations": {"note": "x"},
            "resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
            "sharedMemory": "2Gi",
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
            ],
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "serviceAccountName": "own",
            "imagePullSecrets": [{"name": "registry"}],
        },
    }
    assert tried(cluster, namespace, everything) == everything


def test_defaults_are_filled_in(cluster: Cluster, namespace: str) -> None:
    minimal = {"model": VALID["model"], "accelerator": {"type": "cpu"}}
    spec = tried(cluster, namespace, minimal)
    assert spec["replicas"] == 1
    assert spec["accelerator"] == {"type": "cpu", "count": 1}
    assert spec["startupTimeoutSeconds"] == 1800
    assert spec["rollout"] == {
        "strategy": "RollingUpdate",
        "maxSurge": 0,
        "maxUnavailable": 1,
        "drainTimeoutSeconds": 60,
    }
    assert "optimizations" not in spec, "defaults of optimizations follow the release, not the stored object"


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_explain_describes_every_optimization(cluster: Cluster, entry: Any) -> None:
    text = " ".join(cluster.kubectl("explain", f"ftis.spec.optimizations.{entry.name}").stdout.split())
    assert entry.summary in text
    assert f"spec.rollback.{entry.name}: true" in text
    assert "enabled <boolean>" in text
    for parameter, value in entry.defaults.items():
        assert parameter in text
        assert value == [] or f"Default: {str(value).lower() if isinstance(value, bool) else value}." in text


def test_explain_lists_the_rollback_flags(cluster: Cluster) -> None:
    text = " ".join(cluster.kubectl("explain", "ftis.spec.rollback").stdout.split())
    assert "all, " + ", ".join(NAMES) in text


def test_every_field_has_a_description(cluster: Cluster) -> None:
    for kind in ("ftis", "ftks"):
        for part in ("spec", "status"):
            lines = cluster.kubectl("explain", f"{kind}.{part}", "--recursive=false").stdout
            assert "<no description>" not in lines


def test_columns_scale_and_category(cluster: Cluster, namespace: str, kept: str) -> None:
    header = cluster.kubectl("get", "ftis", kept, "-n", namespace).stdout.splitlines()[0]
    assert header.split("  ")[0].strip() == "NAME"
    for column in ("MODEL", "READY", "REASON", "TTFT P99", "REPLICAS", "AGE"):
        assert column in header
    wide = cluster.kubectl("get", "ftis", kept, "-n", namespace, "-o", "wide").stdout.splitlines()[0]
    assert "URL" in wide
    assert "ACCELERATOR" in wide
    cluster.kubectl("scale", f"ftis/{kept}", "-n", namespace, "--replicas=0")
    assert (
        f"inferenceservice.firsttoken.dev/{kept}"
        in cluster.kubectl("get", "firsttoken", "-n", namespace, "-o", "name").stdout
    )
