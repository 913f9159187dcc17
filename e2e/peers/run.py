"""One interleaved run: all servers up at once, each scenario of each round on one after the other.

So a drift of the machine meets all of them alike, and the ratios of the medians can be compared where
absolute figures could not. A server that is not asked does nothing, but for the memory it holds.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from e2e.kube import KubeError, wait_for
from e2e.peers.catalogue import PEERS, Models, Peer
from e2e.peers.install import why_not
from e2e.peers.models import prepare
from e2e.serving import free_port
from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.figures import Better, Figure, by_round, row
from firsttoken_runtime.measure.scenarios import SCENARIOS
from firsttoken_runtime.measure.target import Address, Target, connected

START_SECONDS = 300


@dataclass(frozen=True)
class Measured:
    """figures: of every server, named in the scenario. absent: why a peer is not among them."""

    figures: list[Figure]
    absent: dict[str, str]


def measure(
    ours: Mapping[str, str], rounds: int, names: Sequence[str], peers: Sequence[str] | None = None
) -> Measured:
    """Start every installed peer, or those named, and measure it beside `ours` (URL by name).

    names: of the scenarios. Raises SystemExit when a peer is not known.
    """
    if unknown := set(peers or ()) - {peer.name for peer in PEERS}:
        known = ", ".join(peer.name for peer in PEERS)
        raise SystemExit(f"bench: no peer {', '.join(sorted(unknown))}; there are {known}")
    absent = {}
    for peer in PEERS:
        reason = why_not(peer.package) if peers is None or peer.name in peers else "not asked for (--peer)"
        if reason is not None:
            absent[peer.name] = reason
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        urls = dict(ours)
        models = prepare() if len(absent) < len(PEERS) else None
        for peer in PEERS:
            if peer.name not in absent and models is not None:
                try:
                    urls[peer.name] = stack.enter_context(_serving(peer, models, folder))
                except KubeError as error:
                    absent[peer.name] = f"installed, but it did not start: {error}"
        figures, lost = asyncio.run(_rounds(urls, rounds, names))
    return Measured([*figures, *ratios(figures, list(ours))], absent | lost)


async def _rounds(
    urls: Mapping[str, str], rounds: int, names: Sequence[str]
) -> tuple[list[Figure], dict[str, str]]:
    found: list[list[Figure]] = []
    lost: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        targets: dict[str, Target] = {}
        for name, url in urls.items():
            try:
                target = await stack.enter_async_context(connected(Address(url), 0, secrets.token_hex(4)))
                for _ in range(2):
                    await target.send(await target.prompts.of(64), 4)
                targets[name] = target
            except BenchError as error:
                lost[name] = str(error)
        for number in range(rounds):
            for scenario in names:
                # Whoever goes first in one round goes last in the next.
                order = list(targets) if number % 2 == 0 else list(reversed(targets))
                for name in order:
                    print(f"bench: round {number + 1} of {rounds}: {scenario}, {name}", file=sys.stderr)
                    try:
                        figures = await SCENARIOS[scenario](targets[name])
                    except BenchError as error:
                        lost[name] = f"{scenario}: {error}"
                        del targets[name]
                    else:
                        found.append([_of(name, entry) for entry in figures])
    joined = by_round(found)
    return sorted(joined, key=lambda entry: (entry.scenario.partition(": ")[2], entry.figure)), lost


def _of(name: str, entry: Figure) -> Figure:
    return Figure(f"{name}: {entry.scenario}", entry.figure, entry.unit, entry.better, entry.values)


def ratios(figures: Sequence[Figure], ours: Sequence[str]) -> list[Figure]:
    """Our median by each peer's, for every figure that both have; below 1 we are faster (or have less
    output).
    """
    medians = {
        (*entry.scenario.split(": ", 1), entry.figure): entry.median
        for entry in figures
        if entry.better is not Better.NEITHER
    }
    found = []
    for (name, scenario, figure), value in medians.items():
        for (other, its_scenario, its_figure), theirs in medians.items():
            same = (scenario, figure) == (its_scenario, its_figure)
            if same and name in ours and other not in ours and theirs:
                found.append(row(f"{name} / {other}: {scenario}", figure, [value / theirs], "x"))
    return found


@contextmanager
def _serving(peer: Peer, models: Models, folder: Path) -> Iterator[str]:
    """The peer's server; yields its URL. Ended by its own process group, whatever happens.

    Raises KubeError with its last words when it does not answer in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / f"{peer.name.replace(' ', '-')}.log"
    environment = {**os.environ, **peer.environment(peer.package)}
    with log.open("w") as output:
        process = subprocess.Popen(
            peer.command(models, port), env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            print(f"bench: starting {peer.name}", file=sys.stderr)
            wait_for(f"{peer.name} to answer", lambda: _answers(process, url, log), START_SECONDS)
            yield url
        finally:
            _end(process)


def _answers(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    if process.poll() is not None:
        raise KubeError(f"it ended with code {process.returncode}: {log.read_text(errors='replace')[-600:]}")
    body: dict[str, Any] = {"prompt": "one two three", "max_tokens": 1}
    try:
        models = httpx.get(f"{url}/v1/models", timeout=5)
        body["model"] = models.raise_for_status().json()["data"][0]["id"]
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).is_success
    except (httpx.HTTPError, ValueError, LookupError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
