"""Tiny random models of every supported architecture, saved by transformers, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firsttoken_runtime.model.config import ModelError, RopeKind, read_config
from firsttoken_runtime.model.load import load_model

COUNT = 6
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES = {
    "llama": ("LlamaConfig", {}),
    "llama one head size of its own": ("LlamaConfig", {"head_dim": 32}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama MQA": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama MHA": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama rope llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama rope linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
    "llama rope yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama rope yarn own factor": (
        "LlamaConfig",
        {"rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3}},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 windows on upper layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral window": ("MistralConfig", {"sliding_window": 24}),
}


def random_model(config_name: str, options: dict):
    """A transformers model with random weights; norms and biases too, where the default is 1 or 0."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, config_name)(**{**SIZES, "tie_word_embeddings": False, **options})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.dim() == 1 else 0.08
        parameter.data.normal_(1.0 if "norm" in name else 0.0, spread)
    return model


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (90,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, tmp_path: Path, driver_on, reference_greedy, prompt):
    name, options = CASES[case]
    theirs = random_model(name, options)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "cpu", torch.float32)
    reference = reference_greedy(theirs, prompt, COUNT)
    driver = driver_on(ours, total_pages=64, page_tokens=8)
    whole, cut, short = (driver.sequence(prompt, COUNT) for _ in range(3))
    driver.finish(whole, COUNT)
    driver.finish(cut, COUNT, chunk=13)
    # Decoding beside another sequence of another length, through one padded group.
    short.prompt = prompt[:20]
    driver.finish(short, 1)
    beside = driver.sequence(prompt, COUNT)
    driver.finish(beside, 1)
    while len(beside.tokens) < COUNT:
        driver.step([(short, 1), (beside, 1)])
    for sequence in (whole, cut, beside):
        assert sequence.tokens == reference.tokens
        torch.testing.assert_close(torch.stack(sequence.logits), reference.logits, atol=1e-3, rtol=1e-4)


def test_windows_are_read_per_layer(tmp_path: Path):
    random_model(*CASES["qwen2 windows on upper layers"]).save_pretrained(tmp_path)
    assert read_config(tmp_path).layer_windows == (None, 24, 24)


def test_sharded_safetensors(tmp_path: Path, driver_on, reference_greedy, prompt):
    theirs = random_model("LlamaConfig", {})
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    reference = reference_greedy(theirs, prompt, COUNT)
    driver = driver_on(load_model(tmp_path, "cpu", torch.float32), total_pages=16)
    assert driver.finish(driver.sequence(prompt, COUNT), COUNT).tokens == reference.tokens


def test_rope_scaling_as_older_checkpoints_write_it(tmp_path: Path):
    """Before `rope_parameters` there were `rope_theta` and `rope_scaling` with `type`."""
    content = {
        **SIZES,
        "model_type": "llama",
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling.kind) == (5000.0, RopeKind.LINEAR)
    assert config.rope_scaling.factor == 2.0


def test_weights_of_16_bits_are_computed_in_32(tmp_path: Path, driver_on, reference_greedy, prompt):
    theirs = random_model("LlamaConfig", {}).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    reference = reference_greedy(theirs.float(), prompt, COUNT)
    driver = driver_on(load_model(tmp_path, "cpu", torch.float32), total_pages=16)
    assert driver.finish(driver.sequence(prompt, COUNT), COUNT).tokens == reference.tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "llama rope yarn", "qwen3", "mistral window"])
def test_16_bit_arithmetic_on_cpu_stays_close(case, dtype, tmp_path, driver_on, prompt):
    """Whole, in chunks, and beside another sequence: every path that makes masks and rotations."""
    name, options = CASES[case]
    random_model(name, options).save_pretrained(tmp_path)
    exact = driver_on(load_model(tmp_path, "cpu", torch.float32), total_pages=16)
    exact_logits = exact.finish(exact.sequence(prompt, 1), 1).logits[0]
    model = load_model(tmp_path, "cpu", dtype)
    assert {model.dtype, model.layers[0].qkv.weight.dtype, model.norm.dtype} == {dtype}
    driver = driver_on(model, total_pages=32)
    whole, cut, short = (driver.sequence(prompt, 3) for _ in range(3))
    short.prompt = prompt[:11]
    driver.step([(whole, 1 << 30), (cut, 40), (short, 10)])
    driver.step([(whole, 1), (cut, 49), (short, 1)])
    driver.step([(whole, 1), (cut, 1), (short, 1)])
    spread = exact_logits.std()
    for sequence in (whole, cut):
        assert (sequence.logits[0] - exact_logits).abs().max() < 0.1 * spread


def test_weights_are_copied_out_of_the_file(tmp_path):
    """safetensors maps the file: a file changed in place must not change the model, nor the first prompt wait
    for the disk."""
    random_model("LlamaConfig", {}).save_pretrained(tmp_path)
    model = load_model(tmp_path, "cpu", torch.float32)
    before = model.embedding.clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(bytes(file.stat().st_size // 2))
        stream.seek(4096)
        stream.write(bytes(file.stat().st_size // 2 - 4096))
    assert torch.equal(model.embedding, before)


def test_a_folder_of_the_hugging_face_cache(tmp_path, driver_on, reference_greedy, prompt):
    """There, every file is a link with the name to a blob with a hash."""
    theirs = random_model("LlamaConfig", {})
    theirs.save_pretrained(tmp_path / "saved")
    snapshot = tmp_path / "models--who--what" / "snapshots" / "abc123"
    blobs = tmp_path / "models--who--what" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate((tmp_path / "saved").iterdir()):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    reference = reference_greedy(theirs, prompt, COUNT)
    driver = driver_on(load_model(snapshot, "cpu", torch.float32), total_pages=16)
    assert driver.finish(driver.sequence(prompt, COUNT), COUNT).tokens == reference.tokens

    with pytest.raises(ModelError, match=r"top of a Hugging Face cache; give .*snapshots/abc123$"):
        load_model(tmp_path / "models--who--what", "cpu", torch.float32)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: a link to a file that is not there"):
        load_model(snapshot, "cpu", torch.float32)
    (snapshot / "config.json").resolve().unlink()
    with pytest.raises(ModelError, match=r"config\.json is a link to a file that is not there"):
        load_model(snapshot, "cpu", torch.float32)


class TestRefused:
    """A folder that cannot be used ends in one line that says what would be right."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        random_model("LlamaConfig", {}).save_pretrained(tmp_path)
        return tmp_path

    def refused(self, folder: Path, *parts: str) -> None:
        with pytest.raises(ModelError) as caught:
            load_model(folder, "cpu", torch.float32)
        line = str(caught.value)
        assert "\n" not in line
        for part in parts:
            assert part in line

    def edit_config(self, folder: Path, **changes) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    def edit_weights(self, folder: Path, change) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def test_nothing_there(self, tmp_path: Path):
        self.refused(tmp_path / "absent", "not found", "GGUF file or a Hugging Face model folder")

    def test_empty_folder(self, tmp_path: Path):
        self.refused(tmp_path, "neither config.json nor a .gguf file")

    def test_broken_json(self, folder: Path):
        (folder / "config.json").write_text("{")
        self.refused(folder, "config.json", "not valid JSON")

    def test_unknown_architecture(self, folder: Path):
        self.edit_config(folder, model_type="mamba")
        self.refused(folder, "'mamba' is not supported", "llama, mistral, qwen2, qwen3")

    def test_missing_field(self, folder: Path):
        file = folder / "config.json"
        content = json.loads(file.read_text())
        del content["intermediate_size"]
        file.write_text(json.dumps(content))
        self.refused(folder, "intermediate_size is missing")

    def test_field_of_wrong_type(self, folder: Path):
        self.edit_config(folder, hidden_size="many")
        self.refused(folder, "wrong type")

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_unknown_rope_scaling(self, folder: Path, kind: str):
        self.edit_config(folder, rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 1e4})
        self.refused(folder, f"{kind!r} is not supported", "default, linear, llama3, yarn")

    def test_other_activation(self, folder: Path):
        self.edit_config(folder, hidden_act="gelu")
        self.refused(folder, "'gelu'", "silu")

    def test_quantized_checkpoint(self, folder: Path):
        self.edit_config(folder, quantization_config={"quant_method": "gptq"})
        self.refused(folder, "gptq", "GGUF")

    def test_heads_that_do_not_divide(self, folder: Path):
        self.edit_config(folder, num_key_value_heads=3)
        self.refused(folder, "4 query heads", "3 KV heads")

    def test_pickled_weights(self, folder: Path):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
        self.refused(folder, "pytorch_model.bin", "run code", "safetensors")

    def test_no_weights(self, folder: Path):
        (folder / "model.safetensors").unlink()
        self.refused(folder, "no weights", "model.safetensors")

    def test_truncated_weights(self, folder: Path):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        self.refused(folder, "model.safetensors", "not a whole safetensors file", "download")

    def test_missing_shard(self, folder: Path):
        (folder / "model.safetensors").unlink()
        random_model("LlamaConfig", {}).save_pretrained(folder, max_shard_size="60KB")
        sorted(folder.glob("model-*.safetensors"))[1].unlink()
        self.refused(folder, "model-00002-of", "not found", "index")

    def test_shard_outside_the_folder(self, folder: Path):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}})
        )
        self.refused(folder, "same folder")

    def test_missing_tensor(self, folder: Path):
        self.edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        self.refused(folder, "tensor layers.1.mlp.up_proj.weight is missing")

    def test_wrong_shape(self, folder: Path):
        self.edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
        self.refused(folder, "norm.weight has shape [63]", "[64]")

    def test_integer_weights(self, folder: Path):
        self.edit_weights(
            folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
        )
        self.refused(folder, "torch.int8", "only float weights")

    def test_tensor_of_another_architecture(self, folder: Path):
        """A norm that this architecture does not have would be left out silently, and answers be wrong."""
        self.edit_weights(
            folder,
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
        )
        self.refused(folder, "layers.0.self_attn.q_norm.weight", "another architecture")

    def test_a_weight_file_instead_of_the_folder(self, folder: Path):
        self.refused(folder / "model.safetensors", "give the folder")

    def test_a_pickle_file(self, tmp_path: Path):
        (tmp_path / "model.bin").write_bytes(b"\x80")
        self.refused(tmp_path / "model.bin", "run code")
