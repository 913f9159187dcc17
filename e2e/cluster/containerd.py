"""The node's own containerd: its configuration, and what this program asks of it through ctr."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .console import run
from .places import CONTAINERD_SOCKET, CONTAINERD_STATE, RUN, Places

NAMESPACE = "k8s.io"

# restrict_oom_score_adj: without CAP_SYS_RESOURCE runc could not lower the score and would die.
# netns_mounts_under_state_dir: else they go where every other containerd puts them too.
CONFIGURATION = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_directory}"
    conf_dir = "{cni_configuration}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
      Root = "{runc}"
"""


def configuration(where: Places, *, pause_image: str, cni_directory: Path, cni_configuration: Path) -> str:
    """The text of containerd's config.toml."""
    return CONFIGURATION.format(
        root=where.containerd,
        state=CONTAINERD_STATE,
        socket=CONTAINERD_SOCKET,
        runc=RUN / "runc",
        pause_image=pause_image,
        cni_directory=cni_directory,
        cni_configuration=cni_configuration,
    )


def ctr(*words: str | Path, why: str, stdin: bytes | None = None) -> str:
    """One ctr command in Kubernetes' namespace of the node's own containerd."""
    command = ["ctr", "--address", CONTAINERD_SOCKET, "--namespace", NAMESPACE, *words]
    return run(command, why=why, stdin=stdin)


def answers() -> bool:
    """Whether containerd takes requests."""
    command = ["ctr", "--address", str(CONTAINERD_SOCKET), "--timeout", "2s", "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def image_names() -> list[str]:
    return ctr("images", "list", "--quiet", why="listing images").split()


def has_snapshot(chain: str) -> bool:
    """Whether the unpacked layer stack named by this chain id is there and complete."""
    words = ["ctr", "--address", str(CONTAINERD_SOCKET), "--namespace", NAMESPACE, "snapshots", "info", chain]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def forget_containers() -> bool:
    """Drops the records of containers whose processes are long dead; True when there were any.

    The image store is kept across starts, and these records lie in the same database. The CRI
    plugin holds a copy in memory, so containerd has to be started again afterwards.
    """
    left = ctr("containers", "list", "--quiet", why="listing containers").split()
    if left:
        subprocess.run(
            [
                "ctr",
                "--address",
                str(CONTAINERD_SOCKET),
                "--namespace",
                NAMESPACE,
                "tasks",
                "delete",
                "-f",
                *left,
            ],
            capture_output=True,
            check=False,  # most have no task any more
        )
        ctr("containers", "delete", *left, why="removing the records of dead containers")
    return bool(left)


def shim_sockets() -> list[Path]:
    """The sockets of this containerd's shims: they lie in one directory with every other containerd's."""
    found = []
    for file in CONTAINERD_STATE.glob("io.containerd.runtime.v2.task/*/*/address"):
        address = file.read_text().strip().removeprefix("unix://")
        if address.startswith("/run/containerd/s/"):
            found.append(Path(address))
    return found
