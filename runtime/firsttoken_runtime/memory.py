"""How much memory there is, and how many KV pages it makes."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path

# Of the memory left on a CPU machine after the weights, the part that `auto` gives to the KV pool. The rest
# is for activations, the API process, the page cache of the model file, and whoever else lives there.
CPU_FRACTION = 0.3
CUDA_FRACTION = 0.85
# `auto` on CPU takes no more than so many sequences of full length need: a CPU cannot keep more of them
# going, and the pool is real memory from the start.
CPU_SEQUENCES = 4
# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 1 << 60


class PoolError(ValueError):
    """The pool cannot be built; the text has the numbers."""


@dataclass(frozen=True)
class Pool:
    """A KV pool: `pages` pages of `page_tokens` tokens, `bytes_per_token` each."""

    pages: int
    page_tokens: int
    bytes_per_token: int

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    def describe(self) -> str:
        return f"KV pool: {size(self.bytes)} = {self.tokens:,} tokens in {self.pages:,} pages"


def cpu_pool_bytes(available_bytes: int, bytes_per_token: int, max_model_len: int) -> int:
    """Bytes that `auto` gives to the pool on CPU."""
    return min(int(available_bytes * CPU_FRACTION), CPU_SEQUENCES * max_model_len * bytes_per_token)


def cuda_pool_bytes(free_bytes: int) -> int:
    """Bytes that `auto` gives to the pool on CUDA; what is left is for activations and the allocator."""
    return int(free_bytes * CUDA_FRACTION)


def pool(kv_bytes: int, page_tokens: int, bytes_per_token: int) -> Pool:
    """The pool that `kv_bytes` hold. Raises PoolError when that is not even two pages."""
    pages = kv_bytes // (page_tokens * bytes_per_token)
    if pages < 2:
        needed = 2 * page_tokens * bytes_per_token
        raise PoolError(
            f"{size(kv_bytes)} for the KV pool hold {pages} pages of {page_tokens} tokens, and at least 2 "
            f"are needed ({size(needed)}); give more with --kv-memory, or the process more memory"
        )
    return Pool(pages, page_tokens, bytes_per_token)


def must_be_there(kv_bytes: int, available: int) -> None:
    """Raises PoolError when a pool of this size is more than the memory that is left.

    Linux hands out memory that it has not got and ends some process, not always this one, when it is used.
    """
    if kv_bytes > available:
        raise PoolError(
            f"out of memory: {size(kv_bytes)} are asked for the KV pool, and {size(available)} are left for "
            "this process; give less with --kv-memory, or the process more memory"
        )


@dataclass(frozen=True)
class Accounting:
    """What the memory of the engine process is for.

    libraries_bytes: what was resident before the model was loaded. draft_bytes: what loading a draft model
    added, its KV included. On a GPU all of it is the device's memory as PyTorch's allocator has it.
    """

    libraries_bytes: int
    weights_bytes: int
    kv_bytes: int
    draft_bytes: int = 0

    def to_json(self, resident: int) -> dict[str, int]:
        """Bytes by purpose; all but `resident_bytes` add up to it.

        other_bytes: what the others do not explain: activations, and freed memory that was kept; negative
        where parts are not resident.
        """
        parts = self.libraries_bytes + self.weights_bytes + self.kv_bytes + self.draft_bytes
        return {
            "libraries_bytes": self.libraries_bytes,
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
            "draft_bytes": self.draft_bytes,
            "other_bytes": resident - parts,
            "resident_bytes": resident,
        }


def give_back_freed() -> None:
    """Ask the allocator to give the system what was freed: after loading, tens of megabytes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that is really there (RSS); 0 where the system does not say."""
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def size(count: int) -> str:
    """Bytes for people: `1.2 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def available_bytes(root: Path = Path("/")) -> int:
    """Memory this process may still take: what the host has left, but no more than its cgroups leave.

    root: where `proc` and `sys` are found; tests give another one.
    """
    left = [_meminfo(root)]
    for limit_file, used_file, stat_file in _cgroup_files(root):
        limit = _number(limit_file)
        if limit is not None and limit < _NO_LIMIT:
            # Clean file cache inside the group is given back under pressure: it counts as left.
            used = (_number(used_file) or 0) - _inactive_file(stat_file)
            left.append(max(limit - max(used, 0), 0))
    return min(left)


def cpu_count(root: Path = Path("/")) -> int:
    """CPUs this process may use: its affinity, and its cgroup quota rounded down (at least 1)."""
    count = len(os.sched_getaffinity(0))
    for directory in _cgroup_directories(root, "cpu"):
        quota = _quota(directory)
        if quota is not None:
            count = min(count, max(int(quota), 1))
    return count


def _meminfo(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """The directories that limit this process, from its own group up: a parent's limit counts too.

    In a container's own cgroup namespace the path in /proc/self/cgroup may not exist below the mount; the
    mount itself is then the group.
    """
    found: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = base / path.lstrip("/")
        while own != base and base in own.parents:
            found.append(own)
            own = own.parent
        found.append(base)
    return found


def _cgroup_files(root: Path) -> list[tuple[Path, Path, Path]]:
    files = []
    for directory in _cgroup_directories(root, "memory"):
        stat = directory / "memory.stat"
        files.append((directory / "memory.max", directory / "memory.current", stat))
        files.append((directory / "memory.limit_in_bytes", directory / "memory.usage_in_bytes", stat))
    return files


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


def _quota(directory: Path) -> float | None:
    """CPUs of the quota in this directory, v2 (`cpu.max`) or v1 (`cpu.cfs_*`); None without one."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        v1_quota, v1_period = (
            _number(directory / "cpu.cfs_quota_us"),
            _number(directory / "cpu.cfs_period_us"),
        )
        return v1_quota / v1_period if v1_quota and v1_period and v1_quota > 0 else None
