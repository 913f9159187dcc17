"""The node's own processes: started with a mark in their environment, found again by it.

The mark is inherited (containerd's shims carry it too) and needs no file that could be lost or
stale: a process that was started by a dead predecessor is found just the same. Containers carry
no mark; they are found by the node's own cgroup.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .console import ClusterError
from .places import CGROUP

MARK = "FIRSTTOKEN_NODE"


@dataclass(frozen=True)
class NodeProcess:
    """`daemon` is the name it was started under; `program` what runs (differs for a daemon's children)."""

    pid: int
    daemon: str
    program: str

    @property
    def is_daemon(self) -> bool:
        return self.program == self.daemon


def start(daemon: str, program: str | Path, *options: str, log: Path) -> subprocess.Popen[bytes]:
    """Starts a daemon in its own session, output appended to `log`; argv[0]'s last part must be `daemon`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(program), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**os.environ, MARK: daemon},
            start_new_session=True,
        )


def find() -> list[NodeProcess]:
    """Every process on this machine that carries the mark (reads /proc)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            if MARK.encode() not in environment:
                continue
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            continue
        for setting in environment.split(b"\0"):
            name, _, daemon = setting.decode(errors="replace").partition("=")
            if name == MARK and arguments[0]:  # no arguments: a zombie
                program = Path(arguments[0].decode(errors="replace")).name
                found.append(NodeProcess(int(entry.name), daemon, program))
    return found


def daemons() -> dict[str, int]:
    """Name to process id of the daemons that run."""
    return {process.daemon: process.pid for process in find() if process.is_daemon}


def cgroup_directories() -> list[Path]:
    """The node's cgroup in each hierarchy, whether version 1 (one per controller) or 2."""
    root = Path("/sys/fs/cgroup")
    return [path for path in (root / CGROUP, *root.glob(f"*/{CGROUP}")) if path.is_dir()]


def containers() -> set[int]:
    """Process ids of everything that runs in a pod of this node."""
    found: set[int] = set()
    for directory in cgroup_directories():
        for file in directory.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in file.read_text().split())
    return found - {0}


def kill(pids: Iterable[int], signal_number: int) -> None:
    """Signals each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def gone(pids: Iterable[int], timeout_seconds: float) -> bool:
    """Waits until none of the processes is there any more (zombies count as gone); False when time is up."""
    waiting = set(pids)
    deadline = time.monotonic() + timeout_seconds
    while waiting:
        waiting = {pid for pid in waiting if _alive(pid)}
        if waiting and time.monotonic() > deadline:
            return False
        if waiting:
            time.sleep(0.05)
    return True


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):  # our own child: take its exit status, or it stays a zombie
        os.waitpid(pid, os.WNOHANG)
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def end(pids: Iterable[int]) -> None:
    """SIGKILL, and waits until they are gone; ClusterError when they cannot be ended."""
    waiting = set(pids)
    kill(waiting, signal.SIGKILL)
    if not gone(waiting, 10):
        raise ClusterError(f"these processes cannot be ended: {sorted(waiting)}")


def stop(daemon: str, patience_seconds: float = 5) -> None:
    """Ends one daemon in order: SIGTERM, and SIGKILL when it takes longer than that."""
    if (pid := daemons().get(daemon)) is not None:
        kill([pid], signal.SIGTERM)
        if not gone([pid], patience_seconds):
            end([pid])
