"""Writes what is derived from the contract: CRD YAML, the chart's copies of it, and the reference in docs/.

`python -m firsttoken_api.generate` writes into the working tree it was imported from; with `--check` it
writes nothing and ends with an error that names the files that differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from firsttoken_api.reference import reference_pages
from firsttoken_api.resources.crd import all_crds

ROOT = Path(__file__).resolve().parents[2]
_NOTE = "# Generated from crds/firsttoken_api by `make generate`. Do not edit.\n"


class _PlainDumper(yaml.SafeDumper):
    """Anchors would be legal YAML, but nobody wants to read a CRD with them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)


def chart_template(crd: dict[str, Any]) -> str:
    """The CRD as a chart template: installed and upgraded with the chart, kept when it is uninstalled."""
    metadata = {
        **crd["metadata"],
        "annotations": {"helm.sh/resource-policy": "keep"},
    }
    body = to_yaml({**crd, "metadata": metadata})
    if "{{" in body:
        raise ValueError(f"{crd['metadata']['name']}: a description holds '{{{{', which Helm would read")
    return f"{_NOTE}{{{{- if .Values.crds.enabled }}}}\n{body}{{{{- end }}}}\n"


def generated_files() -> dict[str, str]:
    """Every generated file's content, by its path relative to the repository root."""
    files: dict[str, str] = {}
    for plural, crd in all_crds().items():
        files[f"crds/{plural}.yaml"] = _NOTE + to_yaml(crd)
        files[f"helm/firsttoken/templates/crds/{plural}.yaml"] = chart_template(crd)
    for name, text in reference_pages().items():
        files[f"docs/reference/{name}"] = text
    return files


def drift(root: Path = ROOT) -> list[str]:
    """Generated files that are missing or differ from what would be generated now."""
    return [
        path
        for path, text in generated_files().items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def write(root: Path = ROOT) -> list[str]:
    """Write the files that differ; returns their paths."""
    changed = drift(root)
    files = generated_files()
    for path in changed:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(files[path], encoding="utf-8")
    return changed


def main(arguments: Sequence[str]) -> int:
    if not (ROOT / "pyproject.toml").is_file():
        print("generate: run this from a working tree (pip install -e .)", file=sys.stderr)
        return 2
    if "--check" in arguments:
        stale = drift()
        for path in stale:
            print(f"{path}: differs from the models; run `make generate`", file=sys.stderr)
        return 1 if stale else 0
    changed = write()
    print("\n".join(f"wrote {path}" for path in changed) or "nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
