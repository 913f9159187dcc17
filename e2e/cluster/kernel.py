"""Settings of the machine's kernel that a node changes: noted before it starts, put back when it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/proc/sys")
FORWARDING = "net/ipv4/ip_forward"

# The others are what kubelet sets when it starts.
CHANGED = (
    FORWARDING,
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def settings(root: Path = ROOT) -> dict[str, str]:
    """Name to value of those settings that this kernel has."""
    return {name: (root / name).read_text().strip() for name in CHANGED if (root / name).exists()}


def put_back(noted: Mapping[str, str], root: Path = ROOT) -> None:
    """Writes the noted values where others stand now; names that are none of ours are left alone."""
    now = settings(root)
    for name, value in noted.items():
        if name in now and now[name] != value:
            with contextlib.suppress(OSError):  # a kernel that forbids it forbade the change, too
                (root / name).write_text(value)
