"""`--install-peers`: one virtual environment after the other. What went wrong stays beside it, to be
reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from e2e.kube import ROOT
from e2e.peers.catalogue import PEERS, Package

UV = ROOT / ".venv" / "bin" / "uv"
LONGEST_SECONDS = 3600


def install(names: Sequence[str]) -> dict[str, str]:
    """Install the packages with these names, or all; returns what happened to each.

    Raises SystemExit when a name is not known.
    """
    packages = {peer.package.name: peer.package for peer in PEERS}
    unknown = sorted(set(names) - set(packages))
    if unknown:
        raise SystemExit(f"bench: no peer {', '.join(unknown)}; there are {', '.join(packages)}")
    found = {}
    for name, package in packages.items():
        if not names or name in names:
            print(f"bench: installing {name} (may take long: some are compiled)", file=sys.stderr)
            found[name] = _install(package)
            print(f"bench: {name}: {found[name]}", file=sys.stderr)
    return found


def why_not(package: Package) -> str | None:
    """None when the package is installed, else why it is not."""
    if (package.folder / "installed").exists():
        return None
    reason = package.folder / "reason"
    if reason.exists():
        return f"installing it failed: {reason.read_text().strip()}"
    return "run python -m e2e.bench --only peers --install-peers"


def _install(package: Package) -> str:
    shutil.rmtree(package.folder, ignore_errors=True)
    package.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _uv("venv", "--quiet", "--python", sys.executable, str(package.folder))
        _pip(package)
        _write_alias(package)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        reason = _last_words(error)
        package.folder.mkdir(parents=True, exist_ok=True)
        (package.folder / "reason").write_text(reason + "\n")
        return f"failed: {reason}"
    (package.folder / "installed").touch()
    return "installed"


def _pip(package: Package) -> None:
    arguments = [*package.requirements]
    with tempfile.TemporaryDirectory() as folder:
        if package.overrides:
            listed = Path(folder) / "overrides.txt"
            listed.write_text("\n".join(package.overrides) + "\n")
            arguments += ["--override", str(listed)]
        python = str(package.program("python"))
        _uv("pip", "install", "--quiet", "--python", python, *arguments, environment=package.environment)


def _write_alias(package: Package) -> None:
    if package.alias is not None:
        name, version = package.alias
        place = next(package.folder.glob("lib/python*/site-packages")) / f"{name}-{version}.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _uv(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """At low priority: an installation is never in a hurry. Raises CalledProcessError with its words."""
    subprocess.run(
        ["nice", "-n", "19", str(UV), *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_SECONDS,
    )


def _last_words(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    return " ".join(lines[-3:])[-500:] or type(error).__name__
