"""The parts of the cluster tool that need no cluster: tags, layers, firewall text, mounts, artefacts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from e2e.cluster import artefacts, images, layers, mounts, network, oci, tools
from e2e.cluster.console import ClusterError
from e2e.cluster.places import REPOSITORY, Places, places


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the images are made from, to change."""
    for part in ("crds", "operator", "runtime", "e2e/cluster"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    monkeypatch.setattr(layers, "REPOSITORY", tmp_path)
    monkeypatch.setattr(images, "REPOSITORY", tmp_path)
    return tmp_path


class TestImageReferences:
    def test_operator_code_changes_the_operators_tag_only(self, checkout: Path) -> None:
        before = images.references(places())
        (checkout / "operator/firsttoken_operator/added.py").write_text("x = 1\n")
        after = images.references(places())
        assert after["operator"] != before["operator"]
        assert after["runtime"] == before["runtime"]

    def test_the_contracts_code_changes_both(self, checkout: Path) -> None:
        before = images.references(places())
        (checkout / "crds/firsttoken_api/added.py").write_text("x = 1\n")
        after = images.references(places())
        assert after["operator"] != before["operator"]
        assert after["runtime"] != before["runtime"]

    def test_a_new_dependency_changes_the_tag_of_the_image_that_has_it(self, checkout: Path) -> None:
        before = images.references(places())
        file = checkout / "pyproject.toml"
        file.write_text(file.read_text().replace("operator = [", 'operator = [\n    "certifi>=2020",'))
        after = images.references(places())
        assert "certifi>=2020" in layers.requirements("operator")
        assert after["operator"] != before["operator"]
        assert after["runtime"] == before["runtime"]

    def test_bytecode_left_in_the_checkout_changes_nothing(self, checkout: Path) -> None:
        before = images.references(places())
        cache = checkout / "crds/firsttoken_api/__pycache__"
        cache.mkdir()
        (cache / "x.cpython-311.pyc").write_bytes(b"x")
        assert images.references(places()) == before

    def test_the_code_layer_is_the_same_bytes_every_time(self) -> None:
        assert layers.code_layer("operator") == layers.code_layer("operator")

    @pytest.mark.parametrize(("image", "command"), [("operator", ["operator"]), ("runtime", ["serve"])])
    def test_configuration_comes_from_the_containerfile(self, image: str, command: list[str]) -> None:
        config = oci.containerfile_config((REPOSITORY / image / "Containerfile").read_text())
        assert config["Entrypoint"] == ["firsttoken"]
        assert config["Cmd"][:1] == command
        assert config["User"] == "65532:65532"
        assert "HOME=/tmp" in config["Env"]


def test_a_chain_of_layers_is_named_as_the_image_specification_says() -> None:
    one, two = oci.sha256(b"1"), oci.sha256(b"2")
    assert oci.chain_id([one]) == one
    assert oci.chain_id([one, two]) == oci.sha256(f"{one} {two}".encode())


@pytest.mark.parametrize(
    ("printed", "directory"),
    [
        ("mount -t bind /c/1/fs /unused -o rw,rbind\n", "/c/1/fs"),
        (
            "mount -t overlay overlay /unused -o workdir=/c/2/work,upperdir=/c/2/fs,lowerdir=/c/1/fs\n",
            "/c/2/fs",
        ),
    ],
)
def test_a_snapshots_own_directory_is_read_from_its_mount(printed: str, directory: str) -> None:
    assert images.upper_directory(printed) == Path(directory)


def test_firewall_removal_names_our_chains_and_nobody_elses() -> None:
    saved = """\
*filter
:INPUT ACCEPT [0:0]
:DOCKER-USER - [0:0]
:KUBE-FORWARD - [0:0]
-A INPUT -j DOCKER-USER
-A INPUT -m comment --comment "kubernetes, ours" -j KUBE-FORWARD
-A KUBE-FORWARD -j ACCEPT
COMMIT
*nat
:DOCKER - [0:0]
-A DOCKER -i docker0 -j RETURN
COMMIT
"""
    assert network.removal(saved, network.is_ours).splitlines() == [
        "*filter",
        '-D INPUT -m comment --comment "kubernetes, ours" -j KUBE-FORWARD',
        "-F KUBE-FORWARD",
        "-X KUBE-FORWARD",
        "COMMIT",
    ]


def test_mounts_are_undone_in_reverse_order_and_only_below_the_roots() -> None:
    table = "\n".join(
        f"{number} 1 0:1 / {point} rw - tmpfs tmpfs rw"
        for number, point in enumerate(["/run/ft", "/run/ftx", "/run/ft/a\\040b", "/run/ft/a\\040b/c"])
    )
    assert mounts.mounted_below(table, [Path("/run/ft")]) == ["/run/ft/a b/c", "/run/ft/a b", "/run/ft"]


def test_an_interrupted_artefact_never_looks_finished(tmp_path: Path) -> None:
    where = Places(tmp_path)

    def interrupted(directory: Path) -> None:
        (directory / "half").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artefacts.artefact(where, "thing", "k" * 12, interrupted, what="making half a thing")
    assert artefacts.find(where, "thing", "k" * 12) is None

    def complete(directory: Path) -> None:
        assert list(directory.iterdir()) == []
        (directory / "whole").write_text("1")

    made = artefacts.artefact(where, "thing", "k" * 12, complete, what="making a thing")
    assert [path.name for path in made.iterdir()] == ["whole"]


def test_a_finished_artefact_is_not_made_again_and_the_one_of_older_inputs_goes(tmp_path: Path) -> None:
    where = Places(tmp_path)
    made: list[Path] = []
    for key in ("a" * 12, "a" * 12, "b" * 12):
        artefacts.artefact(where, "thing", key, made.append, what="making a thing")
    assert len(made) == 2
    assert artefacts.find(where, "thing", "a" * 12) is None
    assert artefacts.find(where, "thing", "b" * 12)


@pytest.mark.parametrize(
    ("platform", "user", "words"), [("darwin", 0, "needs Linux"), ("linux", 1000, "needs root")]
)
def test_where_a_node_cannot_run_it_says_why(
    monkeypatch: pytest.MonkeyPatch, platform: str, user: int, words: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(ClusterError, match=words):
        tools.require_root_on_linux()


def test_without_go_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="install Go"):
        tools.helm(Places(tmp_path))
