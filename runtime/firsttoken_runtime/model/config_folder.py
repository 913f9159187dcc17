"""The configuration in a Hugging Face folder: config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firsttoken_runtime.model.config_parts import (
    ModelConfig,
    RopeKind,
    RopeScaling,
    per_layer,
    refuse_changed_arithmetic,
    token_ids,
)
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.files import read_json

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def from_folder(folder: Path) -> ModelConfig:
    file = folder / "config.json"
    raw = read_json(file)
    architecture = str(raw.get("model_type", ""))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file}: architecture {architecture or 'unknown'!r} is not supported; "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{file}: {method} quantized weights are not supported; use the unquantized model or GGUF"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{file}: activation {raw['hidden_act']!r} is not supported; only silu is")
    try:
        return _folder_fields(folder, raw, architecture)
    except KeyError as error:
        raise ModelError(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{file}: a value has the wrong type or size: {error}") from None


_FOLDER_ARITHMETIC = {
    "partial_rotary_factor": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}


def _folder_fields(folder: Path, raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    heads, hidden, layers = (int(raw[n]) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    file = folder / "config.json"
    for declared in (raw, rope):
        refuse_changed_arithmetic(file, declared, _FOLDER_ARITHMETIC)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"{file}: rotary parameters that differ by layer are not supported")
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
        rope_scaling=_folder_rope(file, rope, raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture == "qwen2" or bool(raw.get("attention_bias", False)),
        qk_norm=architecture == "qwen3",
        layer_windows=_folder_windows(file, raw, architecture, layers),
        eos_token_ids=_folder_eos(folder, raw),
        bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
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


def _folder_windows(
    file: Path, raw: Mapping[str, Any], architecture: str, layers: int
) -> tuple[int | None, ...]:
    kinds = raw.get("layer_types")
    if kinds is not None and (
        len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):
        raise ModelError(
            f"{file}: layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    # Mistral uses its window without saying so; the Qwen families carry one that is off by default, and
    # Llama has none: a window left over from the model it was made of is not looked at, as in transformers.
    on = architecture == "mistral" or bool(raw.get("use_sliding_window", False))
    if architecture == "llama" and on:
        raise ModelError(f"{file}: use_sliding_window is set, but llama has no sliding window")
    # Defaults where the file says nothing: those of transformers.
    window = raw.get("sliding_window", 4096) if on else None
    if kinds is not None and "sliding_attention" in kinds:
        if window is None:
            raise ModelError(f"{file}: layer_types ask for a sliding window, but none is switched on")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    if window is None or kinds is not None:
        return per_layer(None, layers)
    first = int(raw.get("max_window_layers", 28)) if architecture != "mistral" else 0
    every = per_layer(int(window), layers)
    return tuple(window if layer >= first else None for layer, window in enumerate(every))


def _folder_eos(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json's ids first (chat models list their end-of-turn there), then config.json's."""
    generation = folder / "generation_config.json"
    chat = read_json(generation) if generation.is_file() else {}
    return tuple(dict.fromkeys((*token_ids(chat, "eos_token_id"), *token_ids(raw, "eos_token_id"))))
