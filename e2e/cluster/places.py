"""Where everything lies, and the node's private addresses. Nothing here touches the disk."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.prefix) / "bin"  # the virtual environment this program runs in: kubectl, uv

# One node per machine, whatever the cache: bridge, addresses and run directory are machine-wide.
RUN = Path("/run/firsttoken")
NODE_NAME = "firsttoken"
BRIDGE = "ft0"
CGROUP = "firsttoken"
NETWORK_NAME = "firsttoken"
NODE_IP = "10.244.0.1"
POD_CIDR = "10.244.0.0/24"
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
API_PORT = 16443
KUBELET_PORT = 16250
PROXY_HEALTH_PORT = 16256
PROXY_METRICS_PORT = 16249
ETCD_PORT = 16379
ETCD_PEER_PORT = 16380
CONTAINERD_SOCKET = RUN / "containerd.sock"
CONTAINERD_STATE = RUN / "containerd"


@dataclass(frozen=True)
class Places:
    """The directories under one cache. `cluster/run` is wiped by every start, the rest is kept."""

    cache: Path

    @property
    def artefacts(self) -> Path:
        return self.cache / "artefacts"

    @property
    def cluster(self) -> Path:
        return self.cache / "cluster"

    @property
    def volatile(self) -> Path:
        return self.cluster / "run"

    @property
    def containerd(self) -> Path:
        return self.cluster / "containerd"

    @property
    def logs(self) -> Path:
        return self.cluster / "logs"

    @property
    def volumes(self) -> Path:
        return self.cluster / "volumes"

    @property
    def kubeconfig(self) -> Path:
        return self.cluster / "kubeconfig"

    @property
    def images(self) -> Path:
        return self.cluster / "images.json"


def places() -> Places:
    """${FIRSTTOKEN_CACHE}, or firsttoken/ under ${XDG_CACHE_HOME}, or under ~/.cache."""
    if chosen := os.environ.get("FIRSTTOKEN_CACHE"):
        return Places(Path(chosen).resolve())
    base = os.environ.get("XDG_CACHE_HOME")
    return Places((Path(base) if base else Path.home() / ".cache").resolve() / "firsttoken")
