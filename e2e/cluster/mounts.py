"""Mounts below a directory: found in the kernel's own table, taken away deepest first."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .console import ClusterError

MOUNT_TABLE = Path("/proc/self/mountinfo")


def mounted_below(table: str, roots: Sequence[Path]) -> list[str]:
    """Mount points at or below any root, in the order in which they can be unmounted.

    `table` is the text of /proc/self/mountinfo; the fifth field is the mount point, with space,
    tab, newline and backslash as octal escapes (proc(5)). Later mounts may cover earlier ones.
    """
    found = []
    for line in table.splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), line.split()[4])
        if any(Path(point).is_relative_to(root) for root in roots):
            found.append(point)
    return found[::-1]


def unmount_below(*roots: Path) -> int:
    """Unmounts everything at or below the roots, and returns how many mounts there were.

    ClusterError when one stays: who deletes the directory then would delete what is mounted there.
    """

    def mounted() -> list[str]:
        return mounted_below(MOUNT_TABLE.read_text(), [root.resolve() for root in roots])

    points = mounted()
    # A process in its last moments may hold one: --lazy detaches it, the kernel ends it with the process.
    for options in ([], ["--lazy"]):
        if left := mounted():
            subprocess.run(["umount", *options, "--", *left], capture_output=True, check=False)
    if left := mounted():
        raise ClusterError(f"cannot be unmounted: {', '.join(left)}; unmount by hand, then try again")
    return len(points)
