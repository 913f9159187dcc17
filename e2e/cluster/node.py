"""Starts the node, knows whether it lives, and clears away what it or a dead predecessor left."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import containerd, images, kernel, network, processes, tools
from .artefacts import lock, remove_tree
from .certificates import SERVER, kubeconfig, make_certificates, write_private
from .configuration import daemon_options, write_configuration
from .console import ClusterError, run, say, step, wait_for
from .mounts import unmount_below
from .places import BIN, NETWORK_NAME, NODE_NAME, PROXY_HEALTH_PORT, RUN, Places

LOCK = Path("/run/lock/firsttoken.lock")  # one node per machine; not in RUN, which clearing deletes
RECORD = RUN / "node.json"
START_ORDER = (
    "etcd",
    "containerd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
)


def kubectl(
    where: Places, *words: str, why: str, stdin: str | None = None, timeout_seconds: float = 60
) -> str:
    """One kubectl command against this node; returns stdout."""
    command = [BIN / "kubectl", "--kubeconfig", where.kubeconfig, *words]
    return run(command, why=why, stdin=stdin, timeout_seconds=timeout_seconds)


def succeeds(where: Places, *words: str) -> bool:
    """Whether a kubectl command ends well; for polling."""
    command = [str(BIN / "kubectl"), "--kubeconfig", str(where.kubeconfig), "--request-timeout=2s", *words]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Health:
    """`running`: daemon to process id. `problems`: in words; empty when the node serves pods."""

    running: dict[str, int]
    problems: list[str]

    @property
    def serves(self) -> bool:
        return not self.problems


def health(where: Places) -> Health:
    """Looks at the processes first, then asks the API server whether the node is Ready."""
    running = processes.daemons()
    problems = [f"{name} does not run" for name in START_ORDER if name not in running]
    if not problems and (cache := _record().cache) != where.cache:
        problems.append(f"it belongs to another cache, {cache}")
    if not problems and not succeeds(where, "get", "--raw", "/readyz"):
        problems.append("the API server does not answer that it is ready")
    if not problems and not succeeds(
        where, "wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=1s"
    ):
        problems.append(f"the node {NODE_NAME} is not Ready")
    return Health(running, problems)


@dataclass(frozen=True)
class Record:
    """What must be known to clear a node away: its cache, and the kernel settings before it started."""

    cache: Path | None = None
    kernel: Mapping[str, str] = field(default_factory=dict)


def _record() -> Record:
    """That of the node that runs or ran here; an empty one when it is gone or cut short."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(RECORD.read_text())
        return Record(Path(found["cache"]), found.get("kernel", {}))
    return Record()


def up(where: Places) -> None:
    """A serving node: at once when there is one, else what is left of an old one is cleared first."""
    tools.require_root_on_linux()
    with lock(LOCK):
        if health(where).serves:
            say("up already")
            return
        tools.install_tools(where)
        clear(where)
        network.refuse_another_kubernetes()
        try:
            _start(where)
        except BaseException:
            say(f"the node did not come up; its logs are in {where.logs}; `down` clears it away")
            raise
        say(f"up: {SERVER}, kubeconfig {where.kubeconfig}")


def down(where: Places) -> None:
    """Nothing left but the cache: no process, mount, bridge or firewall chain. Waits until it is so."""
    tools.require_root_on_linux()
    with lock(LOCK):
        if not clear(where):
            say("down already")


def clear(where: Places) -> bool:
    """Ends and removes everything a node (this one or a predecessor that died) has on this machine.

    Every part is looked for in its own right, so it does not matter how much of the rest is left.
    RUN, with the record in it, goes last: who is interrupted here is not taken for done.
    True when there was something to clear.
    """
    traces = (processes.find(), processes.containers(), processes.cgroup_directories())
    if not any(traces) and not network.bridge_exists() and not RUN.exists() and not where.volatile.exists():
        return network.remove_chains(node_was_here=False)
    with step("clearing the node that ran here"):
        # The image store outlives the node, so containerd ends in order; the others' state is thrown away.
        # kubelet ends first, or it would start again what ends after it.
        running = processes.daemons()
        if "kubelet" in running:
            processes.end([running["kubelet"]])
        processes.end(processes.containers())
        processes.stop("containerd")
        processes.end(process.pid for process in processes.find())
        processes.end(processes.containers())  # what containerd was just starting
        record = _record()
        recorded = Places(record.cache or where.cache)
        for socket in containerd.shim_sockets():
            socket.unlink(missing_ok=True)
        # Not where.volumes: what is mounted there is the user's.
        unmount_below(RUN, *(root for one in {where, recorded} for root in (one.volatile, one.containerd)))
        network.remove_bridge()
        network.remove_chains(node_was_here=True)
        kernel.put_back(record.kernel)
        _remove_strays(recorded.logs)
        for directory in processes.cgroup_directories():
            _remove_cgroup(directory)
        for one in {where, recorded}:
            remove_tree(one.volatile)
            one.kubeconfig.unlink(missing_ok=True)
        remove_tree(RUN)
    return True


def _remove_strays(logs: Path) -> None:
    """What kubelet and the CNI library put in places that they do not let us choose."""
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(logs):
            link.unlink()
    for result in Path("/var/lib/cni/results").glob(f"{NETWORK_NAME}-*"):
        result.unlink()
    plugins = Path("/var/lib/kubelet/device-plugins")
    (plugins / "kubelet.sock").unlink(missing_ok=True)
    for directory in (plugins, plugins.parent):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            directory.rmdir()


def _remove_cgroup(directory: Path) -> None:
    for inner in sorted((d for d in directory.rglob("*") if d.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            inner.rmdir()
    with contextlib.suppress(OSError):
        directory.rmdir()


def _start(where: Places) -> None:
    for directory in (where.volatile, where.logs, where.volumes, where.containerd, RUN):
        directory.mkdir(parents=True, exist_ok=True)
    write_private(RECORD, json.dumps({"cache": str(where.cache), "kernel": kernel.settings()}))
    remove_tree(where.logs / "pods")
    for old in where.logs.glob("*.log"):
        old.replace(old.with_suffix(".log.previous"))
    with step("making certificates, bridge and configuration"):
        make_certificates(where.volatile / "pki")
        network.set_up()
        cni = tools.cni_directory()
        assert cni is not None  # install_tools has seen to it
        write_configuration(where, cni, images.pause_reference())
        write_private(where.kubeconfig, kubeconfig(where.volatile / "pki", "admin"))
    with step("starting etcd, API server and containerd"), ThreadPoolExecutor() as pool:
        runtime = pool.submit(_start_containerd, where)
        _launch(where, "etcd", shutil.which("etcd") or "etcd")
        _launch(where, "kube-apiserver")
        _until(where, "kube-apiserver", lambda: succeeds(where, "get", "--raw", "/readyz"), 60)
        runtime.result()
    with step("starting controllers, scheduler, kubelet and proxy"):
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
            _launch(where, name)
        ready = ("wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=1s")
        _until(where, "kubelet", lambda: succeeds(where, *ready), 60)
        account = ("get", "serviceaccount", "default", "--namespace=default")
        _until(where, "kube-controller-manager", lambda: succeeds(where, *account), 60)
        _until(where, "kube-proxy", _proxy_is_synced, 30)


def _start_containerd(where: Places) -> None:
    _launch(where, "containerd")
    _until(where, "containerd", containerd.answers, 30)
    if containerd.forget_containers():
        processes.stop("containerd")
        _launch(where, "containerd")
        _until(where, "containerd", containerd.answers, 30)
    images.import_pause(where)
    images.prune(where)


def _launch(where: Places, name: str, program: str | Path | None = None) -> None:
    program = program or shutil.which(name) or tools.kubernetes(where) / name
    processes.start(name, program, *daemon_options(where, name), log=where.logs / f"{name}.log")


def _until(where: Places, name: str, condition: Callable[[], bool], timeout_seconds: float) -> None:
    """Waits for a daemon; says the end of its log when it dies or takes too long."""

    def ready_or_dead() -> bool:
        if condition():
            return True
        if name not in processes.daemons():
            raise ClusterError(f"{name} ended right after its start")
        return False

    try:
        wait_for(f"{name} ready", ready_or_dead, timeout_seconds=timeout_seconds)
    except ClusterError as error:
        log = (where.logs / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
        raise ClusterError(f"{error}; the end of {where.logs / name}.log:\n  " + "\n  ".join(log)) from None


def _proxy_is_synced() -> bool:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", PROXY_HEALTH_PORT, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
