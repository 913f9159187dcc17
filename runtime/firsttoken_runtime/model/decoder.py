"""The Llama-family decoder: RMSNorm, rotary grouped-query attention, gated MLP, pre-norm residuals.

One class for Llama, Mistral, Qwen2 and Qwen3: they differ by biases and head norms, which are data here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from firsttoken_runtime.kernels.dispatch import Kernels
from firsttoken_runtime.model.attention import attend
from firsttoken_runtime.model.config import ModelConfig
from firsttoken_runtime.model.int8 import Int8Linear
from firsttoken_runtime.model.kv_pool import KvPool
from firsttoken_runtime.model.linear import Linear
from firsttoken_runtime.model.step import StepPlan


@dataclass(frozen=True)
class Layer:
    """Weights of one layer.

    qkv: q, k and v stacked, [(H + 2 K) D, N]; gate_up: gate and up stacked, [2 I, N].
    head_norm: Qwen3's norms of q and k heads, [H + K, D], one row per head; None without.
    """

    attention_norm: Tensor
    qkv: Linear | Int8Linear
    head_norm: Tensor | None
    output: Linear | Int8Linear
    mlp_norm: Tensor
    gate_up: Linear | Int8Linear
    down: Linear | Int8Linear


@dataclass(frozen=True)
class Decoder:
    """A loaded model. embedding [vocab, N]; head [vocab, N]."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear | Int8Linear
    kernels: Kernels

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, plan: StepPlan, rotations: Tensor, pools: Sequence[KvPool]) -> Tensor:
        """Compute a step, write its KV, and return float32 logits [plan.samples, vocab].

        rotations: complex64 [T, 1, D/2] of the step's positions.
        pools: one per layer.
        """
        config, kernels, eps = self.config, self.kernels, self.config.rms_eps
        residual = self.embedding[plan.token_ids]
        hidden = kernels.rms_norm(residual, self.layers[0].attention_norm, eps)
        for number, (layer, pool) in enumerate(zip(self.layers, pools, strict=True)):
            qkv = layer.qkv(hidden)
            if layer.head_norm is not None:
                self._norm_heads(qkv, layer.head_norm)
            self._rotate_and_write(qkv, rotations, plan.slots, pool)
            last = number == len(self.layers) - 1
            if last and plan.samples == 0:
                break
            mixed = attend(plan.segments[plan.windows[number]], qkv, pool, config.heads, kernels)
            if last and plan.sampled is not None:
                # From here on only the sampled rows matter.
                mixed, residual = mixed[plan.sampled], residual[plan.sampled]
            hidden = kernels.add_rms_norm(layer.output(mixed), residual, layer.mlp_norm, eps)
            change = layer.down(kernels.silu_gate(layer.gate_up(hidden)))
            following = self.norm if last else self.layers[number + 1].attention_norm
            hidden = kernels.add_rms_norm(change, residual, following, eps)
        if plan.samples == 0:
            return torch.empty(0, config.vocab_size, device=self.device)
        return self.head(hidden).float()

    def _rotate_and_write(self, qkv: Tensor, rotations: Tensor, slots: Tensor, pool: KvPool) -> None:
        heads = (self.config.heads, self.config.kv_heads)
        if pool.scales is None:
            self.kernels.rotate_and_write(qkv, rotations, slots, pool.codes, *heads)
        else:
            self.kernels.rotate_quantize_and_write(
                qkv, rotations, slots, pool.precision, pool.codes, pool.scales, *heads
            )

    def _norm_heads(self, qkv: Tensor, weight: Tensor) -> None:
        """RMSNorm of every q and k head in place. weight [H + K, D]."""
        heads = qkv[:, : weight.numel()].view(len(qkv), *weight.shape)
        heads.copy_(rms_norm(heads, heads.shape[-1:], None, self.config.rms_eps) * weight)
