"""`helm template` as a function: values in, manifests out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from json import loads
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "firsttoken"

Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]


def _find_helm() -> str:
    """$FIRSTTOKEN_HELM, or helm in PATH, or the cluster tool's own."""
    found = os.environ.get("FIRSTTOKEN_HELM") or shutil.which("helm")
    if found:
        return found
    tool = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "status", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    try:
        path = str(loads(tool.stdout)["helm"])
    except (ValueError, KeyError):
        path = ""
    if not path or not Path(path).is_file():
        pytest.fail(
            "helm not found: put helm in PATH, set FIRSTTOKEN_HELM to it, or run "
            "`.venv/bin/python -m e2e.cluster helm`"
        )
    return path


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    path = _find_helm()

    def run(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        given = ["--values", "-"] if values else []
        return subprocess.run(
            [path, *arguments, *given], input=yaml.safe_dump(values or {}), capture_output=True, text=True
        )

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """Manifests by (kind, namespace/name); the CRDs are left out unless `crds` is set."""

    def template(
        values: dict[str, Any] | None = None, crds: bool = False, release: str = "firsttoken"
    ) -> Manifests:
        given = {**(values or {})} if crds else {"crds": {"enabled": False}, **(values or {})}
        answer = helm("template", release, str(CHART), "--namespace", "firsttoken-system", values=given)
        assert answer.returncode == 0, answer.stderr
        found: Manifests = {}
        for manifest in yaml.safe_load_all(answer.stdout):
            if manifest:
                metadata = manifest["metadata"]
                place = f"{metadata['namespace']}/" if "namespace" in metadata else ""
                key = (manifest["kind"], f"{place}{metadata['name']}")
                assert key not in found, f"{key} is there twice"
                found[key] = manifest
        return found

    return template
