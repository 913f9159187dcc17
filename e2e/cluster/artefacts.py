"""Things that take long to make, kept by a digest of what they are made from.

An artefact is made in a directory of another name and renamed when it is complete: one that
was interrupted never looks finished. A lock per name keeps two processes from making it twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .console import say, step
from .mounts import unmount_below
from .places import Places


def digest(*inputs: object) -> str:
    """64 hex digits over JSON-like inputs; equal inputs, equal digest, on any machine."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def tree_digest(root: Path, *parts: str) -> str:
    """Over names and contents of all files below `root/part`; bytecode and build leftovers do not count."""
    total = hashlib.sha256()
    for part in parts:
        start = root / part
        files = [start] if start.is_file() else sorted(f for f in start.rglob("*") if f.is_file())
        for file in files:
            if "__pycache__" in file.parts or file.name.endswith((".pyc", ".swp", "~")):
                continue
            total.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
            total.update(file.read_bytes())
    return total.hexdigest()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another e2e.cluster to be done (it holds {path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def remove_tree(path: Path) -> None:
    """Unmounts whatever is mounted below, then deletes; an interrupted debootstrap leaves /proc mounted."""
    if path.exists():
        unmount_below(path)
        shutil.rmtree(path)


def find(where: Places, name: str, key: str) -> Path | None:
    """The finished artefact, or None."""
    path = where.artefacts / f"{name}-{key[:12]}"
    return path if path.is_dir() else None


def artefact(where: Places, name: str, key: str, make: Callable[[Path], None], *, what: str) -> Path:
    """The directory `make` filled for this key: at once if there, else made now. Others of the name go."""
    final = where.artefacts / f"{name}-{key[:12]}"
    if final.is_dir():
        return final
    with lock(where.artefacts / f".{name}.lock"):
        if final.is_dir():
            return final
        unfinished = where.artefacts / f".{name}.unfinished"
        remove_tree(unfinished)
        unfinished.mkdir(parents=True)
        with step(what):
            make(unfinished)
        os.sync()  # a machine that is switched off later must not find the name without the content
        unfinished.rename(final)
        for old in where.artefacts.glob(f"{name}-????????????"):
            if old != final:
                remove_tree(old)
    return final
