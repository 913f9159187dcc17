"""The memory of the KV pool: one raw buffer, and how it is laid out for a precision per layer.

    buffer   | layer 0: codes | layer 0: scales | layer 1: codes | layer 1: scales | …   all 64-byte aligned

Another precision lays other views over the same bytes: nothing is allocated, and lower precision makes more
pages. Codes and scales: kernels/kv_quantization.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken_runtime.kernels.kv_quantization import (
    CODE_DTYPES,
    SCALE_DTYPE,
    KvPrecision,
    codes_per_head,
    scales_per_head,
)

__all__ = ["KvBudget", "KvPool", "KvPrecision", "KvShape", "KvTable", "describe"]

# Precision of each layer's KV, first layer first.
KvTable = tuple[KvPrecision, ...]
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class KvPool:
    """KV of one layer.

    codes [pages, page_tokens, 2, K, D, or D/2 for int4]; at model precision the keys and values themselves.
    scales [pages, page_tokens, 2, K, 1, or 2 for int4]; None at model precision.
    """

    precision: KvPrecision
    codes: Tensor
    scales: Tensor | None

    def zero(self, pages: int) -> None:
        """Fill the first `pages` pages with zero bytes."""
        self.codes[:pages].view(torch.uint8).zero_()
        if self.scales is not None:
            self.scales[:pages].zero_()


@dataclass(frozen=True)
class KvShape:
    """What KV of a model looks like. dtype: the model's, of KV that is not quantized."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_tokens: int

    def uniform(self, precision: KvPrecision) -> KvTable:
        return (precision,) * self.layers

    def token_bytes(self, table: KvTable) -> int:
        """Bytes that one token takes over all layers."""
        return 2 * self.kv_heads * sum(sum(self._head_bytes(precision)) for precision in table)

    def page_bytes(self, table: KvTable) -> int:
        """Bytes that one page takes over all layers."""
        return self.page_tokens * self.token_bytes(table)

    def pool(self, precision: KvPrecision, pages: int, buffer: Tensor, offset: int) -> tuple[KvPool, int]:
        """A layer's pool in `buffer` (uint8) from byte `offset` on, and where the next one may begin."""
        codes_bytes, scales_bytes = self._head_bytes(precision)
        heads = (pages, self.page_tokens, 2, self.kv_heads)

        def view(head_bytes: int, dtype: torch.dtype, begin: int) -> tuple[Tensor, int]:
            end = begin + math.prod(heads) * head_bytes
            tensor = buffer[begin:end].view(dtype).view(*heads, head_bytes // dtype.itemsize)
            return tensor, -(-end // _ALIGNMENT) * _ALIGNMENT

        codes, end = view(codes_bytes, CODE_DTYPES.get(precision, self.dtype), offset)
        if not scales_bytes:
            return KvPool(precision, codes, None), end
        scales, end = view(scales_bytes, SCALE_DTYPE, end)
        return KvPool(precision, codes, scales), end

    def _head_bytes(self, precision: KvPrecision) -> tuple[int, int]:
        """Bytes of codes and of scales of one head's key or value."""
        codes = codes_per_head(precision, self.head_dim)
        dtype = CODE_DTYPES.get(precision, self.dtype)
        return codes * dtype.itemsize, scales_per_head(precision) * SCALE_DTYPE.itemsize


@dataclass(frozen=True)
class KvBudget:
    """The memory of the pool. pages: at the model's precision."""

    shape: KvShape
    pages: int

    @property
    def model_table(self) -> KvTable:
        return self.shape.uniform(KvPrecision.MODEL)

    @property
    def bytes(self) -> int:
        """What pages share out; the buffer has a little more, for alignment."""
        return self.pages * self.shape.page_bytes(self.model_table)

    def pages_at(self, table: KvTable) -> int:
        """Pages that the pool has with these precisions."""
        return self.bytes // self.shape.page_bytes(table)

    def allocate(self, device: torch.device) -> Tensor:
        """The buffer: zeros, uint8."""
        return torch.zeros(self.bytes + 2 * self.shape.layers * _ALIGNMENT, dtype=torch.uint8, device=device)

    def lay_out(self, buffer: Tensor, table: KvTable) -> list[KvPool]:
        """Views of the buffer, one pool per layer. Its bytes mean nothing under another table: see `zero`."""
        pools, offset, pages = [], 0, self.pages_at(table)
        for precision in table:
            pool, offset = self.shape.pool(precision, pages, buffer, offset)
            pools.append(pool)
        return pools

    def obstacle(self, table: KvTable) -> str | None:
        """Why KV cannot be stored like this, or None."""
        if KvPrecision.INT4 in table and self.shape.head_dim % 2:
            return (
                f"int4 packs two elements in a byte, and this model's head size {self.shape.head_dim} is odd"
            )
        if self.pages_at(table) < self.pages:
            return f"heads of {self.shape.head_dim} elements take more memory quantized than they do now"
        return None


def describe(table: Sequence[KvPrecision]) -> str:
    """In words, and different for different tables: `int8`, or `fp8; layer 0 model; layer 7 int8`."""
    most = max(dict.fromkeys(table), key=list(table).count)
    others = [
        f"layer {number} {precision}" for number, precision in enumerate(table) if precision is not most
    ]
    return "; ".join((most.value, *others))
