"""A `firsttoken serve` of the demo's model, without a cluster."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from e2e.demo_model import model_path
from e2e.kube import ROOT, wait_for

FIRSTTOKEN = ROOT / ".venv" / "bin" / "firsttoken"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, str, Path]]:
    """A `firsttoken serve` of the real model; yields its URL, its admin URL and the token file."""
    port, admin_port = free_port(), free_port()
    with TemporaryDirectory() as directory:
        token = Path(directory) / "token"
        token.write_text(os.urandom(16).hex())
        command = [str(FIRSTTOKEN), "serve", "--model", str(model_path()), "--port", str(port)]
        command += ["--admin-port", str(admin_port), "--admin-token-file", str(token), *arguments]
        with (Path(directory) / "log").open("w+") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log)
            try:
                url = f"http://127.0.0.1:{port}"
                wait_for("the server to be ready", lambda: _ready(process, url, log.name), 120)
                yield url, f"http://127.0.0.1:{admin_port}", token
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def _ready(process: subprocess.Popen[bytes], url: str, log: str) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"bench: firsttoken serve ended: {Path(log).read_text()[-2000:]}")
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
