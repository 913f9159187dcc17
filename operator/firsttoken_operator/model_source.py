"""Where a model's weights come from: `spec.model.uri` as a path inside the pod."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

# Schemes the contract accepts and this build cannot fetch from yet.
_LATER = ("hf", "oci")
_ENDINGS = (".gguf", ".safetensors")


class ModelSourceError(ValueError):
    """A uri that this build cannot serve from; the text says what to use instead."""


@dataclass(frozen=True)
class ModelSource:
    """path: inside the container. claim and mount: the PersistentVolumeClaim and where it is mounted."""

    path: str
    claim: str | None = None
    mount: str | None = None

    @property
    def default_name(self) -> str:
        """The name clients ask for when nothing is written: the last part of the path, without its ending."""
        name = PurePosixPath(self.path).name
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        return name or "model"


def model_source(uri: str) -> ModelSource:
    """Read `file:///path` or `pvc://claim/path`. Raises ModelSourceError for anything else."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        raise ModelSourceError(f"{uri!r} is no uri; use file:///path/in/image or pvc://claim/path")
    if ".." in PurePosixPath(rest).parts:
        raise ModelSourceError(f"{uri!r} leaves its folder with '..'; write the path without it")
    if scheme == "file" and rest.startswith("/"):
        return ModelSource(rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        if re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim):
            mount = f"/models/{claim}"
            return ModelSource(f"{mount}/{path}".rstrip("/"), claim, mount)
    if scheme in _LATER:
        raise ModelSourceError(
            f"{scheme}:// is not in this build; put the model in the image and use file:///path, or on a "
            "volume and use pvc://claim/path"
        )
    raise ModelSourceError(f"{uri!r} cannot be used; write file:///path/in/image or pvc://claim/path")
