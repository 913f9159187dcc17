"""The report: what was measured, of what, under which load, on what; as JSON and as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.figures import Figure

KIND, VERSION = "firsttoken-bench", 2
METHOD = "median of the rounds; interval from order statistics (binomial), with the coverage it has"
_VERDICT_STYLE = {"better": "green", "worse": "red"}


def make_report(machine: Mapping[str, Any], rows: Sequence[Figure], **parts: Any) -> dict[str, Any]:
    """The report as JSON. `parts`: server, load, errors, warnings, interrupted, started."""
    return {
        "kind": KIND,
        "version": VERSION,
        "machine": dict(machine),
        **parts,
        "method": METHOD,
        "rows": [entry.to_json() for entry in rows],
    }


def write(report: Mapping[str, Any], path: Path) -> None:
    """Raises BenchError when the file cannot be written."""
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from None


def _console() -> Console:
    # Piped output is 80 columns wide for rich, which would wrap every row.
    return Console(width=max(Console().width, 120), highlight=False)


def print_report(report: Mapping[str, Any]) -> None:
    """The baseline table: figures with their intervals below the facts they depend on."""
    console = _console()
    facts = report["machine"]
    table = Table(
        title=f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        caption="median over the rounds; interval of the median, and how sure it is",
    )
    for column in ("scenario", "figure"):
        table.add_column(column)
    for column in ("median", "interval", "worst"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("n", justify="right")
    scenario = None
    for entry in report["rows"]:
        if scenario not in (None, entry["scenario"]):
            table.add_section()
        table.add_row(
            Text(entry["scenario"] if entry["scenario"] != scenario else ""),
            Text(entry["figure"]),
            _number(entry["median"]),
            _interval(entry["interval"]),
            _number(entry["worst"]),
            entry["unit"],
            str(entry["rounds"]),
        )
        scenario = entry["scenario"]
    for part in ("server", "load"):
        for name, value in report.get(part, {}).items():
            if value not in (None, "", [], {}):
                console.print(Text(f"{part} {name.replace('_', ' ')}: {_fact(value)}"))
    console.print(table)
    for kind, count in report.get("errors", {}).items():
        console.print(Text(f"failed: {count} x {kind}", style="red"))
    for warning in report.get("warnings", ()):
        console.print(Text(f"note: {warning}", style="yellow"))
    if report.get("interrupted"):
        console.print(Text("interrupted: these are the figures until then", style="yellow"))


def print_comparison(comparison: Mapping[str, Any], before: str, after: str) -> None:
    table = Table(caption=comparison["method"])
    for column in ("scenario", "figure"):
        table.add_column(column)
    for column in (before, after, "change", "difference"):
        table.add_column(Text(column), justify="right")
    table.add_column("verdict")
    for change in comparison["changes"]:
        relative, interval = change["relative"], change["interval"]
        table.add_row(
            Text(change["scenario"]),
            Text(change["figure"]),
            _number(change["before"]),
            _number(change["after"]),
            "" if relative is None else f"{relative:+.1%}",
            "" if interval is None else f"{interval[0]:+,.2f} to {interval[1]:+,.2f} {change['unit']}",
            Text(change["verdict"], style=_VERDICT_STYLE.get(change["verdict"], "")),
        )
    console = _console()
    for difference in comparison["differences"]:
        console.print(Text(f"note: not the same {difference}", style="yellow"))
    console.print(table)
    for name, keys in (("only in the first", "only_before"), ("only in the second", "only_after")):
        for figure in comparison[keys]:
            console.print(Text(f"{name}: {figure}"))


def _number(value: float) -> str:
    return f"{value:,.2f}"


def _interval(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return ""
    return f"{interval['low']:,.2f} to {interval['high']:,.2f} ({interval['coverage']:.0%})"


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(entry)}" for name, entry in value.items())
    return ", ".join(_fact(entry) for entry in value) if isinstance(value, list | tuple) else str(value)
