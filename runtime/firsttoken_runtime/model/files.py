"""Where a model lies on disk, and reading its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firsttoken_runtime.model.errors import ModelError


def find_model(path: str | Path) -> Path:
    """The model at `path`: a .gguf file, a folder with config.json, or the one .gguf file of a folder.

    Raises ModelError when nothing usable is there.
    """
    try:
        return _find(Path(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _find(place: Path) -> Path:
    if place.is_symlink() and not place.exists():
        raise ModelError(f"{place}: a link to {place.readlink()}, which is not there; download it again")
    if not place.exists():
        raise ModelError(f"{place}: not found; give a GGUF file or a Hugging Face model folder")
    if place.is_file():
        if place.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise ModelError(
                f"{place}: pickled weights can run code when opened; convert them to safetensors"
            )
        if place.suffix == ".safetensors":
            raise ModelError(f"{place}: a single weight file; give the folder that also holds config.json")
        return place
    if (place / "config.json").is_file():
        return place
    found = sorted(place.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{place}: {len(found)} GGUF files; give one of {', '.join(f.name for f in found[:8])}"
        )
    if (place / "config.json").is_symlink():
        raise ModelError(f"{place}: config.json is a link to a file that is not there; download it again")
    if revisions := sorted((place / "snapshots").glob("*/config.json")):
        raise ModelError(
            f"{place}: the top of a Hugging Face cache; give a revision in it, such as {revisions[0].parent}"
        )
    raise ModelError(f"{place}: neither config.json nor a .gguf file in this folder")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return content


def read_text(file: Path) -> str:
    """UTF-8 text. Raises ModelError."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
