"""A running cluster as the demo and the tests see it: kubectl, helm, waiting, port-forward.

Everything goes through the same programs a user has. Nothing here knows how the cluster was made; that is
`e2e.cluster`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).resolve().parent.parent
SYSTEM_NAMESPACE = "firsttoken-system"
RELEASE = "firsttoken"
T = TypeVar("T")


class KubeError(Exception):
    """A command failed or a wait ran out; the text has the command's own words."""


@dataclass(frozen=True)
class Cluster:
    """Paths of the programs and the kubeconfig of one cluster, and the image references on it."""

    kubectl_path: str
    helm_path: str
    kubeconfig: str
    volumes: str
    images: dict[str, str]

    def kubectl(
        self, *arguments: str, input: str | None = None, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl. Raises KubeError with its words when it fails and `check` is set, or is slow."""
        return self._run([self.kubectl_path, *arguments], input, check, timeout)

    def helm(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._run([self.helm_path, *arguments], None, check, 300)

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get … -o json`, parsed."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)
        return found

    def pods(self, namespace: str, service: str) -> list[dict[str, Any]]:
        """Pods of one InferenceService that are not being deleted."""
        selector = f"firsttoken.dev/service={service}"
        items = self.get("pods", "-n", namespace, "-l", selector)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def patch(self, namespace: str, service: str, spec: dict[str, Any]) -> None:
        """Merge-patch the spec of one InferenceService."""
        body = json.dumps({"spec": spec})
        self.kubectl("patch", "ftis", service, "-n", namespace, "--type=merge", "-p", body)

    def identity(self, namespace: str, service: str) -> list[tuple[str, str, int]]:
        """Name, UID and restart count of every pod of the service: what a switch must never change."""
        return [
            (
                pod["metadata"]["name"],
                pod["metadata"]["uid"],
                sum(entry["restartCount"] for entry in pod["status"].get("containerStatuses", ())),
            )
            for pod in self.pods(namespace, service)
        ]

    def wait_switch(
        self, namespace: str, service: str, name: str, wanted: str, timeout_seconds: float = 15
    ) -> None:
        """Wait until the service's first pod itself says that the switch has that state."""
        pod = self.pods(namespace, service)[0]["metadata"]["name"]
        with self.admin(namespace, service, pod) as admin:
            wait_switch_state(admin, name, wanted, timeout_seconds)

    def apply_text(self, text: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.kubectl("apply", "-f", "-", *arguments, input=text, check=check)

    @contextmanager
    def port_forward(self, namespace: str, target: str, port: int) -> Iterator[str]:
        """`kubectl port-forward` to a free port of 127.0.0.1; yields the base URL."""
        command = [
            self.kubectl_path,
            "port-forward",
            "-n",
            namespace,
            "--address",
            "127.0.0.1",
            target,
            f":{port}",
        ]
        process = subprocess.Popen(
            command, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            match = re.search(r"127\.0\.0\.1:(\d+)", first)
            if match is None:
                assert process.stderr is not None
                raise KubeError(f"port-forward to {target} failed: {first}{process.stderr.read()}")
            yield f"http://127.0.0.1:{match[1]}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def admin_token(self, namespace: str, service: str) -> str:
        secret = self.get("secret", f"{service}-admin", "-n", namespace)
        return base64.b64decode(secret["data"]["token"]).decode()

    @contextmanager
    def admin(self, namespace: str, service: str, pod: str) -> Iterator[httpx.Client]:
        """A client of one pod's admin port, with the service's token."""
        headers = {"Authorization": f"Bearer {self.admin_token(namespace, service)}"}
        with (
            self.port_forward(namespace, f"pod/{pod}", 8001) as url,
            httpx.Client(base_url=url, headers=headers, timeout=30) as client,
        ):
            yield client

    def install_operator(self, *arguments: str) -> None:
        """`helm upgrade --install` of the chart with this cluster's images, waiting until it is up."""
        operator, runtime = (self.images[name].rpartition(":") for name in ("operator", "runtime"))
        self.helm(
            "upgrade",
            "--install",
            RELEASE,
            str(ROOT / "helm" / "firsttoken"),
            "--namespace",
            SYSTEM_NAMESPACE,
            "--create-namespace",
            "--wait",
            "--timeout",
            "120s",
            "--set",
            f"image.repository={operator[0]},image.tag={operator[2]},image.pullPolicy=IfNotPresent",
            "--set",
            f"runtime.image={''.join(runtime)}",
            *arguments,
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": self.kubeconfig}

    def _run(
        self, command: list[str], input: str | None, check: bool, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        shown = " ".join(command)
        try:
            done = subprocess.run(
                command,
                env=self._environment(),
                input=input,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise KubeError(f"{shown} did not end within {timeout:.0f} s") from None
        if check and done.returncode != 0:
            raise KubeError(f"{shown} ended with {done.returncode}: {done.stderr.strip()}")
        return done


def cluster_tool(*arguments: str) -> str:
    """Run `python -m e2e.cluster …`; its progress goes to our stderr, its stdout is returned."""
    command = [sys.executable, "-m", "e2e.cluster", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise KubeError(f"{' '.join(command[1:])} ended with {done.returncode}")
    return done.stdout


def is_running() -> bool:
    """Whether the local cluster serves, as `e2e.cluster status` says."""
    command = [sys.executable, "-m", "e2e.cluster", "status"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def start() -> Cluster:
    """Bring the cluster up (a no-op when it is) and build and load the images that changed."""
    cluster_tool("up")
    images = json.loads(cluster_tool("images"))
    status = json.loads(cluster_tool("status", "--json"))
    return Cluster(status["kubectl"], status["helm"], status["kubeconfig"], status["volumes"], images)


def wait_for(
    what: str, probe: Callable[[], T | None], timeout_seconds: float = 60, every_seconds: float = 0.2
) -> T:
    """Call `probe` until it gives something true. Raises KubeError naming `what` when time runs out."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise KubeError(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(every_seconds)


def condition(resource: dict[str, Any], name: str) -> dict[str, Any]:
    """The condition of that type in a resource's status, or an empty one."""
    for entry in resource.get("status", {}).get("conditions", ()):
        if entry["type"] == name:
            found: dict[str, Any] = entry
            return found
    return {}


def wait_ready(
    cluster: Cluster, namespace: str, service: str, timeout_seconds: float = 180
) -> dict[str, Any]:
    """Wait until an InferenceService is Ready for the generation that is there now; returns it."""

    def probe() -> dict[str, Any] | None:
        found = cluster.get("ftis", service, "-n", namespace)
        ready = condition(found, "Ready")
        current = ready.get("observedGeneration") == found["metadata"]["generation"]
        return found if ready.get("status") == "True" and current else None

    try:
        return wait_for(f"{service} to be Ready", probe, timeout_seconds, 0.5)
    except KubeError as error:
        ready = condition(cluster.get("ftis", service, "-n", namespace), "Ready")
        reason = f"{ready.get('reason', 'no Ready condition')}: {ready.get('message', '')}"
        raise KubeError(f"{error}; it says {reason}") from None


def switch_state(state: dict[str, Any], name: str) -> str:
    """One switch's state in an admin-port answer."""
    return next(str(entry["state"]) for entry in state["switches"] if entry["name"] == name)


def wait_switch_state(admin: httpx.Client, name: str, wanted: str, timeout_seconds: float = 30) -> None:
    """Wait until the pod behind this admin port says that the switch has that state."""
    wait_for(
        f"{name} to be {wanted}",
        lambda: switch_state(admin.get("/admin/v1/state").json(), name) == wanted,
        timeout_seconds,
        0.01,
    )
