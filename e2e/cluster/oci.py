"""Images for the node's containerd, written by hand: see images.py for why. Pure.

Names follow the OCI image specification: a layer's diff id is the digest of its uncompressed tar,
and a stack of layers is named by its chain id.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MEDIA = "application/vnd.oci.image"


@dataclass(frozen=True)
class Layer:
    """`content` is the tar, or None for a layer whose files are in the snapshot store already."""

    diff_id: str
    size: int
    content: bytes | None = None


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def tar_layer(content: bytes) -> Layer:
    return Layer(diff_id=sha256(content), size=len(content), content=content)


def placed_layer(key: str) -> Layer:
    """A layer that never was a tar: its id is made from what it was built from. For one node only."""
    return Layer(diff_id=sha256(f"firsttoken placed layer {key}".encode()), size=0)


def chain_id(diff_ids: Sequence[str]) -> str:
    """The name of the stack, lowest layer first: ChainID(L0…Ln) = digest(ChainID(L0…Ln-1) + " " + Ln)."""
    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = sha256(f"{chain} {diff_id}".encode())
    return chain


def archive(name: str, layers: Sequence[Layer], config: Mapping[str, Any], architecture: str) -> bytes:
    """An OCI archive for `ctr images import -`; holds the blobs of those layers only that have content."""
    image = {
        "architecture": architecture,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created_by": "firsttoken e2e.cluster"} for _ in layers],
    }
    blobs: dict[str, bytes] = {layer.diff_id: layer.content for layer in layers if layer.content is not None}

    def descriptor(kind: str, content: bytes) -> dict[str, Any]:
        blobs[sha256(content)] = content
        return {"mediaType": f"{_MEDIA}.{kind}", "digest": sha256(content), "size": len(content)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": descriptor("config.v1+json", json.dumps(image).encode()),
        "layers": [
            {"mediaType": f"{_MEDIA}.layer.v1.tar", "digest": layer.diff_id, "size": layer.size}
            for layer in layers
        ],
    }
    top = descriptor("manifest.v1+json", json.dumps(manifest).encode())
    top["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [top]}).encode(),
        **{f"blobs/sha256/{digest.removeprefix('sha256:')}": content for digest, content in blobs.items()},
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def containerfile_config(text: str) -> dict[str, Any]:
    """ENV, USER, WORKDIR, EXPOSE, ENTRYPOINT and CMD of a Containerfile as an OCI image config.

    ENV in its KEY=value form without spaces or quotes, ENTRYPOINT and CMD in their JSON form: what
    the Containerfiles of this repository use.
    """
    config: dict[str, Any] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        instruction, _, value = line.strip().partition(" ")
        match instruction:
            case "ENV":
                config.setdefault("Env", []).extend(value.split())
            case "EXPOSE":
                config["ExposedPorts"] = {f"{port}/tcp": {} for port in value.split()}
            case "USER":
                config["User"] = value
            case "WORKDIR":
                config["WorkingDir"] = value
            case "ENTRYPOINT":
                config["Entrypoint"] = json.loads(value)
            case "CMD":
                config["Cmd"] = json.loads(value)
    return config
