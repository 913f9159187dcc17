"""`python -m e2e.bench --only peers`: who is there, interleaving, ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.peers import catalogue, install, run
from e2e.peers.catalogue import PEERS, Models

from firsttoken_runtime.measure.figures import Better, row


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(catalogue, "HOME", tmp_path)
    return tmp_path


def test_a_peer_that_is_not_installed_says_what_to_do_or_what_went_wrong(home: Path) -> None:
    package = PEERS[0].package
    assert "--install-peers" in (install.why_not(package) or "")
    package.folder.mkdir()
    (package.folder / "reason").write_text("no compiler\n")
    assert install.why_not(package) == "installing it failed: no compiler"
    (package.folder / "installed").touch()
    assert install.why_not(package) is None


def test_an_installation_that_fails_leaves_its_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = home / "uv"
    failing.write_text("#!/bin/sh\necho 'error: no such version' >&2\nexit 2\n")
    failing.chmod(0o755)
    monkeypatch.setattr(install, "UV", failing)
    assert install.install(["openvino"]) == {"openvino": "failed: error: no such version"}
    assert install.why_not(catalogue.OPENVINO) == "installing it failed: error: no such version"
    with pytest.raises(SystemExit, match=r"no peer nosuch; there are llama\.cpp"):
        install.install(["nosuch"])


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_listens_on_loopback_and_reads_the_same_weights(peer: Any) -> None:
    command = peer.command(Models(Path("m.gguf"), Path("folder")), 1234)
    assert "1234" in command
    assert {"m.gguf", "folder"} & set(command)
    assert command[0].startswith(str(peer.package.folder))
    assert "127.0.0.1" in command or "openvino_server.py" in command[1]


def test_ratios_are_ours_by_theirs_for_figures_of_both() -> None:
    figures = [
        row("ours: single", "TTFT", [10.0, 20, 30]),
        row("peer: single", "TTFT", [40.0, 40, 41]),
        row("peer: single", "of theirs alone", [1.0]),
        row("ours: single", "tokens", [5.0], "tokens", Better.NEITHER),
        row("peer: single", "tokens", [5.0], "tokens", Better.NEITHER),
    ]
    found = run.ratios(figures, ["ours"])
    assert [(entry.scenario, entry.figure, entry.median) for entry in found] == [
        ("ours / peer: single", "TTFT", 0.5)
    ]


async def test_a_server_that_fails_is_left_out_and_the_others_go_on(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {"here": server.url, "gone": "http://127.0.0.1:9"}
    figures, lost = await run._rounds(urls, 2, ("single",))
    assert {entry.scenario for entry in figures} == {"here: single"}
    assert {len(entry.values) for entry in figures} == {2}
    assert "cannot reach http://127.0.0.1:9" in lost["gone"]
