"""The cluster tool itself: it starts, survives being killed at any moment, and leaves nothing behind.

The node of this machine is stopped and started here, so this module runs before those that use it
(pytest takes the files of e2e/ by name), and leaves it as it was: up or down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import kernel, layers, mounts, processes, tools
from e2e.cluster.places import BRIDGE, REPOSITORY, RUN, places

WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: web
        image: IMAGE
        command: [python, -m, http.server, "8000", --directory, /models]
        ports: [{name: http, containerPort: 8000}]
        readinessProbe: {tcpSocket: {port: http}, periodSeconds: 1}
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities: {drop: [ALL]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: http}]}
"""


def tool(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "e2e.cluster", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


def status() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(tool("status", "--json", check=False).stdout)
    return facts


def kubectl(*words: str, stdin: str | None = None) -> str:
    where = places()
    command = [status()["kubectl"], "--kubeconfig", str(where.kubeconfig), *words]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def serve_a_request() -> None:
    """Given a node that is up: two pods of the runtime image start and answer through a Service."""
    image = json.loads(tool("images").stdout)["runtime"]
    kubectl("apply", "--filename", "-", stdin=WEB.replace("IMAGE", image))
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    address = kubectl("get", "service", "web", "--output=jsonpath={.spec.clusterIP}")
    ask = f"import urllib.request as u; print(u.urlopen('http://{address}/', timeout=5).read().decode())"
    deadline = time.monotonic() + 15  # a Service follows its pods within a second or so
    while True:
        try:
            assert "smollm2" in kubectl("exec", "deployment/web", "--", "python", "-c", ask)
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def pod(name: str, command: list[str]) -> dict[str, Any]:
    """A pod of the operator image with a scratch directory that outlives its container."""
    container = {
        "name": name,
        "image": json.loads(tool("images").stdout)["operator"],
        "command": command,
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }


def everything_of_the_node() -> set[int]:
    return {process.pid for process in processes.find()} | processes.containers()


def leftovers() -> dict[str, Any]:
    """What a node has on the machine outside the cache; empty values when it has gone completely."""
    where = places()
    chains = "".join(
        subprocess.run([f"{family}-save"], capture_output=True, text=True, check=True).stdout
        for family in ("iptables", "ip6tables")
    )
    table = mounts.MOUNT_TABLE.read_text()
    return {
        "processes": everything_of_the_node(),
        "mounts": mounts.mounted_below(table, [RUN, where.cluster]),
        "devices": [name for name in os.listdir("/sys/class/net") if name == BRIDGE],
        "chains": [word for word in chains.split() if word.startswith(("KUBE-", "FIRSTTOKEN-"))],
        "cgroups": processes.cgroup_directories(),
        "files": [path for path in (RUN, where.volatile, where.kubeconfig) if path.exists()],
    }


@pytest.fixture(scope="module")
def as_it_was() -> Iterator[None]:
    """Fails (not skips) where a node cannot run; afterwards the node is up or down as it was before."""
    tools.require_root_on_linux()
    served = status()["serving"]
    yield
    tool("up" if served else "down")


@pytest.fixture
def up(as_it_was: None) -> None:
    tool("up")


class TestLifecycle:
    def test_a_second_up_changes_nothing_and_is_quick(self, up: None) -> None:
        before = status()["processes"]
        began = time.monotonic()
        tool("up")
        assert time.monotonic() - began < 2
        assert status()["processes"] == before

    def test_pods_start_and_answer_through_a_service(self, up: None) -> None:
        serve_a_request()

    def test_down_leaves_nothing(self, up: None) -> None:
        serve_a_request()
        tool("down")
        assert not any(leftovers().values()), leftovers()
        assert tool("status", check=False).returncode == 1
        assert "down already" in tool("down").stderr

    def test_up_after_only_the_daemons_were_killed(self, up: None) -> None:
        serve_a_request()
        processes.end(status()["processes"].values())
        assert not status()["serving"]
        assert processes.containers(), "the containers should have outlived their daemons"
        tool("up")
        serve_a_request()

    def test_up_after_everything_was_killed(self, up: None) -> None:
        serve_a_request()
        processes.end(everything_of_the_node())
        assert leftovers()["mounts"]
        tool("up")
        serve_a_request()

    def test_down_after_everything_was_killed(self, up: None) -> None:
        serve_a_request()
        processes.end(everything_of_the_node())
        tool("down")
        assert not any(leftovers().values()), leftovers()

    def test_down_puts_the_kernels_settings_back(self, as_it_was: None) -> None:
        tool("down")
        panic = kernel.ROOT / "kernel/panic"
        was = panic.read_text()
        try:
            panic.write_text("7")
            tool("up")
            assert panic.read_text().strip() == "10", "kubelet should have changed it"
            tool("down")
            assert panic.read_text().strip() == "7"
        finally:
            panic.write_text(was)

    @pytest.mark.parametrize("moment_seconds", [0.5, 2.0, 4.0])
    def test_up_after_an_up_that_was_killed_in_the_middle(
        self, as_it_was: None, moment_seconds: float
    ) -> None:
        tool("down")
        command = [sys.executable, "-m", "e2e.cluster", "up"]
        first = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        time.sleep(moment_seconds)
        first.send_signal(signal.SIGKILL)
        first.wait()
        tool("up")
        assert status()["serving"]

    def test_two_ups_at_once_make_one_node(self, as_it_was: None) -> None:
        tool("down")
        command = [sys.executable, "-m", "e2e.cluster", "up"]
        both = [subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE) for _ in range(2)]
        said = [process.communicate()[1].decode() for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        assert sum("up already" in text for text in said) == 1
        assert len([process for process in processes.find() if process.is_daemon]) == 7


class TestWhatItOffers:
    def test_announced_gpus_are_scheduled_and_can_be_taken_back(self, up: None) -> None:
        wanted = pod("gpu", ["true"])
        wanted["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "NVIDIA-L4"}
        wanted["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
        wanted["spec"]["restartPolicy"] = "Never"
        tool("fake-gpu", "2", "NVIDIA-L4")
        kubectl("apply", "--filename", "-", stdin=json.dumps(wanted))
        kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/gpu", "--timeout=30s")
        kubectl("delete", "pod", "gpu")
        tool("fake-gpu", "0")
        assert "nvidia.com/gpu" not in kubectl("get", "nodes", "--output=yaml")

    def test_dump_holds_pods_events_and_the_logs_of_a_container_that_failed(
        self, up: None, tmp_path: Path
    ) -> None:
        once = "mkdir /tmp/been-here && exec python -c 1/0; exec sleep 99"
        kubectl("apply", "--filename", "-", stdin=json.dumps(pod("crash", ["sh", "-c", once])))
        again = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
        kubectl("wait", again, "pod/crash", "--timeout=60s")
        tool("dump", str(tmp_path))
        kubectl("delete", "pod", "crash")
        assert "ZeroDivisionError" in (tmp_path / "logs/default.crash.crash.previous.log").read_text()
        assert "name: crash" in (tmp_path / "pods.yaml").read_text()
        assert "crash" in (tmp_path / "summary.txt").read_text()
        assert (tmp_path / "kubelet.log").read_text().strip()

    def test_dump_of_a_node_that_is_down_says_so_and_does_not_fail(
        self, as_it_was: None, tmp_path: Path
    ) -> None:
        tool("down")
        assert "does not answer" in tool("dump", str(tmp_path)).stderr

    def test_images_say_to_start_the_node_first(self, as_it_was: None) -> None:
        tool("down")
        refused = tool("images", check=False)
        assert refused.returncode == 1
        assert "say `up` first" in refused.stderr

    def test_unchanged_images_cost_nothing(self, up: None) -> None:
        first = tool("images")
        began = time.monotonic()
        second = tool("images")
        assert second.stdout == first.stdout
        assert "importing" not in second.stderr
        assert time.monotonic() - began < 3

    def test_the_kubeconfig_is_private(self, up: None) -> None:
        assert places().kubeconfig.stat().st_mode & 0o777 == 0o600


class TestContainerfile:
    def test_the_operators_builds_with_buildah_from_another_base_image(self, tmp_path: Path) -> None:
        """As a user builds it, only that the base image is our own: one without a registry's name."""
        tools.require_root_on_linux()
        tools.install_packages()
        base = layers.base_root(places())
        storage = ["--root", str(tmp_path / "root"), "--runroot", str(tmp_path / "run")]
        buildah = ["buildah", *storage, "--storage-driver", "overlay"]
        chroot = ["--isolation", "chroot"]

        def run(*words: str) -> str:
            done = subprocess.run(
                [*buildah, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout.strip()

        try:
            empty = run("from", "scratch")
            run("add", "--quiet", empty, str(base), "/")
            run("commit", "--quiet", empty, "localhost/base")
            secrets = [
                f"--secret=id={name},src={path}"
                for name, path in (
                    ("pip.conf", os.environ.get("PIP_CONFIG_FILE", "/etc/pip.conf")),
                    ("ca.crt", "/etc/ssl/certs/ca-certificates.crt"),
                )
                if Path(path).is_file()
            ]
            file = ["--file", "operator/Containerfile", "--tag", "localhost/operator"]
            run("bud", *chroot, *secrets, "--build-arg", "BASE_IMAGE=localhost/base", *file, ".")
            built = run("from", "localhost/operator")
            assert "operator" in run("run", *chroot, built, "--", "firsttoken", "--help")
            assert run("run", *chroot, built, "--", "id", "-u") == "65532"
        finally:
            subprocess.run([*buildah, "rm", "--all"], capture_output=True, check=False)
            mounts.unmount_below(tmp_path)
