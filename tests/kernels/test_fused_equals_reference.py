"""Every fused kernel gives what its PyTorch reference gives in float32."""

from __future__ import annotations

import pytest
import torch

from firsttoken_runtime.kernels import reference

# head size with grouping: every head size and every group, without all their combinations
GROUPS = [(64, 1), (64, 3), (80, 4), (128, 8)]
STORAGE = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(11)


@pytest.mark.parametrize(("dtype", "tolerance"), STORAGE)
@pytest.mark.parametrize("shape", [(1, 576), (5, 100), (2, 3, 64)])
def test_rms_norm(fused, dtype, tolerance, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(
        fused.rms_norm(x, weight, 1e-5).float(), expected, atol=tolerance, rtol=tolerance
    )


def test_rms_norm_of_a_zero_row_stays_zero(fused):
    assert torch.equal(fused.rms_norm(torch.zeros(2, 48), torch.ones(48), 1e-6), torch.zeros(2, 48))


@pytest.mark.parametrize(("dtype", "tolerance"), STORAGE)
def test_add_rms_norm_updates_the_residual(fused, dtype, tolerance):
    delta, residual, weight = (torch.randn(s).to(dtype) for s in ((7, 96), (7, 96), (96,)))
    expected_residual = delta.float() + residual.float()
    expected = reference.rms_norm(expected_residual, weight.float(), 1e-5)
    normed = fused.add_rms_norm(delta, residual, weight, 1e-5)
    torch.testing.assert_close(residual.float(), expected_residual, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(normed.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), STORAGE)
@pytest.mark.parametrize("width", [16, 100, 1536])
def test_silu_gate(fused, dtype, tolerance, width):
    gate_up = (3 * torch.randn(3, 2 * width)).to(dtype)
    expected = reference.silu_gate(gate_up.float())
    torch.testing.assert_close(fused.silu_gate(gate_up).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "group"), GROUPS)
@pytest.mark.parametrize(("dtype", "tolerance"), STORAGE[:2])
def test_rotate_and_write(fused, head_dim, group, dtype, tolerance):
    """Slots in random order; a slot of -1 leaves the pool alone."""
    kv_heads = 2 if group < 8 else 1
    heads = kv_heads * group
    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim).to(dtype)
    rotations = torch.polar(torch.ones(4, 1, head_dim // 2), 6 * torch.rand(4, 1, head_dim // 2))
    slots = torch.tensor([9, -1, 0, 14])
    pool = torch.full((5, 3, 2, kv_heads, head_dim), 0.5, dtype=dtype)
    expected_qkv, expected_pool = qkv.float(), pool.float()
    reference.rotate_and_write(expected_qkv, rotations, slots, expected_pool, heads, kv_heads)
    fused.rotate_and_write(qkv, rotations, slots, pool, heads, kv_heads)
    torch.testing.assert_close(qkv.float(), expected_qkv, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool.float(), expected_pool, atol=tolerance, rtol=tolerance)
    untouched = [slot for slot in range(15) if slot not in slots.tolist()]
    assert torch.all(pool.flatten(0, 1)[untouched] == 0.5)


@pytest.mark.parametrize(("head_dim", "group"), GROUPS)
# Not bfloat16: the interpreter multiplies its bit patterns as integers in tl.dot.
@pytest.mark.parametrize(
    ("page_tokens", "dtype", "tolerance"),
    [(16, torch.float32, 1e-5), (5, torch.float32, 1e-5), (16, torch.float16, 3e-3)],
)
def test_paged_decode(fused, head_dim, group, page_tokens, dtype, tolerance):
    """Ragged lengths over random page tables: empty, one token, page edges, longer than one tile."""
    kv_heads = 2 if group < 8 else 1
    lengths = torch.tensor([0, 1, page_tokens, page_tokens + 1, 71])
    pool, table = random_pages(lengths, page_tokens, kv_heads, head_dim)
    query, pool = torch.randn(len(lengths), kv_heads * group, head_dim).to(dtype), pool.to(dtype)
    expected = reference.paged_decode(query.float(), pool, table, lengths, head_dim**-0.5)
    result = fused.paged_decode(query, pool, table, lengths, head_dim**-0.5)
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


def test_paged_decode_spreads_a_long_context_over_all_splits(fused):
    lengths = torch.tensor([8 * 32 + 3, 8 * 32])
    pool, table = random_pages(lengths, 16, 1, 64)
    query = torch.randn(2, 3, 64)
    expected = reference.paged_decode(query, pool, table, lengths, 0.125)
    torch.testing.assert_close(
        fused.paged_decode(query, pool, table, lengths, 0.125), expected, atol=1e-5, rtol=0
    )


def test_paged_decode_takes_queries_out_of_a_wider_tensor(fused):
    """As the decoder does: query rows are the front of qkv rows."""
    lengths = torch.tensor([20, 33])
    pool, table = random_pages(lengths, 16, 1, 64)
    qkv = torch.randn(2, 5 * 64)
    query = qkv[:, : 3 * 64].view(2, 3, 64)
    expected = reference.paged_decode(query.contiguous(), pool, table, lengths, 0.125)
    torch.testing.assert_close(
        fused.paged_decode(query, pool, table, lengths, 0.125), expected, atol=1e-5, rtol=0
    )


def test_paged_decode_survives_large_scores(fused):
    """Scores of hundreds overflow exp() unless the running maximum is taken off first."""
    lengths = torch.tensor([40])
    pool, table = random_pages(lengths, 16, 1, 64)
    query = 100 * torch.randn(1, 2, 64)
    expected = reference.paged_decode(query, pool, table, lengths, 1.0)
    torch.testing.assert_close(
        fused.paged_decode(query, pool, table, lengths, 1.0), expected, atol=1e-4, rtol=1e-4
    )


def random_pages(lengths, page_tokens, kv_heads, head_dim):
    """A pool whose unused slots hold numbers that would be noticed, and page tables in random order."""
    most = max(1, -(-int(lengths.max()) // page_tokens))
    total = len(lengths) * most
    pool = torch.full((total, page_tokens, 2, kv_heads, head_dim), 1e4)
    table = torch.randperm(total).view(len(lengths), most).to(torch.int32)
    for pages, length in zip(table.tolist(), lengths.tolist(), strict=True):
        for position in range(length):
            page, offset = pages[position // page_tokens], position % page_tokens
            pool[page, offset] = torch.randn(2, kv_heads, head_dim)
    return pool, table
