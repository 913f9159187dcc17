"""What every operator means, in plain PyTorch: the oracle of the Triton kernels and the path used on CPU.

T tokens of a step, H query heads, K KV heads, D head size, N = hidden size, I = intermediate size.
Rotary pairs lie side by side: elements 2i and 2i+1 of a head turn together (load.py orders the weights so).
The KV pool of a layer is [pages, page_tokens, 2, K, D]; slot s is token s % page_tokens of page
s // page_tokens.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from firsttoken_runtime.kernels.kv_quantization import KvPrecision, dequantize, quantize, turn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] / sqrt(mean(x^2) + eps) * weight [N]; computed in float32, returned in x's dtype."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # Twice as fast as F.rms_norm, which is a string of operators on CPU: sqrt(sum(x^2) + N eps) / sqrt(N).
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    root = torch.hypot(root, _root_of(x.shape[-1] * eps)).mul_(x.shape[-1] ** -0.5)
    return x.div(root).mul_(weight)


@lru_cache(maxsize=16)
def _root_of(value: float) -> Tensor:
    return torch.tensor(math.sqrt(value))


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add delta [T, N] to residual [T, N] in place and return the norm of the sum, [T, N]."""
    residual.add_(delta)
    return rms_norm(residual, weight, eps)


def silu_gate(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], gate first -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate_and_write(
    qkv: Tensor, rotations: Tensor, slots: Tensor, pool: Tensor, heads: int, kv_heads: int
) -> None:
    """Turn q and k in place by their positions, and write k and v to the pool.

    qkv [T, (H + 2 K) D], rows q | k | v; rotations [T, 1, D/2] complex64; slots [T] int64, -1 writes nothing;
    pool [pages, page_tokens, 2, K, D].
    """
    _rotate(qkv, rotations, heads, kv_heads, pool.shape[-1])
    write_kv(qkv[:, heads * pool.shape[-1] :], slots, pool)


def rotate_quantize_and_write(
    qkv: Tensor,
    rotations: Tensor,
    slots: Tensor,
    precision: KvPrecision,
    codes: Tensor,
    scales: Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    """Turn q and k in place by their positions, and write k and v to the pool in fewer bits.

    Arguments as of `rotate_and_write`; codes [pages, page_tokens, 2, K, D or D/2] and scales [pages,
    page_tokens, 2, K, 1 or 2] as in kv_quantization.py. Afterwards k and v of qkv are what a reader of the
    pool gets, so that attention sees the same whether a token was computed in this step or before; with int8
    and int4 they are turned by H, and so is q.
    """
    tokens = len(qkv)
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    _rotate(qkv, rotations, heads, kv_heads, head_dim)
    if precision.turned:
        qkv.copy_(turn(qkv, head_dim))
    kv = qkv[:, heads * head_dim :]
    new_codes, new_scales = quantize(kv.view(tokens, 2, kv_heads, head_dim), precision)
    # As bytes: not every code dtype can be indexed.
    write_kv(new_codes.view(torch.uint8).flatten(1), slots, codes.view(torch.uint8))
    write_kv(new_scales.flatten(1), slots, scales)
    kv.copy_(dequantize(new_codes, new_scales, qkv.dtype).flatten(1))


def _rotate(qkv: Tensor, rotations: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    tokens = len(qkv)
    pairs = qkv[:, : (heads + kv_heads) * head_dim].view(tokens, heads + kv_heads, head_dim // 2, 2)
    if qkv.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        turned = torch.view_as_complex(pairs.float()).mul_(rotations)
        pairs.copy_(torch.view_as_real(turned))


def write_kv(kv: Tensor, slots: Tensor, pool: Tensor) -> None:
    """kv [T, n], as wide as a slot of the pool (rows k | v) -> pool slots [T]; a slot of -1 is skipped."""
    rows = pool.view(pool.shape[0] * pool.shape[1], -1)
    if slots.device.type == "cpu" and bool((slots < 0).any()):
        kept = slots >= 0
        kv, slots = kv[kept], slots[kept]
    rows.index_copy_(0, slots, kv)


def paged_decode(query: Tensor, pool: Tensor, page_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attention of one query token per sequence over its pages.

    query [B, H, D]; pool [pages, page_tokens, 2, K, D]; page_table [B, most pages] int; lengths [B] int:
    tokens that the query sees, its own included. Returns [B, H, D]; a sequence of length 0 gives zeros.
    """
    out = torch.zeros_like(query)
    page_tokens, kv_heads = pool.shape[1], pool.shape[3]
    group = query.shape[1] // kv_heads
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = page_table[row, : -(-length // page_tokens)].long()
        kv = pool[pages].flatten(0, 1)[:length].float()  # [length, 2, K, D]
        keys = kv[:, 0].repeat_interleave(group, dim=1)
        values = kv[:, 1].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", query[row].float(), keys) * scale
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), values).to(query.dtype)
    return out
