"""`make demo`: the main job on a real cluster, said out loud step by step.

Cluster, images, helm install, apply an InferenceService, stream an answer, roll an optimization back live,
kill all of them and release. Leaves the cluster running.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from e2e.kube import ROOT, Cluster, KubeError, start, wait_for, wait_ready, wait_switch_state

NAMESPACE = "demo"
SERVICE = "smollm2"
PROMPT = "In two sentences: why does a web page feel slow when the first word of an answer comes late?"
SEGMENTS = ("queue", "prefill", "decode", "transport")

console = Console(highlight=False, width=max(Console().width, 110))


@contextmanager
def step(title: str) -> Iterator[None]:
    console.print(f"\n[bold]== {title}[/bold]")
    started = time.monotonic()
    yield
    console.print(f"[dim]   took {time.monotonic() - started:.1f} s[/dim]")


def main() -> int:
    started = time.monotonic()
    try:
        with step("Start a local cluster, build and load the two images"):
            cluster = start()
        with step("helm install the operator from helm/firsttoken"):
            cluster.install_operator()
        with step("kubectl apply -f examples/smollm2.yaml, and wait for Ready"):
            _apply(cluster)
        with step("Stream a chat answer through the Service"):
            before = _stream(cluster, show=True)
            console.print(f"   [dim]{time.monotonic() - started:.0f} s since make demo was typed[/dim]")
        with step("Take chunked prefill back, live"):
            _roll_back(cluster, before)
        with step("Engage the KillSwitch, then release it"):
            _kill_and_release(cluster)
    except (KubeError, openai.OpenAIError, httpx.HTTPError) as error:
        words = escape(str(error) or type(error).__name__)
        console.print(f"\n[bold red]demo failed:[/bold red] {words}")
        console.print("What the cluster says: .venv/bin/python -m e2e.cluster dump DIR")
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; `make demo` goes on from here, `make demo-down` takes everything away")
        return 130
    _goodbye(cluster)
    return 0


def _apply(cluster: Cluster) -> None:
    cluster.kubectl("delete", "killswitch", "global", "--ignore-not-found")
    namespaces = cluster.get("namespaces")["items"]
    if NAMESPACE not in [item["metadata"]["name"] for item in namespaces]:
        cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(ROOT / "examples" / "smollm2.yaml"))
    cluster.patch(NAMESPACE, SERVICE, {"rollback": None})
    wait_ready(cluster, NAMESPACE, SERVICE)
    console.print(cluster.kubectl("get", "ftis", "-n", NAMESPACE).stdout.rstrip(), markup=False)


def _stream(cluster: Cluster, show: bool) -> str:
    """Stream one greedy answer with the openai client; returns its text."""
    with cluster.port_forward(NAMESPACE, f"service/{SERVICE}", 80) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        client.models.list()  # opens the connection, which is no part of the answer's time
        sent = time.perf_counter()
        ttft_ms = 0.0
        text = ""
        timings: dict[str, Any] = {}
        stream = client.chat.completions.create(
            model=SERVICE,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=64,
            temperature=0,
            stream=True,
        )
        if show:
            console.print("   ", end="")
        for chunk in stream:
            timings = (chunk.model_extra or {}).get("timings") or timings
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                ttft_ms = ttft_ms or (time.perf_counter() - sent) * 1e3
                text += piece
                if show:
                    console.print(piece, end="", markup=False, style="green")
    if show:
        console.print()
        _show_timings(timings, ttft_ms)
    return text


def _show_timings(timings: dict[str, Any], client_ms: float) -> None:
    total = sum(timings[f"{segment}_ms"] for segment in SEGMENTS)
    table = Table(title="Time to first token, milliseconds")
    for column in (*SEGMENTS, "sum", "ttft (server)", "ttft (this client)"):
        table.add_column(column, justify="right")
    figures = [timings[f"{segment}_ms"] for segment in SEGMENTS]
    table.add_row(*(f"{figure:.2f}" for figure in (*figures, total, timings["ttft_ms"], client_ms)))
    console.print(table)
    if abs(total - timings["ttft_ms"]) > 0.01:
        raise KubeError(f"the segments add up to {total:.3f} ms, not to the TTFT {timings['ttft_ms']:.3f} ms")


def _switch(cluster: Cluster, change: Callable[[], object], wanted: str) -> float:
    """Make a change; milliseconds from before it was typed until the pod itself says so."""
    pod = cluster.pods(NAMESPACE, SERVICE)[0]["metadata"]["name"]
    with cluster.admin(NAMESPACE, SERVICE, pod) as admin:
        started = time.monotonic()
        change()
        wait_switch_state(admin, "chunkedPrefill", wanted)
        return (time.monotonic() - started) * 1e3


def _roll_back(cluster: Cluster, before: str) -> None:
    identity = cluster.identity(NAMESPACE, SERVICE)
    console.print(
        f"   kubectl patch ftis {SERVICE} -n {NAMESPACE} --type=merge "
        """-p '{"spec":{"rollback":{"chunkedPrefill":true}}}'""",
        markup=False,
    )
    took = _switch(
        cluster,
        lambda: cluster.patch(NAMESPACE, SERVICE, {"rollback": {"chunkedPrefill": True}}),
        "rolledBack",
    )
    console.print(f"   the pod says chunkedPrefill: rolledBack, {took:.0f} ms after kubectl was started")
    if cluster.identity(NAMESPACE, SERVICE) != identity:
        raise KubeError(f"the pod changed: {identity} became {cluster.identity(NAMESPACE, SERVICE)}")
    console.print(f"   same pod {identity[0][0]}, UID {identity[0][1]}, restarts {identity[0][2]}")
    after = _stream(cluster, show=False)
    if after != before:
        raise KubeError(f"the greedy answer changed: {before!r} became {after!r}")
    console.print("   the same greedy answer, character for character")
    took = _switch(cluster, lambda: cluster.patch(NAMESPACE, SERVICE, {"rollback": None}), "on")
    console.print(f"   and back on, {took:.0f} ms")


def _kill_and_release(cluster: Cluster) -> None:
    engaged = time.monotonic()
    cluster.kubectl("apply", "-f", str(ROOT / "examples" / "killswitch.yaml"))

    def effective() -> dict[str, Any] | None:
        found = cluster.get("killswitch", "global")
        return found if found.get("status", {}).get("effectiveAt") else None

    status = wait_for("every pod to confirm the kill switch", effective, 30)["status"]
    console.print(
        f"   effective {time.monotonic() - engaged:.1f} s after kubectl apply was typed "
        f"(engaged {status['engagedAt']}, every pod confirmed {status['effectiveAt']})"
    )
    console.print(cluster.kubectl("get", "killswitch", "global").stdout.rstrip(), markup=False)
    pod = cluster.pods(NAMESPACE, SERVICE)[0]["metadata"]["name"]
    with cluster.admin(NAMESPACE, SERVICE, pod) as admin:
        table = Table(title=f"Switches in pod {pod}")
        for column in ("switch", "state", "reason"):
            table.add_column(column)
        for entry in admin.get("/admin/v1/state").json()["switches"]:
            table.add_row(entry["name"], entry["state"], entry.get("reason") or "")
    console.print(table)
    release = '{"spec":{"engaged":false}}'
    took = _switch(
        cluster,
        lambda: cluster.kubectl("patch", "killswitch", "global", "--type=merge", "-p", release),
        "on",
    )
    console.print(f"   released: chunkedPrefill is on again, {took:.0f} ms after kubectl was started")


def _goodbye(cluster: Cluster) -> None:
    console.print("\n[bold]The cluster is still running. Go on playing:[/bold]")
    environment = f"export KUBECONFIG={cluster.kubeconfig} PATH=$PWD/.venv/bin:$PATH"
    console.print(f"   {environment}", markup=False, soft_wrap=True)
    patch = '{"spec":{"rollback":{"all":true}}}'
    console.print(f"   kubectl get ftis,pods -n {NAMESPACE} -w", markup=False)
    console.print(
        f"   kubectl patch ftis {SERVICE} -n {NAMESPACE} --type=merge -p '{patch}'",
        markup=False,
        soft_wrap=True,
    )
    console.print("and `make demo-down` takes everything away.")


if __name__ == "__main__":
    sys.exit(main())
