"""What a person sees: one line when a step begins, one with its time when it ends, errors in words."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_lines = threading.Lock()


class ClusterError(Exception):
    """What went wrong, where, and what to do; shown to the person as it stands."""


def say(line: str) -> None:
    """One line on stderr; stdout belongs to what other programs read."""
    with _lines:
        print(f"cluster: {line}", file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says `what …` now and how long it took (seconds) afterwards, also when it fails."""
    say(f"{what} …")
    began = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{what}: FAILED after {time.monotonic() - began:.1f} s")
        raise
    say(f"{what}: {time.monotonic() - began:.1f} s")


def run(
    argv: Sequence[object],
    *,
    why: str,
    stdin: str | bytes | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 600,
) -> str:
    """Runs a program and returns its stdout; ClusterError with its last lines when it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in argv],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            cwd=cwd,
            env=environment,
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(
            f"{why}: {argv[0]} is not installed; run `python -m e2e.cluster install-tools`"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{why}: {argv[0]} did not end within {timeout_seconds:.0f} s") from None
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-15:]
        raise ClusterError(f"{why}: {argv[0]} ended with {done.returncode}\n  " + "\n  ".join(tail))
    return done.stdout.decode(errors="replace")


def wait_for(
    what: str, condition: Callable[[], object], *, timeout_seconds: float, interval_seconds: float = 0.1
) -> None:
    """Polls `condition()` until it is true; ClusterError naming `what` when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {timeout_seconds:.0f} s")
        time.sleep(interval_seconds)
