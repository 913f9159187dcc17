"""What the node is made of: Debian packages (only those missing) and three programs built by Go."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .artefacts import artefact, digest, find, tree_digest
from .console import ClusterError, run, step
from .places import Places

KUBERNETES_VERSION = "1.34.2"
HELM_VERSION = "4.3.2"
SOURCES = Path(__file__).parent
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubelet")
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_VERSION_PACKAGE = "k8s.io/component-base/version"
LINKER_FLAGS = " ".join(
    [
        "-s -w",
        f"-X {_VERSION_PACKAGE}.gitVersion=v{KUBERNETES_VERSION}",
        f"-X {_VERSION_PACKAGE}.gitMajor={_MAJOR}",
        f"-X {_VERSION_PACKAGE}.gitMinor={_MINOR}",
    ]
)

# program -> the Debian package that brings it
DEBIAN = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ethtool": "ethtool",
    "ip": "iproute2",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
    "buildah": "buildah",  # the tests build the Containerfiles with it
    "mount": "mount",
    "nsenter": "util-linux",
}
CNI_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("bridge", "host-local", "loopback", "portmap")
NO_SERVICES = "#!/bin/sh\n# firsttoken e2e.cluster: only while it installs packages\nexit 101\n"


def cni_directory() -> Path | None:
    """Where the CNI plugins lie, or None when they are not all in one place."""
    for directory in CNI_DIRECTORIES:
        if all((directory / plugin).exists() for plugin in CNI_PLUGINS):
            return directory
    return None


def missing_packages() -> list[str]:
    """Debian packages whose program is not on PATH."""
    missing = {package for program, package in DEBIAN.items() if shutil.which(program) is None}
    if cni_directory() is None:
        missing.add("containernetworking-plugins")
    return sorted(missing)


@contextmanager
def no_services_started(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """Debian's packages would start etcd and containerd as services of the machine; this forbids it.

    A policy that the machine has already is left as it is; one that we left when we were killed is ours.
    """
    if policy.exists() and policy.read_text() != NO_SERVICES:
        yield
        return
    policy.write_text(NO_SERVICES)
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def install_packages() -> None:
    """apt-get, for what is missing only; never removes a package that is there (Docker's, say)."""
    packages = missing_packages()
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"not a Debian machine; install what these packages bring: {' '.join(packages)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"installing Debian packages: {' '.join(packages)}"), no_services_started():
        run(["apt-get", "update", "--quiet"], why="reading the package lists", environment=quiet)
        options = ["--yes", "--quiet", "--no-install-recommends", "--no-remove"]
        run(["apt-get", "install", *options, *packages], why="installing packages", environment=quiet)
    if still := missing_packages():
        raise ClusterError(f"apt-get installed, but these still bring no program on PATH: {' '.join(still)}")


def _go(*words: str | Path, why: str, cwd: Path, **settings: str) -> None:
    if shutil.which("go") is None:
        raise ClusterError(f"{why}: Go is not installed or not on PATH; install Go 1.24 or newer")
    environment = {**os.environ, "CGO_ENABLED": "0", **settings}
    run(["go", *words], why=why, cwd=cwd, environment=environment, timeout_seconds=3600)


def _build(source: Path, output: Path, flags: str) -> None:
    options = ["-trimpath", "-mod=readonly", "-ldflags", flags]
    _go("build", *options, "-o", output, ".", why=f"building {source.name}", cwd=source)


def _kubernetes_key() -> str:
    return digest(tree_digest(SOURCES, "kubernetes"), LINKER_FLAGS, PROGRAMS)


def kubernetes(where: Places) -> Path:
    """The directory with the five programs of Kubernetes; they are names of one binary."""

    def make(directory: Path) -> None:
        _build(SOURCES / "kubernetes", directory / "kubernetes", LINKER_FLAGS)
        for program in PROGRAMS:
            (directory / program).symlink_to("kubernetes")

    what = f"building Kubernetes {KUBERNETES_VERSION} from source (once; about 7 minutes on 2 cores)"
    return artefact(where, "kubernetes", _kubernetes_key(), make, what=what)


def helm(where: Places) -> Path:
    """The helm program."""

    def make(directory: Path) -> None:
        package = f"helm.sh/helm/v4/cmd/helm@v{HELM_VERSION}"
        options = ["-trimpath", "-ldflags", "-s -w"]
        _go("install", *options, package, why="building helm", cwd=directory, GOBIN=str(directory))

    what = f"building helm {HELM_VERSION} from source (once; 2 to 4 minutes on 2 cores)"
    return artefact(where, "helm", digest(HELM_VERSION), make, what=what) / "helm"


def built_helm(where: Places) -> Path | None:
    """The helm program if it has been built, without building it."""
    directory = find(where, "helm", digest(HELM_VERSION))
    return directory / "helm" if directory else None


def pause(where: Places) -> Path:
    """The program that holds a pod's namespaces open."""

    def make(directory: Path) -> None:
        _build(SOURCES / "pause", directory / "pause", "-s -w")

    key = digest(tree_digest(SOURCES, "pause"))
    return artefact(where, "pause", key, make, what="building the pause program") / "pause"


def require_root_on_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise ClusterError(f"a Kubernetes node needs Linux; this is {sys.platform}")
    if os.geteuid() != 0:
        raise ClusterError("a Kubernetes node needs root (mounts, network, cgroups); run it as root")


def install_tools(where: Places) -> None:
    """Everything that `up` and `images` need, the slow parts side by side."""
    from .layers import base_root  # the base file system is a tool here: slow, and made once

    require_root_on_linux()
    install_packages()

    def go_programs() -> None:  # one after the other: each alone keeps all cores busy
        pause(where)
        kubernetes(where)
        helm(where)

    with ThreadPoolExecutor() as pool:
        base = pool.submit(base_root, where)
        go_programs()
        base.result()
