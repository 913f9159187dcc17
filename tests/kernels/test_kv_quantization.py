"""Quantized KV: how far what is read is from what was written, and that the layout is the documented one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken_runtime.kernels import reference
from firsttoken_runtime.kernels.kv_quantization import (
    CODE_DTYPES,
    KvPrecision,
    codes_per_head,
    dequantize,
    hadamard,
    quantize,
    scales_per_head,
    turn,
)

QUANTIZED = (KvPrecision.FP8, KvPrecision.INT8, KvPrecision.INT4)
_BFLOAT16 = 2**-8  # largest relative error of rounding to it

heads = st.builds(
    lambda seed, width, size, outlier: _head(seed, width, size, outlier),
    st.integers(0, 1000),
    st.sampled_from([2, 16, 64, 80, 128]),
    st.sampled_from([1e-35, 1e-6, 1.0, 300.0, 1e30]),
    st.sampled_from([1.0, 50.0]),
)


def _head(seed: int, width: int, size: float, outlier: float) -> torch.Tensor:
    """Three heads; one channel is `outlier` times as large as the others."""
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * size
    x[:, seed % width] *= outlier
    return x


def read_back(x: torch.Tensor, precision: KvPrecision) -> torch.Tensor:
    return dequantize(*quantize(x, precision), torch.float32)


@given(x=heads)
@settings(max_examples=60, deadline=None)
def test_int8_is_within_half_a_step_of_the_largest_element(x: torch.Tensor) -> None:
    step = x.abs().amax(-1, keepdim=True) / 127 * (1 + _BFLOAT16)
    assert torch.all((read_back(x, KvPrecision.INT8) - x).abs() <= 0.501 * step + 1e-30)


@given(x=heads)
@settings(max_examples=60, deadline=None)
def test_fp8_is_within_a_sixteenth_of_every_element(x: torch.Tensor) -> None:
    least = x.abs().amax(-1, keepdim=True) / 448 * 2**-9  # below the smallest codes it is a fixed step
    assert torch.all((read_back(x, KvPrecision.FP8) - x).abs() <= x.abs() / 16 * 1.001 + least + 1e-30)


@given(x=heads)
@settings(max_examples=60, deadline=None)
def test_int4_is_within_half_a_step_of_the_range_of_a_head(x: torch.Tensor) -> None:
    least, largest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    offset = least.abs() * _BFLOAT16
    step = (largest - least + offset) / 15 * (1 + _BFLOAT16)
    assert torch.all((read_back(x, KvPrecision.INT4) - x).abs() <= 0.51 * step + offset + 1e-30)


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-38, 3e38])
def test_constant_heads(precision: KvPrecision, value: float) -> None:
    x = torch.full((2, 16), value)
    torch.testing.assert_close(read_back(x, precision), x, rtol=_BFLOAT16, atol=1e-30)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_shapes_and_dtypes_are_the_documented_ones(precision: KvPrecision) -> None:
    codes, scales = quantize(torch.randn(5, 2, 3, 64, dtype=torch.bfloat16), precision)
    assert codes.dtype is CODE_DTYPES[precision]
    assert codes.shape == (5, 2, 3, codes_per_head(precision, 64))
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (5, 2, 3, scales_per_head(precision)))
    assert dequantize(codes, scales, torch.float16).dtype is torch.float16


def test_int4_packs_both_halves_of_a_head_into_the_same_bytes() -> None:
    x = torch.arange(16.0)  # the range of the codes: step 1, least 0
    codes, scales = quantize(x, KvPrecision.INT4)
    assert codes.tolist() == [low | (low + 8) << 4 for low in range(8)]
    assert scales.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 96, 128])
def test_turning_twice_is_nothing_and_keeps_scores(head_dim: int) -> None:
    query, key = torch.randn(7, 3 * head_dim), torch.randn(7, 3 * head_dim)
    torch.testing.assert_close(turn(turn(key, head_dim), head_dim), key, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        (turn(query, head_dim) * turn(key, head_dim)).sum(-1), (query * key).sum(-1), atol=1e-4, rtol=1e-5
    )


def test_a_head_size_that_is_no_power_of_two_turns_in_blocks() -> None:
    assert hadamard(80, torch.device("cpu"), torch.float32).shape == (16, 16)
    assert hadamard(96, torch.device("cpu"), torch.float32).shape == (32, 32)


def test_turning_is_what_makes_four_bits_enough_beside_a_large_channel() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(3))
    x[:, 5] *= 30
    turned = turn(read_back(turn(x, 64), KvPrecision.INT4), 64)
    plain = read_back(x, KvPrecision.INT4)
    assert (turned - x).square().mean() < 0.6 * (plain - x).square().mean()


def pool(precision: KvPrecision, head_dim: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (5, 4, 2, kv_heads)
    codes = torch.zeros(*shape, codes_per_head(precision, head_dim), dtype=CODE_DTYPES[precision])
    return codes, torch.zeros(*shape, scales_per_head(precision), dtype=torch.bfloat16)


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_leaves_in_the_rows_what_a_reader_of_the_pool_gets(
    precision: KvPrecision, dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim = 4, 2, 16
    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim).to(dtype)
    plain = qkv.clone()
    rotations = torch.polar(torch.ones(4, 1, head_dim // 2), 6 * torch.rand(4, 1, head_dim // 2))
    slots = torch.tensor([9, -1, 0, 14])
    codes, scales = pool(precision, head_dim, kv_heads)
    before = codes.clone(), scales.clone()
    reference.rotate_quantize_and_write(qkv, rotations, slots, precision, codes, scales, heads, kv_heads)

    written = [0, 2, 3]
    stored = dequantize(codes, scales, dtype).flatten(0, 1)[slots[written]]
    assert torch.equal(stored.flatten(1), qkv[written, heads * head_dim :])
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    for now, then in zip((codes, scales), before, strict=True):
        assert torch.equal(
            now.view(torch.uint8).flatten(0, 1)[others], then.view(torch.uint8).flatten(0, 1)[others]
        )

    unused = torch.zeros(5, 4, 2, kv_heads, head_dim, dtype=dtype)
    reference.rotate_and_write(plain, rotations, slots, unused, heads, kv_heads)
    expected = turn(plain, head_dim) if precision.turned else plain
    kept = heads * head_dim
    torch.testing.assert_close(qkv[:, :kept], expected[:, :kept], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("precision", "bound"), [(KvPrecision.FP8, 0.06), (KvPrecision.INT8, 0.02), (KvPrecision.INT4, 0.3)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_output_of_attention_is_near_that_of_unquantized_kv(
    precision: KvPrecision, bound: float, head_dim: int
) -> None:
    """Relative to the size of the output, over 300 tokens with a large channel among the keys."""
    generator = torch.Generator().manual_seed(7)
    keys, values = (torch.randn(300, head_dim, generator=generator) for _ in range(2))
    keys[:, 3] *= 8
    queries = torch.randn(20, head_dim, generator=generator) * head_dim**-0.5
    exact = (queries @ keys.T).softmax(-1) @ values
    if precision.turned:
        stored = [read_back(turn(x, head_dim), precision) for x in (keys, values)]
        got = turn((turn(queries, head_dim) @ stored[0].T).softmax(-1) @ stored[1], head_dim)
    else:
        stored = [read_back(x, precision) for x in (keys, values)]
        got = (queries @ stored[0].T).softmax(-1) @ stored[1]
    error = float((got - exact).norm() / exact.norm())
    assert error < bound
