"""`make bench`: figures for the README, with machine, versions, medians and worst cases. Never a test.

Three parts: a server without a cluster (`firsttoken bench` against `firsttoken serve`), the engine's own
overhead per step, and, on the local cluster, how long a switch takes from the keyboard to the pod. A fourth,
`--only peers`, runs other servers beside it; `--install-peers` gets them first.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import httpx

from e2e.kube import ROOT, Cluster, start, switch_state, wait_ready, wait_switch_state
from e2e.peers import run
from e2e.peers.install import install
from e2e.serving import FIRSTTOKEN, serving
from firsttoken_runtime.measure import machine, overhead
from firsttoken_runtime.measure.figures import row
from firsttoken_runtime.measure.report import print_report
from firsttoken_runtime.measure.scenarios import SCENARIOS

NAMESPACE = "bench"
SERVICE = "smollm2"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per figure (default 5)")
    parser.add_argument("--only", choices=("server", "engine", "cluster", "peers"), help="run one part")
    parser.add_argument(
        "--install-peers", nargs="*", metavar="NAME", help="install all peers, or these; no run"
    )
    parser.add_argument("--peer", action="append", metavar="NAME", help="for peers: only this one")
    parser.add_argument("--scenario", action="append", choices=tuple(SCENARIOS), help="for peers: only this")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    options = parser.parse_args()
    # The servers that were started end with the program, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.install_peers is not None:
        return 0 if all(said == "installed" for said in install(options.install_peers).values()) else 1
    absent: dict[str, str] = {}
    parts: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "server": _server,
        "engine": _engine,
        "cluster": _cluster,
        "peers": lambda rounds: _peers(rounds, options.scenario or tuple(SCENARIOS), options.peer, absent),
    }
    rows: list[dict[str, Any]] = []
    for name, part in parts.items():
        # The peers take long and are not there on most machines: only when they are asked for.
        if options.only == name or (options.only is None and name != "peers"):
            print(f"bench: {name}", file=sys.stderr)
            rows += part(options.rounds)
    warnings = [f"{name} is not here: {reason}" for name, reason in absent.items()]
    report = {"machine": machine.describe(), "rows": rows, "warnings": warnings}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def _server(rounds: int) -> list[dict[str, Any]]:
    with serving() as (url, admin, token):
        command = [str(FIRSTTOKEN), "bench", "--url", url, "--admin-url", admin]
        command += ["--admin-token-file", str(token), "--rounds", str(rounds), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def _peers(
    rounds: int, scenarios: Sequence[str], peers: Sequence[str] | None, absent: dict[str, str]
) -> list[dict[str, Any]]:
    """firsttoken in float32 and with int8 weights beside every installed peer; `absent` gets the others."""
    with ExitStack() as stack:
        switches = stack.enter_context(NamedTemporaryFile("w", suffix=".json"))
        json.dump({"generation": 1, "switches": {"weightQuantization": {"enabled": True}}}, switches)
        switches.flush()
        ours = {"firsttoken float32": stack.enter_context(serving())[0]}
        url, admin, token = stack.enter_context(serving("--switches", switches.name))
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        state = httpx.get(f"{admin}/admin/v1/state", headers=headers, timeout=30).json()
        if (found := switch_state(state, "weightQuantization")) == "on":
            ours["firsttoken int8"] = url
        else:
            absent["firsttoken int8"] = f"weightQuantization is {found} in this build"
        measured = run.measure(ours, rounds, scenarios, peers)
    absent.update(measured.absent)
    return [entry.to_json() for entry in measured.figures]


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
