"""GGUF: weights of every supported kind, row order of llama files, damaged files, and SentencePiece."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken_runtime.model.config import RopeKind, read_config
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.gguf import open_gguf
from firsttoken_runtime.model.load import load_model
from firsttoken_runtime.model.rope import inverse_frequencies
from firsttoken_runtime.model.tokenizer import load_tokenizer
from firsttoken_runtime.model.weights import GgufWeights

COUNT = 6
LAYERS, HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 256
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *middle, leaf = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(middle)]}.{leaf}"


def random_model(config_name: str, **options):
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, config_name)(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 0.1)
    return model


def write_gguf(path: Path, model, architecture: str, kind: Kind = Kind.F32, **extra_tensors) -> None:
    """Write a transformers model as llama.cpp's converter lays it out.

    Matrices are stored as `kind`, and the model's own weights are replaced by what that kind holds of them.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if values.ndim == 2 and kind != Kind.F32:
            stored = gguf.quantize(values, kind)
            parameter.copy_(torch.from_numpy(gguf.dequantize(stored, kind)))
            values = parameter.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp turns neighbouring rows; checkpoints turn rows half a head apart.
            heads = HEADS if "q_proj" in name else KV_HEADS
            shape = values.shape
            values = values.reshape(heads, 2, HEAD_DIM // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if values.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in extra_tensors.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(3)).tolist()


def assert_same_generation(path, model, prompt, driver_on, reference_greedy) -> None:
    reference = reference_greedy(model, prompt, COUNT)
    driver = driver_on(load_model(path, "cpu", torch.float32), total_pages=8)
    sequence = driver.finish(driver.sequence(prompt, COUNT), COUNT, chunk=20)
    assert sequence.tokens == reference.tokens
    torch.testing.assert_close(torch.stack(sequence.logits), reference.logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "config_name", "options"),
    [
        ("llama", "LlamaConfig", {}),
        ("llama", "LlamaConfig", {"attention_bias": True}),
        ("qwen2", "Qwen2Config", {}),
        ("qwen3", "Qwen3Config", {}),
    ],
)
def test_architectures(architecture, config_name, options, tmp_path, prompt, driver_on, reference_greedy):
    model = random_model(config_name, **options)
    write_gguf(tmp_path / "m.gguf", model, architecture)
    assert_same_generation(tmp_path / "m.gguf", model, prompt, driver_on, reference_greedy)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16, Kind.BF16])
def test_weight_kinds(kind, tmp_path, prompt, driver_on, reference_greedy):
    model = random_model("LlamaConfig")
    write_gguf(tmp_path / "m.gguf", model, "llama", kind)
    assert_same_generation(tmp_path / "m.gguf", model, prompt, driver_on, reference_greedy)


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def test_q4_k_rows():
    """Two rows of one super-block: scale 0.5, sub-scales 1, no minima; low nibbles come before high ones."""
    scales = bytes([1] * 4 + [0] * 4 + [1] * 4)
    rows = [
        half(0.5) + half(0) + scales + bytes([0x21] * 128),
        half(2) + half(0) + scales + bytes([0x0F] * 128),
    ]
    values = read_one(b"".join(rows), (2, 256), Kind.Q4_K)
    assert values[0].view(4, 2, 32)[:, 0].unique().tolist() == [0.5]
    assert values[0].view(4, 2, 32)[:, 1].unique().tolist() == [1.0]
    assert values[1].view(4, 2, 32)[:, 0].unique().tolist() == [30.0]
    assert values[1].view(4, 2, 32)[:, 1].unique().tolist() == [0.0]


def test_q6_k_row():
    """Quants are stored plus 32; sub-scale 2, scale 0.25."""
    row = bytes([0x11] * 128) + bytes([0xAA] * 64) + bytes([2] * 16) + half(0.25)
    assert read_one(row, (1, 256), Kind.Q6_K).unique().tolist() == [0.25 * 2 * (1 + 2 * 16 - 32)]


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q5_K])
def test_other_k_quants_have_their_shape_and_zero(kind):
    _, size = gguf.GGML_QUANT_SIZES[kind]
    values = read_one(bytes(3 * size), (3, 256), kind)
    assert values.shape == (3, 256)
    assert torch.all(values == 0)


def read_one(raw: bytes, shape: tuple[int, ...], kind: Kind) -> torch.Tensor:
    """One tensor, through a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        rows = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)
        writer.add_tensor("output.weight", rows, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufWeights(open_gguf(path)).read("lm_head.weight", torch.float32)


def test_rope_factors_are_llama3_scaling(tmp_path, prompt, driver_on, reference_greedy):
    """llama.cpp's converter stores Llama 3 scaling as one divisor per frequency."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = random_model("LlamaConfig", rope_parameters=scaling)
    plain = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    assert factors.max() > 7
    write_gguf(tmp_path / "m.gguf", model, "llama", rope_freqs__weight=factors)
    assert read_config(tmp_path / "m.gguf").rope_scaling.kind is RopeKind.FACTORS
    assert_same_generation(tmp_path / "m.gguf", model, prompt, driver_on, reference_greedy)


def test_rope_factors_of_another_head_size(tmp_path):
    write_gguf(
        tmp_path / "m.gguf",
        random_model("LlamaConfig"),
        "llama",
        rope_freqs__weight=np.ones(3, np.float32),
    )
    with pytest.raises(ModelError, match="3 factors"):
        inverse_frequencies(read_config(tmp_path / "m.gguf"))


class TestRefused:
    @pytest.fixture
    def path(self, tmp_path) -> Path:
        write_gguf(tmp_path / "m.gguf", random_model("LlamaConfig"), "llama")
        return tmp_path / "m.gguf"

    def refused(self, path: Path, *parts: str) -> None:
        with pytest.raises(ModelError) as caught:
            load_model(path, "cpu", torch.float32)
        line = str(caught.value)
        assert "\n" not in line
        for part in parts:
            assert part in line

    def replace(self, path: Path, before: bytes, after: bytes) -> None:
        assert len(before) == len(after)
        content = path.read_bytes()
        assert before in content
        path.write_bytes(content.replace(before, after))

    def test_missing(self, tmp_path):
        self.refused(tmp_path / "none.gguf", "not found")

    def test_not_a_gguf(self, path):
        path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])
        self.refused(path, "not a GGUF file", "PK")

    def test_empty(self, path):
        path.write_bytes(b"")
        self.refused(path, "only 0 bytes")

    def test_version(self, path):
        path.write_bytes(path.read_bytes()[:4] + (99).to_bytes(4, "little") + path.read_bytes()[8:])
        self.refused(path, "version 99")

    def test_header_cut_off(self, path):
        path.write_bytes(path.read_bytes()[:300])
        self.refused(path, "truncated")

    def test_weights_cut_off(self, path):
        path.write_bytes(path.read_bytes()[:-5000])
        self.refused(path, "truncated", "download it again")

    def test_architecture(self, path):
        self.replace(path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba")
        self.refused(path, "'mamba' is not supported", "llama, qwen2, qwen3")

    def test_missing_metadata(self, path):
        self.replace(path, b"llama.embedding_length", b"llama.embedding_weight")
        self.refused(path, "llama.embedding_length is missing")

    def test_missing_tensor(self, path):
        self.replace(path, b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
        self.refused(path, "layers.1.mlp.up_proj.weight is missing")

    def test_several_files_in_a_folder(self, path):
        (path.parent / "other.gguf").write_bytes(path.read_bytes())
        self.refused(path.parent, "2 GGUF files", "m.gguf, other.gguf")

    def test_no_tokenizer_inside(self, path):
        with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens is missing"):
            load_tokenizer(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    write_gguf(path, random_model("LlamaConfig"), "llama", Kind.Q8_0)
    return path.read_bytes()


def loads_or_is_refused(path: Path) -> bool:
    try:
        load_model(path, "cpu", torch.float32)
    except ModelError:
        return False
    return True


@given(st.floats(0, 0.999))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused(tmp_path, small_file, share):
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file[: int(share * (len(small_file) - 32))])
    assert not loads_or_is_refused(path)


@given(st.integers(4, 2500), st.integers(0, 255))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_never_ends_in_another_error(tmp_path, small_file, at, value):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(small_file[:at] + bytes([value]) + small_file[at + 1 :])
    loads_or_is_refused(path)


SPM_PIECES = ("▁", "e", "t", "a", "o", "n", "i", "s", "h", "l", "d", "r", "w")
SPM_WORDS = ("▁t", "▁th", "▁the", "he", "▁a", "an", "▁an", "nd", "▁and", "in", "lo", "llo", "▁w", "or", "ld")


@pytest.fixture(scope="module")
def spm_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    words = [*SPM_WORDS, *SPM_PIECES]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(words))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *words])
    writer.add_token_scores(scores)
    writer.add_token_types(kinds + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    # What transformers asks for before it reads a tokenizer.
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((len(scores), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def their_spm(spm_path):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, content, _ = get_gguf_tokenizer(str(spm_path))
    return convert_gguf_tokenizer(architecture, content)[0]


class TestSentencePiece:
    """A small vocabulary with scores and byte fallback, as files of Llama 2 and Mistral carry."""

    @pytest.mark.parametrize("text", ["hello the world and an inn", "é 世 ", "  the  the", "", "the</s>and"])
    def test_as_transformers(self, spm_path, their_spm, text):
        ours = load_tokenizer(spm_path)
        assert (
            ours.encode(text, add_special_tokens=False)
            == their_spm.encode(text, add_special_tokens=False).ids
        )
        ids = ours.encode(text)
        assert ids[0] == 1
        assert ours.decode(ids) == their_spm.decode(ids, skip_special_tokens=True)

    def test_incremental_text_equals_whole_text(self, spm_path):
        tokenizer = load_tokenizer(spm_path)
        pieces = st.sampled_from([tokenizer.encode(c, False) for c in ("é世🎉", "the", "and", "hello")])

        @given(st.lists(st.one_of(pieces, st.integers(259, tokenizer.vocab_size - 1).map(lambda i: [i]))))
        @settings(max_examples=200, deadline=None)
        def check(parts):
            ids = [token_id for part in parts for token_id in part]
            detokenizer = tokenizer.detokenizer()
            given_out = [detokenizer.push(token_id) for token_id in ids]
            assert "".join(given_out) + detokenizer.flush() == tokenizer.decode(ids)

        check()

    def test_a_run_of_byte_tokens_is_handed_out_character_by_character(self, spm_path):
        tokenizer = load_tokenizer(spm_path)
        detokenizer = tokenizer.detokenizer()
        ids = [3 + byte for byte in "世界".encode()]
        assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "世", "", "", "界"]

    def test_bytes_that_never_make_a_character_are_not_held_for_ever(self, spm_path):
        detokenizer = load_tokenizer(spm_path).detokenizer()
        assert any(detokenizer.push(3 + 0x80) for _ in range(8))


@given(st.integers(24, 9000), st.integers(0, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_tokenizer_never_ends_in_another_error(tmp_path, spm_path, at, value):
    content = spm_path.read_bytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
    with contextlib.suppress(ModelError):
        load_tokenizer(path).encode("the world and an é")
