"""Fused Triton kernels; same names, arguments and results as in reference.py.

Arithmetic in float32 whatever the storage. No autotuning: a launch on a live request must never compile more
than once per shape class, so sizes are powers of two taken from the model and the page size alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    """One row per program: out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    normed = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> [..., N]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(x.numel() // width,)](x, weight, out, width, eps, BLOCK=block)
    return out


@triton.jit
def _add_rms_norm_kernel(delta, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    """One row per program: residual[row] += delta[row]; out[row] = norm(residual[row]) * weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    spot = row * width + at
    added = tl.load(delta + spot, mask=inside, other=0.0).to(tl.float32)
    summed = added + tl.load(residual + spot, mask=inside, other=0.0).to(tl.float32)
    stored = summed.to(residual.dtype.element_ty)
    tl.store(residual + spot, stored, mask=inside)
    # The norm is of what later layers will read, that is of the rounded sum.
    values = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    normed = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + spot, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """delta [T, N] is added to residual [T, N] in place; returns the norm of the sum [T, N]."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    if rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(rows,)](delta, residual, weight, out, width, eps, BLOCK=block)
    return out


@triton.jit
def _silu_gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Programs (row, block of columns): out = silu(gate) * up; gate_up rows are gate | up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=inside)


def silu_gate(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], contiguous -> [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _silu_gate_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    rotations,
    slots,
    pool,
    row_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Programs (token, head of q | k | v). q and k turn in place; k and v go to the token's slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    inside = pair < HEAD_DIM // 2
    spot = qkv + token * row_stride + head * HEAD_DIM + 2 * pair
    even = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(spot + 1, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        angle = rotations + token * HEAD_DIM + 2 * pair
        cosine = tl.load(angle, mask=inside, other=0.0)
        sine = tl.load(angle + 1, mask=inside, other=0.0)
        turned = even * cosine - odd * sine
        odd = even * sine + odd * cosine
        even = turned
        tl.store(spot, even.to(qkv.dtype.element_ty), mask=inside)
        tl.store(spot + 1, odd.to(qkv.dtype.element_ty), mask=inside)
    if head >= HEADS:
        slot = tl.load(slots + token)
        if slot >= 0:
            target = pool + (slot * 2 * KV_HEADS + head - HEADS) * HEAD_DIM + 2 * pair
            tl.store(target, even.to(pool.dtype.element_ty), mask=inside)
            tl.store(target + 1, odd.to(pool.dtype.element_ty), mask=inside)


def rotate_and_write(
    qkv: Tensor, rotations: Tensor, slots: Tensor, pool: Tensor, heads: int, kv_heads: int
) -> None:
    """qkv [T, (H + 2 K) D]; rotations [T, 1, D/2] complex64; slots [T] int64, -1 skips;
    pool [pages, page_tokens, 2, K, D], contiguous."""
    tokens, head_dim = qkv.shape[0], pool.shape[-1]
    if tokens:
        _rotate_and_write_kernel[(tokens, heads + 2 * kv_heads)](
            qkv,
            torch.view_as_real(rotations.contiguous()),
            slots,
            pool,
            qkv.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAIRS=triton.next_power_of_2(head_dim // 2),
        )


@triton.jit
def _paged_decode_kernel(
    query,
    pool,
    page_table,
    lengths,
    partial,
    partial_max,
    partial_sum,
    query_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs (sequence, KV head, split): one share of a context for all query heads of a group.

    Writes the unnormalised weighted values, the running maximum and the sum of a share; the next kernel
    merges shares (FlashDecoding). SPLITS is fixed, so that the grid does not depend on lengths.
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths + sequence)
    # Shares are whole tiles, so that no tile is read twice.
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)

    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    head = kv_head * group + row
    row_in, column_in = row < group, column < HEAD_DIM
    q = tl.load(
        query + sequence * query_stride + head[:, None] * HEAD_DIM + column[None, :],
        mask=row_in[:, None] & column_in[None, :],
        other=0.0,
    )
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    token_stride: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        page = tl.load(page_table + sequence * table_stride + position // PAGE_TOKENS, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
        spot = pool + slot[:, None] * token_stride + kv_head * HEAD_DIM + column[None, :]
        both_in = seen[:, None] & column_in[None, :]
        keys = tl.load(spot, mask=both_in, other=0.0)
        values = tl.load(spot + KV_HEADS * HEAD_DIM, mask=both_in, other=0.0)
        # "ieee": float32 storage is multiplied as float32, not as TF32; 16 bit storage on tensor cores.
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_best[:, None])
        kept = tl.exp(best - new_best)
        total = total * kept + tl.sum(weights, axis=1)
        shares = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        mixed = mixed * kept[:, None] + shares
        best = new_best

    place = (sequence * HEADS + head) * SPLITS + split
    tl.store(partial_max + place, best, mask=row_in)
    tl.store(partial_sum + place, total, mask=row_in)
    tl.store(
        partial + place[:, None] * HEAD_DIM + column[None, :],
        mixed,
        mask=row_in[:, None] & column_in[None, :],
    )


@triton.jit
def _merge_splits_kernel(
    partial,
    partial_max,
    partial_sum,
    out,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One (sequence, query head) per program: merge the shares of a context; nothing seen gives zeros."""
    place = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    column_in = column < HEAD_DIM
    best = tl.load(partial_max + place * SPLITS + split)
    total = tl.load(partial_sum + place * SPLITS + split)
    highest = tl.max(best, axis=0)
    # A share of nothing has maximum -inf; -inf - -inf must not come up even where it is thrown away.
    weight = tl.where(
        total > 0,
        tl.exp(tl.where(total > 0, best, 0.0) - tl.where(highest > float("-inf"), highest, 0.0)),
        0.0,
    )
    shares = tl.load(
        partial + (place * SPLITS + split)[:, None] * HEAD_DIM + column[None, :],
        mask=column_in[None, :],
        other=0.0,
    )
    whole = tl.sum(weight * total, axis=0)
    mixed = tl.sum(weight[:, None] * shares, axis=0)
    result = tl.where(whole > 0, mixed / tl.where(whole > 0, whole, 1.0), 0.0)
    tl.store(out + place * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column_in)


# Shares of a context in decode attention: enough programs for a GPU even at batch 1, few enough to merge.
_SPLITS, _TILE = 8, 32


def paged_decode(query: Tensor, pool: Tensor, page_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """query [B, H, D], heads contiguous; pool [pages, page_tokens, 2, K, D]; page_table [B, most pages];
    lengths [B] -> [B, H, D]; a sequence of length 0 gives zeros."""
    batch, heads, head_dim = query.shape
    page_tokens, kv_heads = pool.shape[1], pool.shape[3]
    out = torch.empty((batch, heads, head_dim), dtype=query.dtype, device=query.device)
    if batch == 0:
        return out
    partial = torch.empty((batch, heads, _SPLITS, head_dim), dtype=torch.float32, device=query.device)
    partial_max = torch.empty((batch, heads, _SPLITS), dtype=torch.float32, device=query.device)
    partial_sum = torch.empty_like(partial_max)
    columns = triton.next_power_of_2(head_dim)
    _paged_decode_kernel[(batch, kv_heads, _SPLITS)](
        query,
        pool,
        page_table,
        lengths,
        partial,
        partial_max,
        partial_sum,
        query.stride(0),
        page_table.stride(0),
        scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        SPLITS=_SPLITS,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),  # the least that tl.dot takes
        TILE=_TILE,
        COLUMNS=columns,
    )
    _merge_splits_kernel[(batch * heads,)](
        partial, partial_max, partial_sum, out, HEAD_DIM=head_dim, SPLITS=_SPLITS, COLUMNS=columns
    )
    return out
