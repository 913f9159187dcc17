"""The configuration of a model, and what its two readers (config_folder, config_gguf) share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from firsttoken_runtime.model.errors import ModelError

# Larger than any model of these architectures: a number beyond it is damage, not a size.
LARGEST = {"layers": 1024, "heads": 1 << 12, "kv_heads": 1 << 12, "head_dim": 1 << 12}


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"  # GGUF: one divisor per frequency, already worked out


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts; see rope.py for the formulas."""

    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are in elements, lengths in tokens.

    layer_windows: per layer, how many tokens (itself included) a query sees; None sees all.
    attention_bias: biases on q, k and v (an output bias is taken when the file has one).
    qk_norm: RMSNorm over each head of q and k before the rotation (Qwen3).
    """

    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def sliding_window(self) -> int | None:
        """The narrowest window of any layer, None when every layer sees everything."""
        return min((window for window in self.layer_windows if window is not None), default=None)


def per_layer(window: int | None, layers: int) -> tuple[int | None, ...]:
    """The same window in every layer."""
    # Bounded, because a damaged layer count must not fill the memory before it is refused.
    return (window,) * min(layers, LARGEST["layers"] + 1)


def refuse_changed_arithmetic(where: Path, declared: Mapping[str, Any], names: Mapping[str, float]) -> None:
    """Numbers that change the arithmetic of a model: leaving them out would make answers silently wrong.

    names: each with the value at which it changes nothing.
    """
    for name, neutral in names.items():
        value = declared.get(name)
        if value is not None and value is not False and value != neutral:
            raise ModelError(f"{where}: {name} is {value}, which this runtime does not apply")


def token_ids(content: Mapping[str, Any], key: str) -> list[int]:
    """One id, a list of them, or none (absent, null or negative). Raises ValueError for anything else."""
    value = content.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in listed):
        raise ValueError(f"{key} is {value!r}; it must be a token id or a list of them")
    return [item for item in listed if item >= 0]
