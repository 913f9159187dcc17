"""The same commands on kind, where a Docker engine answers and `kind` is on PATH.

Not tried: the machines this project is built on have no Docker engine. Kept short for that
reason; the bare node is what the tests run on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from . import images, tools
from .console import ClusterError, run, say, step
from .node import Health, succeeds
from .places import REPOSITORY, RUN, Places

CLUSTER = "firsttoken"


def available() -> bool:
    """Whether kind is installed and a Docker engine answers."""
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    try:
        return (
            subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


@dataclass(frozen=True)
class Kind:
    node_name: str = f"{CLUSTER}-control-plane"

    def _exists(self) -> bool:
        return CLUSTER in run(["kind", "get", "clusters"], why="looking for the kind cluster").split()

    def health(self, where: Places) -> Health:
        if not self._exists():
            return Health({}, [f"there is no kind cluster {CLUSTER}"])
        ready = succeeds(where, "wait", "--for=condition=Ready", f"node/{self.node_name}", "--timeout=1s")
        return Health({}, [] if ready else [f"the node {self.node_name} is not Ready"])

    def up(self, where: Places) -> None:
        tools.helm(where)
        where.volumes.mkdir(parents=True, exist_ok=True)
        if self._exists():
            if self.health(where).serves:
                say("up already")
                return
            self.down(where)
        mounts = [{"hostPath": str(where.volumes), "containerPath": str(where.volumes)}]
        configuration = {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "nodes": [{"role": "control-plane", "extraMounts": mounts}],
        }
        with step("creating a kind cluster"):
            options = ["--name", CLUSTER, "--kubeconfig", where.kubeconfig, "--wait", "120s", "--config", "-"]
            command = ["kind", "create", "cluster", *options]
            run(command, stdin=json.dumps(configuration), why="creating the kind cluster")

    def down(self, where: Places) -> None:
        with step("deleting the kind cluster"):
            run(["kind", "delete", "cluster", "--name", CLUSTER], why="deleting the kind cluster")
            where.kubeconfig.unlink(missing_ok=True)

    def build_images(self, where: Places) -> dict[str, str]:
        """docker build of the Containerfiles, tagged as on the bare node, then `kind load`."""
        wanted = images.references(where)
        for image, name in wanted.items():
            known = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
            if known.returncode != 0:
                with step(f"building {name}"):
                    file = REPOSITORY / image / "Containerfile"
                    command = ["docker", "build", "--file", file, "--tag", name, REPOSITORY]
                    run(command, why=f"building the {image} image", timeout_seconds=3600)
            with step(f"loading {name} into kind"):
                command = ["kind", "load", "docker-image", "--name", CLUSTER, name]
                run(command, why=f"loading the {image} image", timeout_seconds=1800)
        where.images.write_text(json.dumps(wanted, indent=1) + "\n")
        return wanted


def chosen_kind(where: Places, wanted: str | None) -> Kind | None:
    """Kind, or None for the bare node. What is up stays; else as asked; `auto` prefers kind."""
    if RUN.exists() and wanted == "kind":
        raise ClusterError("the bare node is up, or remains of it are there; say `down` first")
    if RUN.exists() or wanted == "bare":
        return None
    if available():
        return Kind()
    if wanted == "kind":
        raise ClusterError("--node kind needs `kind` on PATH and a Docker engine that answers `docker info`")
    return None
