"""Attention of a step over the paged KV pool, through PyTorch's scaled dot product attention.

Query heads that share a KV head lie as a group beside it, so keys and values are never repeated:

    prefill   queries [K, G, length, D]   keys [K, G (stride 0), context, D]
    decode    queries [B, K, G, D]        keys [B, K, context, D]: a group's heads stand in for query rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from firsttoken_runtime.kernels.dispatch import Kernels
from firsttoken_runtime.kernels.kv_quantization import dequantize, turn
from firsttoken_runtime.model.kv_pool import KvPool
from firsttoken_runtime.model.step import Decode, Pages, Prefill


def attend(
    segments: Sequence[Prefill | Decode], qkv: Tensor, pool: KvPool, heads: int, kernels: Kernels
) -> Tensor:
    """Attention output [T, H D] of all rows.

    qkv [T, (H + 2 K) D], rotated; pool: this step's keys and values included. Where KV is quantized the keys
    and values of qkv are as the pool has them (see kernels/reference.py).
    """
    outputs = [
        _decode(segment, qkv, pool, heads, kernels)
        if isinstance(segment, Decode)
        else _prefill(segment, qkv, pool, heads)
        for segment in segments
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return turn(out, out.shape[1] // heads) if pool.precision.turned else out


def _prefill(segment: Prefill, qkv: Tensor, pool: KvPool, heads: int) -> Tensor:
    kv_heads, head_dim = _head_shape(qkv, pool, heads)
    group, length = heads // kv_heads, segment.length
    rows = qkv[segment.first : segment.first + length]
    query = rows[:, : heads * head_dim].view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if segment.pages is None:
        kv = rows[:, heads * head_dim :].view(length, 2, kv_heads, head_dim)
    else:
        kv = _gather(segment.pages, pool, qkv.dtype).flatten(0, 1)[: segment.context]
    shape = (kv_heads, group, segment.context, head_dim)
    key = kv[:, 0].transpose(0, 1).unsqueeze(1).expand(shape)
    value = kv[:, 1].transpose(0, 1).unsqueeze(1).expand(shape)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=segment.mask, is_causal=segment.mask is None
    )
    return out.permute(2, 0, 1, 3).reshape(length, heads * head_dim)


def _decode(segment: Decode, qkv: Tensor, pool: KvPool, heads: int, kernels: Kernels) -> Tensor:
    kv_heads, head_dim = _head_shape(qkv, pool, heads)
    count = segment.sequences
    rows = qkv[segment.first : segment.first + count, : heads * head_dim]
    if segment.page_table is not None and segment.lengths is not None:
        query = rows.view(count, heads, head_dim)
        out = kernels.paged_decode(query, pool.codes, segment.page_table, segment.lengths, head_dim**-0.5)
        return out.view(count, heads * head_dim)
    kernels.count_gathered_decode()
    query = rows.view(count, kv_heads, heads // kv_heads, head_dim)
    gathered = _gather(segment.pages, pool, qkv.dtype)
    kv = gathered.view(count, -1, 2, kv_heads, head_dim)[:, : segment.context]
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    out = scaled_dot_product_attention(query, key, value, attn_mask=segment.mask)
    return out.reshape(count, heads * head_dim)


def _head_shape(qkv: Tensor, pool: KvPool, heads: int) -> tuple[int, int]:
    """K and D."""
    kv_heads = pool.codes.shape[3]
    return kv_heads, qkv.shape[1] // (heads + 2 * kv_heads)


def _gather(pages: Pages, pool: KvPool, dtype: torch.dtype) -> Tensor:
    """[pages, page_tokens, 2, K, D]: at model precision a view of a run, a copy otherwise."""
    codes = _pages_of(pool.codes, pages)
    if pool.scales is None:
        return codes
    return dequantize(codes, _pages_of(pool.scales, pages), dtype)


def _pages_of(tensor: Tensor, pages: Pages) -> Tensor:
    if pages.index is None:
        return tensor[pages.first : pages.first + pages.count]
    if tensor.dtype == torch.float8_e4m3fn:  # cannot be indexed, its bytes can
        return tensor.view(torch.uint8).index_select(0, pages.index).view(tensor.dtype)
    return tensor.index_select(0, pages.index)
