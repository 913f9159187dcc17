"""What a model looks like, read from a GGUF file or a Hugging Face folder without touching its weights."""

from __future__ import annotations

import math
from pathlib import Path

from firsttoken_runtime.model.config_folder import from_folder
from firsttoken_runtime.model.config_gguf import from_gguf
from firsttoken_runtime.model.config_parts import LARGEST, ModelConfig, RopeKind, RopeScaling
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.files import find_model
from firsttoken_runtime.model.gguf import open_gguf

__all__ = ["ModelConfig", "ModelError", "RopeKind", "RopeScaling", "find_model", "read_config"]


def read_config(path: str | Path) -> ModelConfig:
    """Configuration of a GGUF file or a Hugging Face folder. Raises ModelError."""
    place = find_model(path)
    config = from_gguf(open_gguf(place)) if place.is_file() else from_folder(place)
    return _checked(config, place)


def _checked(config: ModelConfig, place: Path) -> ModelConfig:
    sizes = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for name in (*sizes, "max_length"):
        most = LARGEST.get(name, 1 << 31)
        if not 1 <= getattr(config, name) <= most:
            raise ModelError(f"{place}: {name} is {getattr(config, name)}; it must be between 1 and {most}")
    for name in ("rms_eps", "rope_theta"):
        if not 0 < getattr(config, name) < math.inf:
            raise ModelError(f"{place}: {name} is {getattr(config, name)}; it must be above 0")
    if config.heads % config.kv_heads:
        raise ModelError(
            f"{place}: {config.heads} query heads cannot share {config.kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{place}: head size {config.head_dim} is odd; rotary embedding needs an even one")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise ModelError(f"{place}: sliding window {config.sliding_window}; it must be 1 token or more")
    _check_rope(config, place)
    return config


def _check_rope(config: ModelConfig, place: Path) -> None:
    """Numbers for which the formulas in rope.py have no value."""
    scaling = config.rope_scaling
    positive = {"factor": scaling.factor}
    if scaling.kind in (RopeKind.LLAMA3, RopeKind.YARN):
        positive["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind is RopeKind.YARN:
        positive |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise ModelError(f"{place}: rotary scaling: {name} is {value}; it must be above 0")
    if scaling.kind is RopeKind.LLAMA3 and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise ModelError(
            f"{place}: rotary scaling: low_freq_factor {scaling.low_freq_factor} must be below "
            f"high_freq_factor {scaling.high_freq_factor}"
        )
    if scaling.kind is RopeKind.YARN and config.rope_theta <= 1:
        raise ModelError(f"{place}: rope_theta is {config.rope_theta}; YaRN needs more than 1")
    if not all(0 < factor < math.inf for factor in scaling.factors):
        raise ModelError(f"{place}: rope_freqs.weight holds factors that are not above 0")
