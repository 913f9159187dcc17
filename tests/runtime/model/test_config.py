"""Configurations in their corners: what transformers or llama.cpp make of them, or a refusal in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from firsttoken_runtime.model.config import ModelConfig, ModelError, RopeKind, RopeScaling, read_config
from firsttoken_runtime.model.gguf import open_gguf
from firsttoken_runtime.model.rope import inverse_frequencies
from firsttoken_runtime.model.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def folder(tmp_path: Path):
    """Write config.json (and generation_config.json) and return the folder."""

    def write(generation: dict[str, Any] | None = None, **fields: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama", **fields}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFolderWindows:
    """Sliding windows are those of transformers, or the model is refused."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"model_type": "mistral"},
            {"model_type": "mistral", "sliding_window": None},
            {"model_type": "mistral", "sliding_window": 100},
            {"model_type": "llama", "sliding_window": 100},
            {"model_type": "qwen2", "sliding_window": 100},
            {"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True},
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
            {
                "model_type": "qwen2",
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL, SLIDING],
            },
        ],
    )
    def test_as_transformers(self, folder, fields):
        from transformers import AutoConfig

        path = folder(**fields)
        theirs = AutoConfig.from_pretrained(path)
        window = theirs.sliding_window if fields["model_type"] != "llama" else None
        kinds = getattr(theirs, "layer_types", None) or [SLIDING] * 3
        expected = tuple(window if kind == SLIDING else None for kind in kinds)
        assert read_config(path).layer_windows == expected

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"use_sliding_window": True, "sliding_window": 9}, "llama has no sliding window"),
            ({"layer_types": [FULL, SLIDING, FULL]}, "none is switched on"),
            (
                {"model_type": "qwen2", "sliding_window": 9, "layer_types": [SLIDING] * 3},
                "none is switched on",
            ),
            ({"model_type": "mistral", "layer_types": [FULL]}, "each of 3 layers"),
            ({"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attention"),
            ({"model_type": "mistral", "sliding_window": 0}, "sliding window 0; it must be 1"),
        ],
    )
    def test_refused_rather_than_left_out(self, folder, fields, words):
        assert words in refused(folder(**fields))


class TestFolderNumbers:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"num_attention_heads": 0}, "wrong type or size"),
            ({"hidden_size": float("inf")}, "wrong type or size"),
            ({"quantization_config": "awq"}, "awq quantized weights"),
            ({"logits_scaling": 8.0}, "logits_scaling is 8.0, which this runtime does not apply"),
            ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            (
                {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
                "partial_rotary_factor is 0.5",
            ),
            ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "differ by layer"),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0; it must be above 0"),
            (
                {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": -4}},
                "original_max_position_embeddings is -4",
            ),
            (
                {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
                "YaRN needs more than 1",
            ),
            (
                {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "low_freq_factor": 4.0,
                        "high_freq_factor": 4.0,
                    }
                },
                "low_freq_factor 4.0 must be below high_freq_factor 4.0",
            ),
            ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id"),
            ({"eos_token_id": [2, "x"]}, "must be a token id or a list"),
            ({"bos_token_id": "<s>"}, "bos_token_id is '<s>'"),
        ],
    )
    def test_refused(self, folder, fields, words):
        assert words in refused(folder(**fields))

    def test_multipliers_that_change_nothing_are_welcome(self, folder):
        read_config(folder(logits_scaling=1.0, partial_rotary_factor=None, final_logit_softcapping=None))

    def test_a_json_nested_without_end(self, folder):
        path = folder()
        (path / "config.json").write_text("[" * 200_000)
        assert "not valid JSON" in refused(path)

    @pytest.mark.parametrize(
        ("chat", "own", "expected"),
        [
            ({"eos_token_id": [7, 5]}, 5, (7, 5)),
            ({"eos_token_id": 7}, [5, 7], (7, 5)),
            ({}, 5, (5,)),
            (None, None, ()),
            (None, -1, ()),
        ],
    )
    def test_ids_that_end_an_answer(self, folder, chat, own, expected):
        assert read_config(folder(chat, eos_token_id=own)).eos_token_ids == expected

    def test_a_path_that_is_too_long_for_the_system(self):
        with pytest.raises(ModelError, match="cannot be read: File name too long"):
            read_config("x" * 5000)


@pytest.fixture
def gguf_file(tmp_path: Path):
    """Write a GGUF file of metadata alone, with an embedding of 8 x 64."""

    def write(tokens: list[str] | None = None, factors: np.ndarray | None = None, **metadata: Any) -> Path:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(2)
        writer.add_context_length(256)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_layer_norm_rms_eps(1e-5)
        for name, value in metadata.items():
            key = name.replace("__", ".")
            key = key if key.startswith(("tokenizer.", "general.")) else f"llama.{key}"
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        if tokens:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list(tokens)
            writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
        writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


class TestGguf:
    @pytest.mark.parametrize(
        ("metadata", "expected"),
        [
            ({}, RopeScaling()),
            ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, RopeScaling()),
            # Older files give no kind, and llama.cpp reads them as linear.
            ({"rope__scale_linear": 4.0}, RopeScaling(RopeKind.LINEAR, factor=4.0)),
            ({"rope__scaling__factor": 2.0}, RopeScaling(RopeKind.LINEAR, factor=2.0)),
            (
                {
                    "rope__scaling__type": "yarn",
                    "rope__scaling__factor": 4.0,
                    "rope__scaling__original_context_length": 64,
                    "rope__scaling__yarn_beta_fast": 16.0,
                    "rope__scaling__yarn_beta_slow": 2.0,
                },
                RopeScaling(RopeKind.YARN, factor=4.0, original_length=64, beta_fast=16.0, beta_slow=2.0),
            ),
        ],
    )
    def test_rotary_scaling(self, gguf_file, metadata, expected):
        assert read_config(gguf_file(**metadata)).rope_scaling == expected

    @pytest.mark.parametrize(
        ("metadata", "words"),
        [
            ({"attention__head_count": 0}, "wrong type or size"),
            ({"logit_scale": 0.5}, "logit_scale is 0.5, which this runtime does not apply"),
            ({"attention__sliding_window_pattern": 4}, "sliding_window_pattern is 4"),
            ({"rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
            ({"general__alignment": "wide"}, "general.alignment is 'wide'"),
            ({"general__alignment": 0}, "general.alignment is 0"),
            ({"tokenizer__ggml__eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ],
    )
    def test_refused(self, gguf_file, metadata, words):
        if "attention__head_count" in metadata:
            path = gguf_file()
            content = path.read_bytes()
            at = content.index(b"llama.attention.head_count") + len(b"llama.attention.head_count") + 4
            path.write_bytes(content[:at] + struct.pack("<I", 0) + content[at + 4 :])
        else:
            path = gguf_file(**metadata)
        assert words in refused(path)

    def test_factors_and_a_scaling_together(self, gguf_file):
        path = gguf_file(factors=np.ones(8, np.float32), rope__scaling__factor=2.0)
        assert "rope_freqs.weight and linear rotary scaling together" in refused(path)

    def test_factors_of_zero(self, gguf_file):
        assert "not above 0" in refused(gguf_file(factors=np.zeros(8, np.float32)))

    def test_the_window_of_every_layer(self, gguf_file):
        assert read_config(gguf_file(attention__sliding_window=32)).layer_windows == (32, 32)

    def test_big_endian(self, gguf_file):
        path = gguf_file()
        content = path.read_bytes()
        path.write_bytes(content[:4] + (3).to_bytes(4, "big") + content[8:])
        assert "big-endian" in refused(path)

    def test_an_error_names_the_link_not_the_blob_behind_it(self, gguf_file):
        path = gguf_file()
        blob = path.with_name("0f3a")
        path.rename(blob)
        path.symlink_to(blob.name)
        blob.write_bytes(blob.read_bytes()[:100])
        assert "m.gguf: truncated" in refused(path)
        blob.unlink()
        assert "m.gguf: a link to 0f3a, which is not there" in refused(path)

    def test_the_end_of_a_turn_is_known_by_its_text(self, gguf_file):
        """Early Llama 3 files name only <|end_of_text|>, and answers end with <|eot_id|>."""
        tokens = ["a", "b", "ab", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
        path = gguf_file(tokens=tokens, tokenizer__ggml__eos_token_id=4)
        assert read_config(path).eos_token_ids == (4, 5)

    @pytest.mark.parametrize(
        ("split", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
    )
    def test_which_families_begin_with_bos_when_the_file_does_not_say(self, gguf_file, split, begins):
        path = gguf_file(
            tokens=["a", "b", "ab", "<s>"], tokenizer__ggml__pre=split, tokenizer__ggml__bos_token_id=3
        )
        assert load_tokenizer(path).encode("ab") == [*([3] if begins else []), 2]

    def test_what_was_opened_is_opened_anew_when_the_file_changes(self, gguf_file):
        first = open_gguf(gguf_file())
        assert open_gguf(gguf_file()) is not first


def test_yarn_frequencies_in_corners_as_transformers(folder):
    """Fractional borders, and the factor from mscale."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    corners = [
        {"truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"beta_fast": 1.0, "beta_slow": 1.0},
        {"factor": 0.5},
    ]
    for corner in corners:
        path = folder(head_dim=32, rope_parameters={**scaling, "rope_theta": 5000.0, **corner})
        theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(path), "cpu")
        ours, our_factor = inverse_frequencies(read_config(path))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        assert our_factor == pytest.approx(their_factor)


def test_a_configuration_says_the_narrowest_of_its_windows(folder):
    config: ModelConfig = read_config(folder(model_type="mistral", sliding_window=40))
    assert config.sliding_window == 40
