"""CPU and memory of the server's processes, GPUs as nvidia-smi tells them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.resources import (
    Watch,
    find_server,
    is_local,
    listeners,
    usage,
    with_descendants,
)

_BUSY = """
import time
end = time.process_time() + 0.3
while time.process_time() < end: pass
print("busy no more", flush=True)
input()
"""


def test_whoever_listens_on_a_port_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert listeners(port) == []
        listener.listen()
        assert listeners(port) == [os.getpid()]
        assert find_server(f"http://127.0.0.1:{port}", None).pids == (os.getpid(),)


def test_children_count() -> None:
    command = [sys.executable, "-c", _BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in with_descendants([os.getpid()])
        used = usage([child.pid])
        assert used.cpu_seconds >= 0.25
        assert 1 << 20 < used.resident_bytes < 1 << 30
        child.communicate(b"\n")
    assert usage([child.pid]).cpu_seconds == 0


@pytest.mark.parametrize(
    ("url", "local"),
    [("http://localhost:1", True), ("http://127.0.0.1", True), ("http://192.0.2.1:80", False)],
)
def test_only_an_address_of_this_machine_is_local(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_a_server_elsewhere_is_not_looked_for() -> None:
    assert find_server("http://192.0.2.1:80", None).why_not == "the server is on another machine"


def test_a_process_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BenchError, match="no process 4194304"):
        find_server("http://192.0.2.1", 4_194_304)


_NVIDIA_SMI = """#!/bin/sh
case "$*" in
*loop-ms*) while :; do echo "0, 40, 1000"; echo "1, 60, 3000"; sleep 0.05; done ;;
*) echo "NVIDIA H200, 143771 MiB"; echo "NVIDIA H200, 143771 MiB" ;;
esac
"""


async def test_gpus_are_watched_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(_NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    watched = find_server("http://127.0.0.1:9", os.getpid())
    assert watched.gpus == ("NVIDIA H200, 143771 MiB",) * 2
    watch = Watch(watched)
    await watch.start()
    await asyncio.sleep(0.2)
    found = {entry.figure: entry.median for entry in await watch.stop("load")}
    assert found["GPU utilisation"] == pytest.approx(50, abs=10)
    assert found["GPU memory, peak"] == 4000
    assert found["server memory, peak resident"] > 1
    assert "server CPU" in found
