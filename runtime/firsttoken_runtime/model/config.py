"""What a model looks like, read from a GGUF file or a Hugging Face folder without touching its weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.gguf import GgufFile, open_gguf

__all__ = ["ModelConfig", "ModelError", "RopeKind", "RopeScaling", "find_model", "read_config"]

# GGUF files of SmolLM2 and Mistral say "llama".
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


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

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


def find_model(path: str | Path) -> Path:
    """The model at `path`: a .gguf file, a folder with config.json, or the one .gguf file of a folder.

    Raises ModelError when nothing usable is there.
    """
    place = Path(path)
    if not place.exists():
        raise ModelError(f"{path}: not found; give a GGUF file or a Hugging Face model folder")
    if place.is_file():
        if place.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise ModelError(f"{path}: pickled weights can run code when opened; convert them to safetensors")
        if place.suffix == ".safetensors":
            raise ModelError(f"{path}: a single weight file; give the folder that also holds config.json")
        return place
    if (place / "config.json").is_file():
        return place
    found = sorted(place.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{path}: {len(found)} GGUF files; give one of {', '.join(f.name for f in found[:8])}"
        )
    raise ModelError(f"{path}: neither config.json nor a .gguf file in this folder")


def read_config(path: str | Path) -> ModelConfig:
    """Configuration of a GGUF file or a Hugging Face folder. Raises ModelError."""
    place = find_model(path)
    config = _from_gguf(open_gguf(place)) if place.is_file() else _from_folder(place)
    return _checked(config, place)


# Larger than any model of these architectures: a number beyond it is damage, not a size.
_LARGEST = {"layers": 1024, "heads": 1 << 12, "kv_heads": 1 << 12, "head_dim": 1 << 12}


def _checked(config: ModelConfig, place: Path) -> ModelConfig:
    sizes = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for name in (*sizes, "max_length"):
        most = _LARGEST.get(name, 1 << 31)
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
    return config


# Hugging Face folder ------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return content


def _from_folder(folder: Path) -> ModelConfig:
    file = folder / "config.json"
    raw = read_json(file)
    architecture = str(raw.get("model_type", ""))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file}: architecture {architecture or 'unknown'!r} is not supported; "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{file}: {method} quantized weights are not supported; use the unquantized model or GGUF"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{file}: activation {raw['hidden_act']!r} is not supported; only silu is")
    try:
        return _folder_fields(folder, raw, architecture)
    except KeyError as error:
        raise ModelError(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file}: a value has the wrong type: {error}") from None


def _folder_fields(folder: Path, raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    heads, hidden, layers = (int(raw[n]) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0, 1):
        raise ModelError(f"{folder / 'config.json'}: partial rotary embedding is not supported")
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_length=int(raw.get("max_position_embeddings", 2048)),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=_folder_rope(folder / "config.json", rope, raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture == "qwen2" or bool(raw.get("attention_bias", False)),
        qk_norm=architecture == "qwen3",
        layer_windows=_folder_windows(raw, architecture, layers),
        eos_token_ids=_folder_eos(folder, raw),
        bos_token_id=raw.get("bos_token_id"),
    )


def _folder_rope(file: Path, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    length = int(rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048))

    def optional(name: str) -> float | None:
        return None if rope.get(name) is None else float(rope[name])

    match kind:
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(RopeKind.LINEAR, factor=float(rope["factor"]))
        case "llama3":
            return RopeScaling(
                RopeKind.LLAMA3,
                factor=float(rope["factor"]),
                original_length=length,
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
            )
        case "yarn":
            return RopeScaling(
                RopeKind.YARN,
                factor=float(rope["factor"]),
                original_length=length,
                beta_fast=float(rope.get("beta_fast") or 32.0),
                beta_slow=float(rope.get("beta_slow") or 1.0),
                truncate=bool(rope.get("truncate", True)),
                attention_factor=optional("attention_factor"),
                mscale=optional("mscale"),
                mscale_all_dim=optional("mscale_all_dim"),
            )
    raise ModelError(
        f"{file}: rotary scaling {kind!r} is not supported; use one of default, linear, llama3, yarn"
    )


def _per_layer(window: int | None, layers: int) -> tuple[int | None, ...]:
    # Bounded, because a damaged layer count must not fill the memory before it is refused.
    return (window,) * min(layers, _LARGEST["layers"] + 1)


def _folder_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    # Only Mistral uses its window without saying so; the Qwen families carry one that is off by default.
    if window is None or (architecture != "mistral" and not raw.get("use_sliding_window", False)):
        return _per_layer(None, layers)
    kinds = raw.get("layer_types")
    if kinds is not None and len(kinds) == layers:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    first = int(raw.get("max_window_layers", 0)) if architecture != "mistral" else 0
    every = _per_layer(int(window), layers)
    return tuple(window if layer >= first else None for layer, window in enumerate(every))


def _folder_eos(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json's ids first (chat models list their end-of-turn there), then config.json's."""
    generation = folder / "generation_config.json"
    listed: list[int] = []
    for content in (read_json(generation) if generation.is_file() else {}, raw):
        value = content.get("eos_token_id")
        listed += [value] if isinstance(value, int) else list(value or [])
    return tuple(dict.fromkeys(listed))


# GGUF ---------------------------------------------------------------------------------------------------


def _from_gguf(file: GgufFile) -> ModelConfig:
    architecture = file.architecture
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture or 'unknown'!r} is not supported; "
            f"use one of {', '.join(GGUF_ARCHITECTURES)}"
        )
    if int(file.metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"{file.path}: one part of a split GGUF; merge the parts with llama-gguf-split --merge"
        )
    if int(file.value("expert_count", 0)) > 0:
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{file.path}: tensor token_embd.weight is missing; this is not a whole language model"
        )
    try:
        return _gguf_fields(file, architecture, embedding.shape)
    except KeyError as error:
        raise ModelError(f"{file.path}: metadata {architecture}.{error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file.path}: a metadata value has the wrong type: {error}") from None


def _gguf_fields(file: GgufFile, architecture: str, embedding: Sequence[int]) -> ModelConfig:
    def required(key: str) -> Any:
        value = file.value(key)
        if value is None:
            raise KeyError(key)
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {architecture}.{key} differs by layer, which is not supported")
        return value

    heads, hidden, layers = (
        int(required(n)) for n in ("attention.head_count", "embedding_length", "block_count")
    )
    head_dim = int(file.value("attention.key_length") or hidden // heads)
    rotary = int(file.value("rope.dimension_count") or head_dim)
    if rotary != head_dim:
        raise ModelError(f"{file.path}: partial rotary embedding ({rotary} of {head_dim}) is not supported")
    window = int(file.value("attention.sliding_window") or 0) or None
    bias = any(name.endswith("attn_q.bias") for name in file.tensors)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(required("attention.head_count_kv") if file.value("attention.head_count_kv") else heads),
        head_dim=head_dim,
        intermediate_size=int(required("feed_forward_length")),
        vocab_size=int(embedding[0]),
        max_length=int(required("context_length")),
        rms_eps=float(required("attention.layer_norm_rms_epsilon")),
        rope_theta=float(file.value("rope.freq_base") or 10000.0),
        rope_scaling=_gguf_rope(file),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias=architecture == "qwen2" or bias,
        qk_norm=architecture == "qwen3",
        layer_windows=_per_layer(window, layers),
        eos_token_ids=_gguf_eos(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _gguf_rope(file: GgufFile) -> RopeScaling:
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.kind != 0:
            raise ModelError(f"{file.path}: rope_freqs.weight must be F32")
        raw = file.tensor_bytes("rope_freqs.weight", 4 * factors.elements)
        return RopeScaling(RopeKind.FACTORS, factors=struct.unpack(f"<{factors.elements}f", raw))
    kind = file.value("rope.scaling.type", "none")
    factor = float(file.value("rope.scaling.factor") or file.value("rope.scale_linear") or 1.0)
    match kind:
        case "none":
            return RopeScaling()
        case "linear":
            return RopeScaling(RopeKind.LINEAR, factor=factor)
        case "yarn":
            original = int(file.value("rope.scaling.original_context_length") or file.value("context_length"))
            return RopeScaling(RopeKind.YARN, factor=factor, original_length=original)
    raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported; use one of none, linear, yarn")


def _gguf_eos(file: GgufFile) -> tuple[int, ...]:
    """End of sequence, end of turn and end of message: any of them ends an answer."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(int(value) for value in found if value is not None))
