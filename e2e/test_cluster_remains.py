"""Clearing, tried without a cluster: what a dead node left goes, and nobody else's things do."""

from __future__ import annotations

import fcntl
import json
import subprocess
from pathlib import Path

import pytest

from e2e.cluster import artefacts, containerd, kernel, kind, mounts, network, node, processes, tools
from e2e.cluster.console import ClusterError
from e2e.cluster.places import Places


class TestAnotherKubernetesOnTheMachine:
    FOREIGN = "*filter\n:INPUT ACCEPT [0:0]\n:KUBE-FORWARD - [0:0]\nCOMMIT\n"
    OURS = FOREIGN.replace(":KUBE", ":FIRSTTOKEN-FORWARD - [0:0]\n:KUBE")

    @pytest.fixture
    def restored(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What iptables-restore was given."""
        given: list[str] = []
        monkeypatch.setattr(network, "run", lambda _, *, stdin, why: given.append(stdin))
        return given

    def firewall(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setattr(network, "saved_firewalls", lambda: {"iptables": text})

    def test_its_chains_stay_when_no_node_of_ours_was_here(
        self, monkeypatch: pytest.MonkeyPatch, restored: list[str]
    ) -> None:
        self.firewall(monkeypatch, self.FOREIGN)
        assert not network.remove_chains(node_was_here=False)
        assert restored == []

    @pytest.mark.parametrize(("text", "node_was_here"), [(OURS, False), (OURS, True), (FOREIGN, True)])
    def test_ours_go_by_any_trace_of_a_node_of_ours(
        self, monkeypatch: pytest.MonkeyPatch, restored: list[str], text: str, node_was_here: bool
    ) -> None:
        self.firewall(monkeypatch, text)
        assert network.remove_chains(node_was_here)
        assert "-X KUBE-FORWARD" in restored[0]

    def test_a_node_is_not_started_beside_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.firewall(monkeypatch, self.FOREIGN)
        with pytest.raises(ClusterError, match="another Kubernetes"):
            network.refuse_another_kubernetes()
        self.firewall(monkeypatch, self.FOREIGN.replace("KUBE-", "DOCKER-"))
        network.refuse_another_kubernetes()


class TestClearing:
    @pytest.fixture
    def remains(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Only files of a node are left; returns the directory that stands for /run/firsttoken."""
        run = tmp_path / "run"
        run.mkdir()
        monkeypatch.setattr(node, "RUN", run)
        monkeypatch.setattr(node, "RECORD", run / "node.json")
        monkeypatch.setattr(containerd, "CONTAINERD_STATE", run / "containerd")
        for finder in ("find", "containers", "cgroup_directories"):
            monkeypatch.setattr(processes, finder, list)
        monkeypatch.setattr(network, "bridge_exists", lambda: False)
        monkeypatch.setattr(network, "remove_bridge", lambda: None)
        monkeypatch.setattr(network, "remove_chains", lambda node_was_here: False)
        monkeypatch.setattr(node, "_remove_strays", lambda logs: None)
        return run

    def test_state_and_kubeconfig_go_from_the_cache_it_was_started_with_too(
        self, tmp_path: Path, remains: Path
    ) -> None:
        old = Places(tmp_path / "old")
        (remains / "node.json").write_text(json.dumps({"cache": str(old.cache)}))
        old.volatile.mkdir(parents=True)
        old.kubeconfig.write_text("secret")
        assert node.clear(Places(tmp_path / "new"))
        assert not any(path.exists() for path in (old.volatile, old.kubeconfig, remains))
        assert not node.clear(Places(tmp_path / "new")), "nothing is left to clear"

    @pytest.mark.parametrize("interrupted", ["_remove_strays", "remove_tree"])
    def test_interrupted_it_begins_again_the_next_time(
        self, tmp_path: Path, remains: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
    ) -> None:
        def interrupt(_: Path) -> None:
            raise KeyboardInterrupt

        where = Places(tmp_path / "cache")
        where.cluster.mkdir(parents=True)
        where.kubeconfig.write_text("secret")
        with monkeypatch.context() as patched:
            patched.setattr(node, interrupted, interrupt)
            with pytest.raises(KeyboardInterrupt):
                node.clear(where)
        assert node.clear(where)
        assert not where.kubeconfig.exists()

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
    def test_a_record_that_was_cut_short_is_no_obstacle(
        self, tmp_path: Path, remains: Path, text: str
    ) -> None:
        (remains / "node.json").write_text(text)
        assert node.clear(Places(tmp_path / "cache"))
        assert not remains.exists()

    def test_what_is_still_mounted_is_never_deleted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        precious = tmp_path / "state" / "volume" / "file"
        precious.parent.mkdir(parents=True)
        precious.write_text("of the user")
        table = tmp_path / "mountinfo"
        table.write_text(f"1 1 0:1 / {precious.parent} rw - ext4 /dev/x rw\n")
        monkeypatch.setattr(mounts, "MOUNT_TABLE", table)
        with pytest.raises(ClusterError, match="cannot be unmounted"):
            artefacts.remove_tree(tmp_path / "state")
        assert precious.exists()


def test_kernel_settings_are_put_back_as_they_were_and_others_left_alone(tmp_path: Path) -> None:
    for name in (kernel.FORWARDING, "kernel/panic", "kernel/other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("0\n")
    noted = kernel.settings(tmp_path)
    assert noted == {kernel.FORWARDING: "0", "kernel/panic": "0"}, "those that this kernel has"
    (tmp_path / kernel.FORWARDING).write_text("1\n")
    kernel.put_back({**noted, "kernel/other": "5", "vm/overcommit_memory": "1"}, tmp_path)
    assert kernel.settings(tmp_path) == noted
    assert (tmp_path / "kernel/other").read_text() == "0\n"
    assert not (tmp_path / "vm").exists()


def test_whoever_has_to_wait_for_another_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with (tmp_path / "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def hear(line: str) -> None:
            said.append(line)
            fcntl.flock(other, fcntl.LOCK_UN)  # the other one is done

        monkeypatch.setattr(artefacts, "say", hear)
        with artefacts.lock(tmp_path / "lock"):
            pass
        with artefacts.lock(tmp_path / "lock"):
            pass
    assert len(said) == 1
    assert "waiting for another" in said[0]


def test_kind_is_not_started_beside_a_bare_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "available", lambda: True)
    monkeypatch.setattr(kind, "RUN", tmp_path / "absent")
    assert kind.chosen_kind(Places(tmp_path), "auto") is not None
    assert kind.chosen_kind(Places(tmp_path), "bare") is None
    monkeypatch.setattr(kind, "RUN", tmp_path)
    assert kind.chosen_kind(Places(tmp_path), None) is None
    with pytest.raises(ClusterError, match="say `down` first"):
        kind.chosen_kind(Places(tmp_path), "kind")


def test_services_are_forbidden_while_packages_are_installed_and_only_then(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    for left_by_one_that_was_killed in (False, True):
        if left_by_one_that_was_killed:
            policy.write_text(tools.NO_SERVICES)
        with tools.no_services_started(policy):
            assert subprocess.run([policy], check=False).returncode == 101  # Debian policy: not allowed
        assert not policy.exists()
    policy.write_text("the machine's own")
    with tools.no_services_started(policy):
        assert policy.read_text() == "the machine's own"
    assert policy.read_text() == "the machine's own"
