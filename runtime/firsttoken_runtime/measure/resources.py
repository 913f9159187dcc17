"""What the server's processes use while they are measured: CPU and memory from /proc, GPUs from nvidia-smi.

Only where the server runs on this machine. The process that listens on the port is found by its socket; it
and all its descendants count (firsttoken computes in a child of the process that listens).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.figures import Better, Figure, row
from firsttoken_runtime.measure.statistics import mean

SAMPLE_SECONDS = 0.25
_LISTEN = "0A"
_GPU_QUERY = "--query-gpu=index,utilization.gpu,memory.used"


@dataclass(frozen=True)
class Usage:
    """CPU seconds used so far and resident bytes now, of all processes together."""

    cpu_seconds: float
    resident_bytes: int


def is_local(url: str) -> bool:
    """Whether the host of `url` is an address of this machine, as far as binding to it tells."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(_is_own(str(address)) for address in addresses)


def _is_own(address: str) -> bool:
    if ipaddress.ip_address(address).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listeners(port: int, proc: Path = Path("/proc")) -> list[int]:
    """Ids of the processes that listen on a TCP port, as far as this user may see them."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    return [pid for pid in _pids(proc) if inodes & _links(proc / str(pid) / "fd")] if inodes else []


def _pids(proc: Path) -> list[int]:
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def _links(folder: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry))
    return found


def with_descendants(roots: Iterable[int], proc: Path = Path("/proc")) -> list[int]:
    children = defaultdict(list)
    for pid in _pids(proc):
        with contextlib.suppress(OSError, IndexError, ValueError):
            children[int(_stat(pid, proc)[1])].append(pid)
    found: dict[int, None] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = None
            waiting += children[pid]
    return sorted(found)


def _stat(pid: int, proc: Path) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; the name before may contain anything."""
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()


def usage(pids: Iterable[int], proc: Path = Path("/proc")) -> Usage:
    """Of those of `pids` that still run."""
    ticks, pages = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = _stat(pid, proc)
            ticks += int(fields[11]) + int(fields[12])
            pages += int((proc / str(pid) / "statm").read_text().split()[1])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    try:
        parts = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}"
    names = [Path(part).name for part in parts if part and not part.startswith("-")]
    return f"{' '.join(names[:2])[:60]} (pid {pid})"


@dataclass(frozen=True)
class Watched:
    """Which processes and GPUs are watched; `why_not` says why there are no processes."""

    pids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def names(self) -> list[str]:
        return [process_name(pid) for pid in self.pids]


def find_server(url: str, pid: int | None) -> Watched:
    """The server's processes: those given, or those that listen on the port of `url`, when it is on this
    machine.

    Raises BenchError when the given process does not exist.
    """
    if pid is not None:
        if not Path(f"/proc/{pid}").exists():
            raise BenchError(f"there is no process {pid} on this machine (--pid)")
        return Watched((pid,), _gpus())
    if not is_local(url):
        return Watched(why_not="the server is on another machine")
    parts = urlsplit(url)
    found = listeners(parts.port or (443 if parts.scheme == "https" else 80))
    if not found:
        return Watched((), _gpus(), "the process that listens there belongs to another user or namespace")
    return Watched(tuple(found), _gpus())


def _gpus() -> tuple[str, ...]:
    """Name and memory of each GPU, `()` without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    asked = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


class Watch:
    """Samples what `watched` uses, from `start` to `stop`."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._tasks: list[asyncio.Task[None]] = []
        self._peak = 0
        self._gpu_busy: list[float] = []
        self._gpu_peak: dict[float, float] = {}  # by index, in MiB

    async def start(self) -> None:
        self._pids = with_descendants(self._watched.pids) if self._watched.pids else []
        self._began, self._own = time.perf_counter(), time.process_time()
        self._before = usage(self._pids)
        if self._pids:
            self._tasks.append(asyncio.create_task(self._memory()))
        if self._watched.gpus:
            self._tasks.append(asyncio.create_task(self._read_gpus()))

    async def stop(self, scenario: str) -> list[Figure]:
        """CPU in per cent of one core (200 % is two cores busy), peak resident memory, GPU means and peak."""
        seconds = time.perf_counter() - self._began
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        own = 100 * (time.process_time() - self._own) / seconds
        found = [row(scenario, "client CPU", [own], "% of a core", Better.NEITHER)]
        if self._pids:
            after = usage(self._pids)
            busy = 100 * (after.cpu_seconds - self._before.cpu_seconds) / seconds
            peak = max(self._peak, after.resident_bytes) / 2**20
            found.append(row(scenario, "server CPU", [busy], "% of a core", Better.NEITHER))
            found.append(row(scenario, "server memory, peak resident", [peak], "MiB"))
        if self._gpu_busy:
            found.append(row(scenario, "GPU utilisation", [mean(self._gpu_busy)], "%", Better.NEITHER))
            found.append(row(scenario, "GPU memory, peak", [sum(self._gpu_peak.values())], "MiB"))
        return found

    async def _memory(self) -> None:
        while True:
            self._peak = max(self._peak, usage(self._pids).resident_bytes)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _read_gpus(self) -> None:
        """One nvidia-smi that prints again and again: starting it anew each time would cost CPU."""
        asked = ["nvidia-smi", _GPU_QUERY, "--format=csv,noheader,nounits", "--loop-ms=500"]
        process = await asyncio.create_subprocess_exec(
            *asked, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                with contextlib.suppress(ValueError):
                    index, busy, used = (float(part) for part in line.decode().split(","))
                    self._gpu_busy.append(busy)
                    self._gpu_peak[index] = max(self._gpu_peak.get(index, 0.0), used)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
