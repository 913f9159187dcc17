"""Evidence for a failed test: what the cluster holds, what happened, and what everything logged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .console import say, step
from .places import BIN, Places

LOG_LINES = 500
SUMMARY_EVENTS = 20
QUERIES = {
    "pods.yaml": ["get", "pods", "--all-namespaces", "--output=yaml"],
    "pods.describe.txt": ["describe", "pods", "--all-namespaces"],
    "events.txt": ["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp", "--output=wide"],
    "nodes.describe.txt": ["describe", "nodes"],
    "workloads.yaml": [
        "get",
        "deployments,replicasets,services,endpointslices,configmaps,poddisruptionbudgets,networkpolicies",
        "--all-namespaces",
        "--output=yaml",
    ],
    "firsttoken.yaml": [
        "get",
        "inferenceservices.firsttoken.dev,killswitches.firsttoken.dev",
        "--all-namespaces",
        "--output=yaml",
    ],
}


def _kubectl(where: Places, words: list[str]) -> str:
    """stdout and stderr together, whatever the outcome: a failing query is evidence too."""
    command = [str(BIN / "kubectl"), "--kubeconfig", str(where.kubeconfig), "--request-timeout=10s", *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    return done.stdout


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LOG_LINES:]) + "\n"


def dump(where: Places, directory: Path) -> None:
    """Fills the directory; never fails for want of a cluster, so that it can be called in any state."""
    with step(f"writing evidence to {directory}"):
        logs = directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for file, words in QUERIES.items():
            (directory / file).write_text(_kubectl(where, words))
        pods_now = _kubectl(where, ["get", "pods", "--all-namespaces", "--output=wide"])
        events = (directory / "events.txt").read_text().splitlines()[-SUMMARY_EVENTS:]
        (directory / "summary.txt").write_text(pods_now + "\n" + "\n".join(events) + "\n")
        for log in sorted(where.logs.glob("*.log")):
            (directory / log.name).write_text(_tail(log.read_text(errors="replace")))
        try:
            pods = json.loads(_kubectl(where, ["get", "pods", "--all-namespaces", "--output=json"]))["items"]
        except ValueError:
            say("the API server does not answer: no pods in the dump")
            return
        for pod in pods:
            _container_logs(where, pod["metadata"]["namespace"], pod["metadata"]["name"], pod["spec"], logs)


def _container_logs(
    where: Places, namespace: str, name: str, spec: dict[str, list[dict[str, str]]], logs: Path
) -> None:
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        words = [
            "logs",
            f"--namespace={namespace}",
            name,
            f"--container={container['name']}",
            f"--tail={LOG_LINES}",
        ]
        stem = f"{namespace}.{name}.{container['name']}"
        (logs / f"{stem}.log").write_text(_kubectl(where, words))
        previous = _kubectl(where, [*words, "--previous"])
        if not previous.startswith("Error from server"):
            (logs / f"{stem}.previous.log").write_text(previous)
