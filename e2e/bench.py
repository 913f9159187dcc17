"""`make bench`: figures for the README, with machine, versions, medians and worst cases. Never a test.

Three parts: a server without a cluster (`firsttoken bench` against `firsttoken serve`), the engine's own
overhead per step, and, on the local cluster, how long a switch takes from the keyboard to the pod.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from e2e.demo_model import model_path
from e2e.kube import ROOT, Cluster, start, wait_for, wait_ready, wait_switch_state
from firsttoken_runtime.measure import machine, overhead
from firsttoken_runtime.measure.figures import row
from firsttoken_runtime.measure.report import print_report

NAMESPACE = "bench"
SERVICE = "smollm2"
FIRSTTOKEN = ROOT / ".venv" / "bin" / "firsttoken"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per figure (default 5)")
    parser.add_argument("--only", choices=("server", "engine", "cluster"), help="run one part")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    options = parser.parse_args()
    parts: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "server": _server,
        "engine": _engine,
        "cluster": _cluster,
    }
    rows: list[dict[str, Any]] = []
    for name, part in parts.items():
        if options.only in (None, name):
            print(f"bench: {name}", file=sys.stderr)
            rows += part(options.rounds)
    report = {"machine": machine.describe(), "rows": rows}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, str, Path]]:
    """A `firsttoken serve` of the real model; yields its URL, its admin URL and the token file."""
    port, admin_port = free_port(), free_port()
    with TemporaryDirectory() as directory:
        token = Path(directory) / "token"
        token.write_text(os.urandom(16).hex())
        command = [str(FIRSTTOKEN), "serve", "--model", str(model_path()), "--port", str(port)]
        command += ["--admin-port", str(admin_port), "--admin-token-file", str(token), *arguments]
        with (Path(directory) / "log").open("w+") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log)
            try:
                url = f"http://127.0.0.1:{port}"
                wait_for("the server to be ready", lambda: _ready(process, url, log.name), 120)
                yield url, f"http://127.0.0.1:{admin_port}", token
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def _ready(process: subprocess.Popen[bytes], url: str, log: str) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"bench: firsttoken serve ended: {Path(log).read_text()[-2000:]}")
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _server(rounds: int) -> list[dict[str, Any]]:
    with serving() as (url, admin, token):
        command = [str(FIRSTTOKEN), "bench", "--url", url, "--admin-url", admin]
        command += ["--admin-token-file", str(token), "--rounds", str(rounds), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def _engine(rounds: int) -> list[dict[str, Any]]:
    return [entry.to_json() for entry in overhead.measure(rounds)]


def _cluster(rounds: int) -> list[dict[str, Any]]:
    cluster = start()
    cluster.install_operator()
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(ROOT / "examples" / "smollm2.yaml"))
        wait_ready(cluster, NAMESPACE, SERVICE)
        time.sleep(5)
        patches = _patches(cluster, 20)
        kills = _kills(cluster, max(rounds, 5))
        memory = [_operator_mib()]
    finally:
        cluster.kubectl("delete", "killswitch", "global", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=90s")
    return [
        row("switch", "kubectl patch typed to effective in the pod", patches).to_json(),
        row("switch", "KillSwitch applied to effective in the pod", kills).to_json(),
        row("operator", "resident memory", memory, "MiB").to_json(),
    ]


def _patches(cluster: Cluster, times: int) -> list[float]:
    figures = []
    pod = cluster.pods(NAMESPACE, SERVICE)[0]["metadata"]["name"]
    with cluster.admin(NAMESPACE, SERVICE, pod) as admin:
        for number in range(times):
            back = number % 2 == 0
            wanted = "rolledBack" if back else "on"
            started = time.monotonic()
            cluster.patch(NAMESPACE, SERVICE, {"rollback": {"chunkedPrefill": back}})
            figures.append(_effective_ms(admin, wanted, started))
            time.sleep(0.5)
    return figures


def _kills(cluster: Cluster, times: int) -> list[float]:
    figures = []
    pod = cluster.pods(NAMESPACE, SERVICE)[0]["metadata"]["name"]
    with cluster.admin(NAMESPACE, SERVICE, pod) as admin:
        for _ in range(times):
            started = time.monotonic()
            cluster.kubectl("apply", "-f", str(ROOT / "examples" / "killswitch.yaml"))
            figures.append(_effective_ms(admin, "killed", started))
            cluster.kubectl("delete", "killswitch", "global")
            _effective_ms(admin, "on", time.monotonic())
    return figures


def _effective_ms(admin: httpx.Client, wanted: str, started: float) -> float:
    wait_switch_state(admin, "chunkedPrefill", wanted)
    return (time.monotonic() - started) * 1e3


def _operator_mib() -> float:
    """Resident memory of the operator's process, from /proc: the node is this machine."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"operator" in command and any(part.endswith(b"firsttoken") for part in command):
                status = (entry / "status").read_text()
                resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
                return int(resident.split()[1]) / 1024
        except (OSError, StopIteration):
            continue
    raise SystemExit("bench: the operator's process was not found on this machine")


if __name__ == "__main__":
    sys.exit(main())
