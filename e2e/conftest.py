"""One cluster for the whole run, a namespace per module, and a dump of everything when a test fails."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e.kube import ROOT, Cluster, cluster_tool, is_running, start, wait_ready
from e2e.manifests import VALID, inference_service

EXAMPLE = ROOT / "examples" / "smollm2.yaml"
EXAMPLE_NAME = "smollm2"


@pytest.fixture(scope="session")
def up_or_down_as_before() -> Iterator[None]:
    """Afterwards the cluster is down again unless it was up before. A fixture of its own, so that this holds
    for a start that fails half-way, and its dump is still written first."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        pytest.fail("the e2e tests start a Kubernetes node and need Linux and root: run them as root")
    was_running = is_running()
    yield
    if not was_running:
        cluster_tool("down")


@pytest.fixture(scope="session")
def cluster(up_or_down_as_before: None) -> Cluster:
    """A real cluster with the operator installed by helm."""
    made = start()
    made.install_operator()
    return made


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the module's own; deleted at the end, and deleting must not hang."""
    name = "ft-" + request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=90s")
    cluster.kubectl("create", "namespace", name)
    yield name
    # Services first: a namespace whose pods are still stopping is looked at again only half a grace later.
    cluster.kubectl("delete", "ftis", "--all", "-n", name, "--timeout=60s")
    cluster.kubectl("wait", "--for=delete", "pod", "--all", "-n", name, "--timeout=90s")
    cluster.kubectl("delete", "namespace", name, "--timeout=90s")


@pytest.fixture(scope="module")
def service(cluster: Cluster, namespace: str) -> str:
    """The example, applied as it stands and Ready."""
    cluster.kubectl("apply", "-n", namespace, "-f", str(EXAMPLE))
    wait_ready(cluster, namespace, EXAMPLE_NAME)
    return EXAMPLE_NAME


@pytest.fixture(scope="module")
def kept(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A valid InferenceService without pods, to patch."""
    cluster.apply_text(inference_service(VALID), "-n", namespace)
    yield "kept"
    cluster.kubectl("delete", "ftis", "kept", "-n", namespace, "--timeout=60s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "cluster" in getattr(item, "fixturenames", ()):
        directory = ROOT / ".e2e-dumps" / item.name.replace("/", "_")[:80]
        shutil.rmtree(directory, ignore_errors=True)
        try:
            cluster_tool("dump", str(directory))
            report.sections.append(("cluster dump", f"written to {directory}"))
            report.sections.append(("pods and events", _summary(directory)))
        except Exception as error:  # the test's own failure is what matters
            report.sections.append(("cluster dump", f"could not be written: {error}"))
    return report


def _summary(directory: Path) -> str:
    texts = [path.read_text(errors="replace")[-3000:] for path in sorted(directory.glob("*summary*"))]
    return "\n".join(texts)
