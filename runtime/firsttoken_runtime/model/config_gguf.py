"""The configuration in the metadata of a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
from firsttoken_runtime.model.gguf import GgufFile

# Files of SmolLM2 and Mistral say "llama".
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def from_gguf(file: GgufFile) -> ModelConfig:
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
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{file.path}: a metadata value has the wrong type or size: {error}") from None


_GGUF_ARITHMETIC = {
    "attention.scale": 0.0,
    "attention.sliding_window_pattern": 1,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


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
    refuse_changed_arithmetic(
        file.path, {name: file.value(name) for name in _GGUF_ARITHMETIC}, _GGUF_ARITHMETIC
    )
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
        layer_windows=per_layer(window, layers),
        eos_token_ids=_gguf_eos(file),
        bos_token_id=next(iter(token_ids(file.metadata, "tokenizer.ggml.bos_token_id")), None),
    )


def _gguf_rope(file: GgufFile) -> RopeScaling:
    scaling = _gguf_scaling(file)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return scaling
    if factors.kind != 0:
        raise ModelError(f"{file.path}: rope_freqs.weight must be F32")
    if scaling.kind is not RopeKind.DEFAULT:
        raise ModelError(
            f"{file.path}: rope_freqs.weight and {scaling.kind} rotary scaling together are not supported"
        )
    raw = file.tensor_bytes("rope_freqs.weight", 4 * factors.elements)
    return RopeScaling(RopeKind.FACTORS, factors=struct.unpack(f"<{factors.elements}f", raw))


def _gguf_scaling(file: GgufFile) -> RopeScaling:
    factor = float(file.value("rope.scaling.factor") or file.value("rope.scale_linear") or 1.0)
    # A file that gives a factor without a kind means linear scaling, as llama.cpp reads it.
    kind = file.value("rope.scaling.type", "linear" if factor != 1.0 else "none")
    match kind:
        case "none":
            return RopeScaling()
        case "linear":
            return RopeScaling(RopeKind.LINEAR, factor=factor) if factor != 1.0 else RopeScaling()
        case "yarn":
            original = int(file.value("rope.scaling.original_context_length") or file.value("context_length"))
            return RopeScaling(
                RopeKind.YARN,
                factor=factor,
                original_length=original,
                beta_fast=float(file.value("rope.scaling.yarn_beta_fast") or 32.0),
                beta_slow=float(file.value("rope.scaling.yarn_beta_slow") or 1.0),
            )
    raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported; use one of none, linear, yarn")


# Early files of chat models name only the end of the text, though their answers end with one of these.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")


def _gguf_eos(file: GgufFile) -> tuple[int, ...]:
    """End of sequence, end of turn and end of message: any of them ends an answer."""
    found: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        found += token_ids(file.metadata, f"tokenizer.ggml.{key}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        found += [tokens.index(token) for token in _END_OF_TURN if token in tokens]
    return tuple(dict.fromkeys(found))
