"""The reference in docs/reference, from the same schemas as the CRDs and from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.resources.crd import all_crds
from firsttoken_api.resources.inference_service_status import FailureReason

Schema = dict[str, Any]
_NOTE = "<!-- Generated from crds/firsttoken_api by `make generate`. Do not edit. -->\n"


def reference_pages() -> dict[str, str]:
    """Markdown pages by file name."""
    crds = all_crds()
    return {
        "inferenceservice.md": _resource_page(crds["inferenceservices"]) + _failure_reasons(),
        "killswitch.md": _resource_page(crds["killswitches"]),
        "optimizations.md": _optimizations_page(),
    }


def _resource_page(crd: Schema) -> str:
    spec = crd["spec"]
    version = spec["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    names = spec["names"]
    lines = [
        f"{_NOTE}# {names['kind']}",
        "",
        schema["description"],
        "",
        f"`apiVersion: {spec['group']}/{version['name']}`, {spec['scope'].lower()}; "
        f"`kubectl get {names['plural']}`, short `{names['shortNames'][0]}`.",
    ]
    for rule in schema.get("x-kubernetes-validations", []):
        lines.append(f"Rule: {rule['message']}.")
    for part in ("spec", "status"):
        lines += ["", f"## {part}", "", schema["properties"][part].get("description", ""), ""]
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += _rows(schema["properties"][part], "")
        rules = list(_rules(schema["properties"][part], part))
        if rules:
            lines += ["", "What is refused, and the answer:", "", "| field | answer |", "|---|---|", *rules]
    return "\n".join(lines) + "\n"


def _rows(schema: Schema, prefix: str) -> Iterator[str]:
    required = schema.get("required", [])
    for name, child in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        mark = " (required)" if name in required else ""
        yield f"| `{path}`{mark} | {_type(child)} | {_cell(child.get('description', ''))} |"
        yield from _rows(child, f"{path}.")
        if child.get("items", {}).get("properties"):
            yield from _rows(child["items"], f"{path}[].")


def _rules(schema: Schema, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        place = path + rule.get("fieldPath", "")
        yield f"| `{place}` | {_cell(rule['message'])} |"
    for name, child in schema.get("properties", {}).items():
        yield from _rules(child, f"{path}.{name}")


def _type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "number or string"
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    bounds = _bounds(schema)
    name = " \\| ".join(f"`{value}`" for value in schema["enum"]) if "enum" in schema else schema["type"]
    return f"{name}{bounds}"


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = "above " if schema.get("exclusiveMinimum") else ""
    if low is not None and high is not None:
        return f", {above}{low} to {high}"
    if low is not None:
        return f", {above or 'at least '}{low}"
    return ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _failure_reasons() -> str:
    lines = ["", "## Failure reasons", "", "| `status.failure.reason` | meaning |", "|---|---|"]
    lines += [f"| `{reason.value}` | {_cell(reason.meaning)} |" for reason in FailureReason]
    return "\n".join(lines) + "\n"


def _optimizations_page() -> str:
    lines = [
        f"{_NOTE}# Optimizations",
        "",
        "Each one is configured under `spec.optimizations.NAME`, taken back under `spec.rollback.NAME`, and "
        "by the KillSwitch. The order is the order of tuning: one at a time, measured against the one "
        "before.",
        "",
        "| order | name | what it does | segment | default | takes effect | can change outputs | kill switch "
        "|",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in CATALOGUE:
        lines.append(
            f"| {entry.order} | `{entry.name}` | {entry.summary} | {entry.segment} | "
            f"{'on' if entry.default else 'off'} | {'next step' if entry.live else 'restart'} | "
            f"{'yes' if entry.changes_outputs else 'no'} | "
            f"{'only when listed' if entry.essential else 'takes it back'} |"
        )
    lines += ["", "## Parameters", "", "| name | parameter | default |", "|---|---|---|"]
    for entry in CATALOGUE:
        for name, value in entry.defaults.items():
            words = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"| `{entry.name}` | `{name}` | {'none' if value == [] else f'`{words}`'} |")
    return "\n".join(lines) + "\n"
