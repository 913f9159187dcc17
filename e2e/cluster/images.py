"""The operator and runtime images on the bare node: tagged by a digest of their inputs, in seconds.

An image here is a stack of four layers: base file system, dependencies (5 GB for the runtime),
model, code. Only the last one changes from day to day, and the disk writes 130 MB/s, so:
- the three lower ones are never made into a tar. Their trees lie in the cache; they are put into
  containerd's snapshot store by hard links and committed there under the name that the image's
  layer list gives them (its chain id). Import then finds them unpacked and does not ask for blobs.
- the code layer is an ordinary OCI layer, imported with the image's configuration.
Such an image runs on this node but cannot be pushed; the Containerfiles make the ones that can.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

from . import containerd, layers, tools
from .artefacts import digest, lock, tree_digest
from .console import ClusterError, run, step
from .oci import Layer, archive, chain_id, containerfile_config, placed_layer, tar_layer
from .places import REPOSITORY, Places

PREFIX = "localhost/firsttoken-"
IMAGES = ("operator", "runtime")
PAUSE_CONFIG = {"Entrypoint": ["/pause"], "User": "65535:65535"}


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _lower_layers(where: Places, image: str) -> list[tuple[str, Callable[[], Path]]]:
    """Key and tree of the layers under the code, lowest first."""
    stack: list[tuple[str, Callable[[], Path]]] = [
        (layers.base_key(), lambda: layers.base_root(where)),
        (layers.dependencies_key(image), lambda: layers.dependencies_root(where, image)),
    ]
    if image == "runtime":
        stack.append((digest(layers.model_requirement()), lambda: layers.model_root(where)))
    return stack


def reference(where: Places, image: str) -> str:
    """name:tag of an image as its inputs are now."""
    code = [tree_digest(REPOSITORY, package) for package in layers.CODE[image]]
    recipe = tree_digest(REPOSITORY / "e2e/cluster", "layers.py", "oci.py")
    scripts = [layers.project()[name] for name in ("name", "version", "scripts")]
    config = (REPOSITORY / image / "Containerfile").read_text()
    tag = digest([key for key, _ in _lower_layers(where, image)], code, recipe, scripts, config)[:16]
    return f"{PREFIX}{image}:{tag}"


def references(where: Places) -> dict[str, str]:
    return {image: reference(where, image) for image in IMAGES}


def prepare(where: Places) -> None:
    """Makes the trees of the lower layers; needs no node, so it can go on while other things are built."""
    for image in IMAGES:
        for _, tree in _lower_layers(where, image):
            tree()


def _place(where: Places, below: str | None, chain: str, tree: Path) -> None:
    """Puts a tree into the snapshot store as the layer stack `chain` on top of `below`, by hard links.

    The snapshot is committed only when complete, and carries a root label, so that containerd's
    garbage collection leaves it alone while no image names it yet.
    """
    _remember_chains(where, _placed_chains(where) | {chain})
    active = f"firsttoken-placing-{chain[-12:]}"
    if active in containerd.ctr("snapshots", "list", why="listing snapshots"):
        containerd.ctr("snapshots", "remove", active, why="removing an unfinished layer")
    prepare_words = ["snapshots", "prepare", active, *([below] if below else [])]
    containerd.ctr(*prepare_words, why="preparing a layer")
    mount = containerd.ctr("snapshots", "mounts", "/unused", active, why="finding a layer's directory")
    run(["cp", "--archive", "--link", f"{tree}/.", upper_directory(mount)], why="linking a layer's files")
    containerd.ctr("snapshots", "commit", chain, active, why="committing a layer")


def upper_directory(mount_command: str) -> Path:
    """Where a prepared snapshot's own files lie, out of the mount command that ctr prints.

    An overlay names it as upperdir; a snapshot with nothing below is a bind mount of it.
    """
    words = mount_command.split()
    for option in words[-1].split(","):
        if option.startswith("upperdir="):
            return Path(option.removeprefix("upperdir="))
    if words[:3] == ["mount", "-t", "bind"]:
        return Path(words[3])
    raise ClusterError(f"containerd's overlayfs snapshots are needed, but it says: {mount_command.strip()}")


def _import(name: str, stack: list[Layer], config: dict[str, object]) -> None:
    blob = archive(name, stack, config, _architecture())
    containerd.ctr("images", "import", "-", stdin=blob, why=f"importing {name}")
    if name not in containerd.image_names():
        raise ClusterError(f"containerd imported {name} but does not list it")


def _build(where: Places, image: str, name: str) -> None:
    lower = _lower_layers(where, image)
    stack = [placed_layer(key) for key, _ in lower]
    below: str | None = None
    for depth, (_, tree) in enumerate(lower):
        chain = chain_id([layer.diff_id for layer in stack[: depth + 1]])
        if not containerd.has_snapshot(chain):
            root = tree()
            with step(f"placing the files of layer {depth + 1} of the {image} image"):
                _place(where, below, chain, root)
        below = chain
    config = containerfile_config((REPOSITORY / image / "Containerfile").read_text())
    with step(f"importing {name}"):
        _import(name, [*stack, tar_layer(layers.code_layer(image))], config)


def build_images(where: Places) -> dict[str, str]:
    """Makes and imports what is not there yet; needs a running node. Returns image to reference."""
    with lock(where.cluster / ".images.lock"):
        wanted = references(where)
        present = containerd.image_names()
        for image, name in wanted.items():
            if name not in present:
                _build(where, image, name)
        where.images.write_text(json.dumps(wanted, indent=1) + "\n")
    return wanted


def pause_reference() -> str:
    return f"{PREFIX}pause:{tree_digest(tools.SOURCES, 'pause')[:16]}"


def import_pause(where: Places) -> None:
    """The image that kubelet needs before any pod; a static program and nothing else."""
    name = pause_reference()
    if name in containerd.image_names():
        return
    scratch = where.cluster / ".pause"
    scratch.mkdir(exist_ok=True)
    (scratch / "pause").write_bytes(tools.pause(where).read_bytes())
    (scratch / "pause").chmod(0o755)
    with step(f"importing {name}"):
        _import(name, [tar_layer(layers.tar_of(scratch))], dict(PAUSE_CONFIG))


def prune(where: Places) -> None:
    """Drops this program's images of older inputs, and layers no image is built on; on a fresh node only."""
    current = references(where)
    keep = {*current.values(), pause_reference()}
    old = [name for name in containerd.image_names() if name.startswith(PREFIX) and name not in keep]
    if old:
        containerd.ctr("images", "remove", *old, why="removing images of older inputs")
    wanted_chains = set()
    for image in IMAGES:
        ids = [placed_layer(key).diff_id for key, _ in _lower_layers(where, image)]
        wanted_chains |= {chain_id(ids[: depth + 1]) for depth in range(len(ids))}
    placed = _placed_chains(where)
    for chain in filter(containerd.has_snapshot, placed - wanted_chains):
        # Without its root label containerd drops it once nothing stands on it.
        containerd.ctr("snapshots", "label", chain, "containerd.io/gc.root=", why="releasing an old layer")
    _remember_chains(where, placed & wanted_chains)


def _placed_chains(where: Places) -> set[str]:
    record = where.cluster / "placed-layers.json"
    return set(json.loads(record.read_text())) if record.exists() else set()


def _remember_chains(where: Places, chains: set[str]) -> None:
    (where.cluster / "placed-layers.json").write_text(json.dumps(sorted(chains)))
