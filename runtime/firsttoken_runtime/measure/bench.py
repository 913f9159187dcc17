"""`firsttoken bench`: run the scenarios against a server and print a table or JSON.

With an admin address and token the switches that a scenario compares (chunkedPrefill) are flipped live
between interleaved rounds, and put back as they were at the end, also when it fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from firsttoken_runtime.measure import machine, scenarios
from firsttoken_runtime.measure.client import BenchError, complete, served_model
from firsttoken_runtime.measure.scenarios import Prompts, Row

SCENARIOS = ("single", "cached", "short-behind-long", "closed-loop")


@dataclass(frozen=True)
class BenchOptions:
    """url: of the server; admin_url and admin_token_file: to flip switches; rounds: per figure."""

    url: str = "http://127.0.0.1:8000"
    admin_url: str | None = None
    admin_token_file: Path | None = None
    scenarios: tuple[str, ...] = SCENARIOS
    rounds: int = 5
    seed: int = 0
    json: bool = False


class Admin:
    """The server's admin port, as far as a benchmark needs it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def state(self) -> dict[str, Any]:
        response = await self._client.get("/admin/v1/state")
        response.raise_for_status()
        state: dict[str, Any] = response.json()
        return state

    async def set(self, changes: dict[str, dict[str, Any]]) -> None:
        """Set the switches in `changes`; all others stay as they are now."""
        state = await self.state()
        switches = {
            entry["name"]: {
                "enabled": entry["state"] in ("on", "inactive"),
                **({"cause": entry["state"]} if entry["state"] in ("rolledBack", "killed") else {}),
                **entry["parameters"],
            }
            for entry in state["switches"]
        }
        for name, change in changes.items():
            switches[name] = {**switches[name], **change}
            switches[name].pop("cause", None)
        await self.put(state["generation"] + 1, switches)

    async def put(self, generation: int, switches: dict[str, Any]) -> None:
        body = {"generation": generation, "switches": switches}
        response = await self._client.put("/admin/v1/switches", json=body)
        response.raise_for_status()


def run(options: BenchOptions) -> int:
    """Run and print; returns the exit code (0, or 1 with one line on stderr)."""
    try:
        rows = asyncio.run(_run(options))
    except (BenchError, httpx.HTTPError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    report = {"machine": machine.describe(), "rows": [asdict(row) for row in rows]}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def print_report(report: dict[str, Any]) -> None:
    facts = report["machine"]
    table = Table(
        title=f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    )
    for column, justify in (
        ("scenario", "left"),
        ("figure", "left"),
        ("median", "right"),
        ("worst", "right"),
        ("unit", "left"),
        ("n", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in report["rows"]:
        table.add_row(
            row["scenario"],
            row["figure"],
            f"{row['median']:,.2f}",
            f"{row['worst']:,.2f}",
            row["unit"],
            str(row["rounds"]),
        )
    # Piped output is 80 columns wide for rich, which would wrap every row.
    Console(width=max(Console().width, 120)).print(table)


async def _run(options: BenchOptions) -> list[Row]:
    unknown = sorted(set(options.scenarios) - set(SCENARIOS))
    if unknown:
        raise BenchError(f"unknown scenario {', '.join(unknown)}; use {', '.join(SCENARIOS)}")
    if options.rounds < 1:
        raise BenchError("rounds must be 1 or more")
    limits = httpx.Timeout(600, connect=5)
    prompts = Prompts(options.seed)
    rows: list[Row] = []
    async with httpx.AsyncClient(base_url=options.url, timeout=limits) as client, _admin(options) as admin:
        model = await served_model(client)
        await complete(client, model, prompts.of(64), 4)  # warm-up, not counted
        if "single" in options.scenarios:
            rows += await scenarios.single(client, model, options.rounds, prompts, (32, 128, 512, 1024))
        if "cached" in options.scenarios:
            rows += await scenarios.cached(client, model, options.rounds, prompts)
        if "short-behind-long" in options.scenarios:
            rows += await _short_behind_long(client, model, options.rounds, prompts, admin)
        if "closed-loop" in options.scenarios:
            rows += await scenarios.closed_loop(client, model, 4 * options.rounds, prompts)
    return rows


@asynccontextmanager
async def _admin(options: BenchOptions) -> AsyncIterator[Admin | None]:
    if options.admin_url is None:
        yield None
        return
    if options.admin_token_file is None:
        raise BenchError("--admin-url needs --admin-token-file")
    token = options.admin_token_file.read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=options.admin_url, headers=headers, timeout=30) as client:
        yield Admin(client)


async def _short_behind_long(
    client: httpx.AsyncClient, model: str, rounds: int, prompts: Prompts, admin: Admin | None
) -> list[Row]:
    if admin is None:
        return await scenarios.short_behind_long(client, model, rounds, prompts, "short behind long")
    before = await admin.state()
    on = next(entry for entry in before["switches"] if entry["name"] == "chunkedPrefill")["state"] == "on"
    collected: dict[bool, list[Row]] = {True: [], False: []}
    try:
        for _ in range(rounds):
            for enabled in (True, False):
                await admin.set({"chunkedPrefill": {"enabled": enabled}})
                label = f"short behind long, chunkedPrefill {'on' if enabled else 'off'}"
                collected[enabled] += await scenarios.short_behind_long(client, model, 1, prompts, label)
    finally:
        await admin.set({"chunkedPrefill": {"enabled": on}})
    rows = [_merge(collected[enabled], figure) for enabled in (True, False) for figure in _figures(collected)]
    pairs = zip(
        (row.median for row in collected[True] if row.figure == "short TTFT P99"),
        (row.median for row in collected[False] if row.figure == "short TTFT P99"),
        strict=True,
    )
    rows.append(scenarios.row("short behind long", "P99 off / on", [off / on for on, off in pairs], "x"))
    return rows


def _figures(collected: dict[bool, list[Row]]) -> list[str]:
    return list(dict.fromkeys(row.figure for row in collected[True]))


def _merge(rows: list[Row], figure: str) -> Row:
    chosen = [row for row in rows if row.figure == figure]
    return scenarios.row(chosen[0].scenario, figure, [row.median for row in chosen])
