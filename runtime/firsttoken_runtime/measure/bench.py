"""`firsttoken bench`: measure a running server, or compare two measurements.

The first Ctrl-C ends the run and prints what there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx

from firsttoken_runtime.measure import machine
from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.compare import compare, read_report
from firsttoken_runtime.measure.figures import Figure, by_round
from firsttoken_runtime.measure.options import BenchOptions
from firsttoken_runtime.measure.plan import Cache, Load
from firsttoken_runtime.measure.report import make_report, print_comparison, print_report, write
from firsttoken_runtime.measure.resources import find_server
from firsttoken_runtime.measure.server import Admin
from firsttoken_runtime.measure.session import Session
from firsttoken_runtime.measure.summary import errors, warnings
from firsttoken_runtime.measure.target import Target, connected

INTERRUPTED = 130


def run(options: BenchOptions) -> int:
    """Measure or compare, and print. Returns the exit code: 0, 1 with a line on stderr, 130 when
    interrupted.
    """
    try:
        if options.compare is not None:
            return _compare(options)
        report = asyncio.run(measure(options))
        if options.output is not None:
            write(report, options.output)
    except (BenchError, httpx.HTTPError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    if report["failure"]:
        print(f"error: {report['failure']}", file=sys.stderr)
        return 1
    return INTERRUPTED if report["interrupted"] else 0


def _compare(options: BenchOptions) -> int:
    assert options.compare is not None
    before, after = options.compare
    comparison = compare(read_report(before), read_report(after))
    if options.output is not None:
        write(comparison, options.output)
    if options.json:
        print(json.dumps(comparison, indent=2))
    else:
        print_comparison(comparison, before.name, after.name)
    return 0


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Run all that `options` ask for; returns the report. Raises BenchError when nothing can be measured."""
    loads, token = options.loads(), options.admin_token()
    names = () if loads else options.scenario_names()
    watched = find_server(options.url, options.pid)
    stop, run_name = asyncio.Event(), secrets.token_hex(4)
    async with (
        connected(options.address, options.seed, run_name) as target,
        _admin(options.admin_url, token) as admin,
        _interrupts(stop),
    ):
        session = Session(options, target, admin, watched, stop)
        server = await _server_facts(session)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        if loads:
            await session.run_loads(loads)
        else:
            await session.run_scenarios(names)
    rows = by_round(session.rounds)
    return make_report(
        machine.describe(),
        rows,
        started=started,
        server=server,
        load={**_load_facts(options, loads, names), "run": run_name, "tokens_counted_by": target.counted_by},
        errors=errors(session.done),
        warnings=[*_notes(session), *_doubts(loads, rows, target)],
        interrupted=stop.is_set(),
        failure=session.failure,
    )


@asynccontextmanager
async def _admin(url: str | None, token: str | None) -> AsyncIterator[Admin | None]:
    if url is None:
        yield None
        return
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        yield Admin(client)


@asynccontextmanager
async def _interrupts(stop: asyncio.Event) -> AsyncIterator[None]:
    """SIGINT and SIGTERM set `stop`; a second one is what it always was."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def release() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def stopped() -> None:
        stop.set()
        release()
        print("bench: interrupted, ending with what there is", file=sys.stderr)

    # A loop outside the main thread takes no signals.
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
        for number in signals:
            loop.add_signal_handler(number, stopped)
    try:
        yield
    finally:
        release()


async def _server_facts(session: Session) -> dict[str, Any]:
    """What R19's table says of the server, as far as it can be known from outside."""
    target, watched = session.target, session.watched
    facts: dict[str, Any] = {
        "url": str(target.client.base_url),
        "model": target.model,
        "endpoint": target.dialect.path,
        "longest_context": target.max_tokens,
        "processes": watched.names or watched.why_not,
        "gpus": list(watched.gpus),
    }
    if session.admin is not None:
        state = await session.admin.state()
        facts["version"] = state.get("version")
        facts["switches"] = {
            entry["name"]: " ".join(
                [entry["state"], *(f"{name}={value}" for name, value in entry.get("parameters", {}).items())]
            )
            for entry in state["switches"]
        }
    return facts


def _load_facts(options: BenchOptions, loads: Mapping[str, Load], names: Sequence[str]) -> dict[str, Any]:
    """All that shaped the load, so that another run can repeat it."""
    common = {"seed": options.seed, "rounds": options.rounds, "warm_up": options.warm_up}
    if not loads:
        return {"scenarios": list(names), **common, "cache": "as each scenario says", "ignore_eos": True}
    lengths = {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    if options.lengths is not None:
        lengths = {"lengths": f"drawn from {options.lengths.name}"}
    if options.trace is not None:
        lengths = {"lengths": f"those of {options.trace.name}"}
    return {
        "kinds": list(loads),
        **common,
        "requests": options.requests,
        "duration_seconds": options.duration_seconds,
        **lengths,
        "cache": _cache_state(options, loads),
        "ignore_eos": options.ignore_eos,
        "slo": str(options.slo) or None,
    }


def _cache_state(options: BenchOptions, loads: Mapping[str, Load]) -> str:
    if options.cache == Cache.COLD:
        return "cold: no prompt shares a beginning with another, of this run or an earlier one"
    if any(arrival.blocks for load in loads.values() for arrival in load.trace):
        return "warm as in the trace: its blocks of 512 tokens are shared, each round starts without them"
    return (
        f"warm: every prompt begins with one of {options.prefixes} prefixes of {options.prefix_tokens} "
        "tokens, sent before each round"
    )


def _notes(session: Session) -> list[str]:
    notes = list(session.target.notes)
    if session.cut:
        notes.append(
            f"{session.cut} requests were cut to fit the context of {session.target.max_tokens} tokens"
        )
    if unfinished := sum(done.unfinished for done in session.done):
        notes.append(f"{unfinished} requests were cut off by the interrupt and are in no figure")
    return notes


def _doubts(loads: Mapping[str, Load], rows: Sequence[Figure], target: Target) -> list[str]:
    return [
        f"{name}: {doubt}"
        for name, load in loads.items()
        for doubt in warnings(name, rows, load.cache is Cache.COLD, target.template_tokens)
    ]
