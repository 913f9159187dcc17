"""int8 weights: exact where they must be, close to float32 where they can only be close."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.model.prompts import COUNT
from tests.runtime.model.test_architectures import CASES, random_model

from firsttoken_runtime.measure.weight_quality import compare, every_logit
from firsttoken_runtime.model import int8, load
from firsttoken_runtime.model.int8 import Int8Linear, int8_obstacle, quantize_channels
from firsttoken_runtime.model.linear import Linear
from firsttoken_runtime.model.load import load_model
from firsttoken_runtime.model.rotation import rotation

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def int8_decoder(smollm2: Path):
    return load_model(smollm2, "cpu", torch.float32, int8=True)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_product_is_near_that_in_float32(rows, biased, mixed):
    torch.manual_seed(rows)
    weight, x = torch.randn(96, 80), torch.randn(rows, 80)
    bias = torch.randn(96) if biased else None
    expected = torch.nn.functional.linear(x, weight, bias)
    found = Int8Linear(weight, bias, mixed)(x)
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < 0.012


def test_a_row_is_the_same_to_the_last_bit_in_every_batch():
    torch.manual_seed(1)
    linear, x = Int8Linear(torch.randn(120, 576)), torch.randn(64, 576) * torch.logspace(-3, 3, 64)[:, None]
    together = linear(x)
    assert all(torch.equal(linear(x[i : i + 1]), together[i : i + 1]) for i in range(64))
    assert torch.equal(linear(x[5:22]), together[5:22])


def test_rows_of_any_size_keep_their_precision():
    """One scale for all rows would leave the small ones nothing."""
    torch.manual_seed(2)
    weight = torch.randn(64, 128)
    x = torch.randn(2, 128) * torch.tensor([[1e-3], [1e3]])
    expected = x @ weight.T
    error = (Int8Linear(weight)(x) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.012


def test_zeros_give_the_bias_and_what_is_no_number_stays_none():
    bias = torch.randn(16)
    linear = Int8Linear(torch.randn(16, 32), bias)
    x = torch.randn(3, 32)
    x[0], x[1, 5], x[2, 7] = 0.0, float("nan"), float("inf")
    zero, nan, infinite = linear(x)
    assert torch.equal(zero, bias)
    assert nan.isnan().all()
    assert not infinite.isfinite().any()


def test_a_channel_of_zeros():
    weight = torch.randn(16, 32)
    weight[3] = 0.0
    codes, scales = quantize_channels(weight)
    assert codes[3].eq(0).all()
    assert (codes * scales[:, None] - weight).abs().max() <= scales.max() / 2 + 1e-6


def test_seven_bits_for_cpus_without_vnni(monkeypatch):
    monkeypatch.setattr(int8, "_probe", lambda: int8._SEVEN_BITS)
    torch.manual_seed(3)
    weight, x = torch.randn(96, 64), torch.randn(8, 64)
    expected = x @ weight.T
    assert 0 < (Int8Linear(weight)(x) - expected).norm() / expected.norm() < 0.02


def test_why_not(monkeypatch):
    assert int8_obstacle(CPU, torch.float32) is None
    assert int8_obstacle(torch.device("cuda"), torch.bfloat16) == (
        "int8 weights are for CPU in this build, not cuda"
    )
    assert int8_obstacle(CPU, torch.bfloat16) == "int8 weights compute in float32, not bfloat16"

    def missing() -> None:
        raise RuntimeError("not among its quantized engines")

    monkeypatch.setattr(int8, "_probe", missing)
    assert "no FBGEMM" in str(int8_obstacle(CPU, torch.float32))


@pytest.mark.parametrize("size", [1, 2, 8, 9, 36, 64, 112, 576, 1024])
def test_a_rotation_is_orthogonal_and_spreads_every_channel(size):
    turned = rotation(size)
    matrix = turned.rows(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned.columns(torch.eye(size)), matrix.T)
    assert matrix.abs().max() < 2.1 / size**0.5


@pytest.mark.parametrize("case", ["llama", "llama tied", "llama MQA", "llama biases", "qwen2", "qwen3"])
def test_a_rotated_model_says_the_same(case, tmp_path: Path, driver_on, monkeypatch):
    """Rotation alone, without quantization: nothing but rounding changes."""
    random_model(CASES[case][0], CASES[case][1]).save_pretrained(tmp_path)
    prompt = list(range(7, 60))
    plain = load_model(tmp_path, "cpu", torch.float32)
    monkeypatch.setattr(load, "Int8Linear", lambda weight, bias, mix_inputs: Linear(weight, bias))
    rotated = load_model(tmp_path, "cpu", torch.float32, int8=True)
    assert not torch.allclose(plain.embedding, rotated.embedding, atol=1e-2)
    expected, found = (
        torch.stack(driver.finish(driver.sequence(prompt, COUNT), COUNT).logits)
        for driver in (driver_on(model, total_pages=16) for model in (plain, rotated))
    )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "llama biases", "qwen3"])
def test_from_safetensors(case, tmp_path: Path, driver_on):
    random_model(CASES[case][0], CASES[case][1]).save_pretrained(tmp_path)
    prompt = list(range(7, 60))
    expected, found = (
        driver.finish(driver.sequence(prompt, 1), 1).logits[0]
        for driver in (
            driver_on(load_model(tmp_path, "cpu", torch.float32, int8=flag), total_pages=16)
            for flag in (False, True)
        )
    )
    assert not torch.equal(found, expected)
    assert (found - expected).norm() / expected.norm() < 0.05


def test_near_float32_on_real_prompts(int8_decoder, decoder, driver_on, prompts):
    """Every token of every prompt of up to 129 tokens: the likeliest next one, and the whole distribution."""
    chosen = [prompt for prompt in prompts if 15 <= len(prompt) <= 129]
    logits = [every_logit(driver_on(model).runner, chosen) for model in (decoder, int8_decoder)]
    figures = compare(*logits, torch.tensor([token for prompt in chosen for token in prompt[1:]]))
    assert figures["tokens"] == sum(map(len, chosen)) - len(chosen)
    assert figures["same_likeliest_token"] > 0.9
    assert 0 < figures["divergence_mean"] < 0.03
    assert figures["perplexity_int8"] / figures["perplexity_float32"] < 1.05


def test_cutting_the_work_otherwise_moves_only_what_was_a_close_call(int8_decoder, driver_on, prompts):
    """Whole, in chunks, beside others, and on a cached prefix.

    A linear layer gives a row the same in every batch, but attention and norms round differently in the last
    bit, and that can move an activation to the next code. So logits are only near, well within what int8
    itself changes; where a token differs, both were about as likely.
    """
    driver = driver_on(int8_decoder, total_pages=512)
    chosen = [prompt for prompt in prompts if 7 <= len(prompt) <= 255]
    whole = [driver.finish(driver.sequence(prompt, COUNT), COUNT) for prompt in chosen]
    for number, (prompt, reference) in enumerate(zip(chosen, whole, strict=True)):
        cut = driver.finish(driver.sequence(prompt, COUNT), COUNT, chunk=len(prompt) // 3 + number)
        assert_close_call(cut, reference)
    together = [driver.sequence(prompt, COUNT) for prompt in chosen]
    while unfinished := [sequence for sequence in together if len(sequence.tokens) < COUNT]:
        driver.step([(sequence, 200) for sequence in unfinished])
    for sequence, reference in zip(together, whole, strict=True):
        assert_close_call(sequence, reference)
    again = driver.sequence(chosen[-1], COUNT, shared=whole[-1].pages[:12], computed=12 * 16)
    assert_close_call(driver.finish(again, COUNT), whole[-1])


def assert_close_call(found, expected) -> None:
    for place in range(COUNT):
        row, other = expected.logits[place], found.logits[place]
        expected_log, found_log = row.log_softmax(-1), other.log_softmax(-1)
        assert (expected_log.exp() * (expected_log - found_log)).sum() < 0.1
        taken = found.tokens[place]
        assert row.max() - row[taken] < 1.0
        if taken != expected.tokens[place]:
            break  # from here on they read different tokens
