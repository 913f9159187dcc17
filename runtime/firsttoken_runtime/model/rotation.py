"""Rotations of a model's hidden basis that change nothing it computes, and make it easier to quantize.

A few channels of a transformer's hidden state are tens of times larger than the others, so that a scale which
holds them leaves little of the rest. RMSNorm commutes with any orthogonal matrix once its weight is moved
into the linear layer behind it; so a rotation that spreads every channel over all of them can be built into
the weights and costs nothing per token (QuaRot, arXiv 2404.00456). Likewise for the values within a head.

A rotation here is a Kronecker product of small orthogonal matrices behind a pattern of signs: as good a mixer
as a dense one, and applied in N * (sum of the factors) steps instead of N * N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

_LARGEST_FACTOR = 64


@dataclass(frozen=True)
class Rotation:
    """Orthogonal R of one size.

    signs [size], 1 and -1; factors: orthogonal matrices whose sizes multiply to `size`.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    def rows(self, x: Tensor) -> Tensor:
        """x [..., size] -> x R."""
        mixed = x.reshape(-1, len(self.signs)) * self.signs
        for factor in self.factors:
            size = len(factor)
            # Mix the leading axis and move it to the end; after all factors the axes stand as before.
            # One large product: many small ones of a batch take ten times as long.
            columns = mixed.view(-1, size, len(self.signs) // size).transpose(1, 2).reshape(-1, size)
            mixed = columns @ factor
        return mixed.view(x.shape)

    def columns(self, x: Tensor) -> Tensor:
        """x [size, n] -> R^T x."""
        return self.rows(x.T).T.contiguous()


@lru_cache(maxsize=8)
def rotation(size: int) -> Rotation:
    """The rotation of vectors of this size; the same one at every call."""
    odd = size
    factors: list[Tensor] = []
    while odd % 2 == 0:
        odd //= 2
    power = size // odd
    while power > 1:
        taken = min(power, _LARGEST_FACTOR)
        factors.append(hadamard(taken))
        power //= taken
    if odd > 1:
        factors.append(_cosines(odd))
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.float32) * 2 - 1
    return Rotation(signs, tuple(factors))


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer as they come from the file; names and shapes as in `decoder.Layer`."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def rotate_layer(layer: LayerWeights, kv_heads: int, head_dim: int) -> LayerWeights:
    """The same layer on hidden states x R instead of x, with each head's values rotated in its KV too."""
    hidden, value = rotation(len(layer.attention_norm)), rotation(head_dim)
    values = kv_heads * head_dim
    qkv, qkv_bias = layer.qkv * layer.attention_norm, layer.qkv_bias
    ones = torch.ones_like(layer.attention_norm)
    by_head = qkv[-values:].view(kv_heads, head_dim, -1).transpose(1, 2)
    qkv[-values:] = value.rows(by_head).transpose(1, 2).reshape(values, -1)
    if qkv_bias is not None:
        turned = value.rows(qkv_bias[-values:].view(kv_heads, head_dim)).flatten()
        qkv_bias = torch.cat([qkv_bias[:-values], turned])
    output = value.rows(layer.output.view(len(layer.output), -1, head_dim)).flatten(1)
    return replace(
        layer,
        attention_norm=ones,
        qkv=hidden.rows(qkv),
        qkv_bias=qkv_bias,
        output=hidden.columns(output),
        output_bias=None if layer.output_bias is None else hidden.rows(layer.output_bias),
        mlp_norm=ones,
        gate_up=hidden.rows(layer.gate_up * layer.mlp_norm),
        down=hidden.columns(layer.down),
        down_bias=None if layer.down_bias is None else hidden.rows(layer.down_bias),
    )


def rotate_ends(embedding: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding [vocab, N] and head [vocab, N] on rotated hidden states, and the norm before the head."""
    hidden = rotation(len(norm))
    return hidden.rows(embedding), torch.ones_like(norm), hidden.rows(head * norm)


def hadamard(size: int) -> Tensor:
    """The orthogonal Hadamard matrix, symmetric; size a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _cosines(size: int) -> Tensor:
    """The orthogonal discrete cosine transform (DCT-II)."""
    row, column = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (column + 0.5) * row) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()
