"""A tiny decoder of random weights, made without any file, and the same computed as plainly as can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firsttoken_runtime.kernels.dispatch import Kernels
from firsttoken_runtime.model.config import ModelConfig, RopeScaling
from firsttoken_runtime.model.decoder import Decoder, Layer
from firsttoken_runtime.model.linear import Linear
from firsttoken_runtime.model.rope import rotation_table
from firsttoken_runtime.model.windows import LayerWindows, Window

VOCAB = 50


def tiny_decoder(windows: tuple[int | None, ...] = (None, None)) -> Decoder:
    """Two layers of random weights, made without any file."""
    config = ModelConfig(
        architecture="llama",
        layers=len(windows),
        hidden_size=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=40,
        vocab_size=VOCAB,
        max_length=640,
        rms_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(),
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        layer_windows=windows,
        eos_token_ids=(0,),
        bos_token_id=None,
    )
    torch.manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape) / shape[-1] ** 0.5

    layers = tuple(
        Layer(
            attention_norm=1 + 0.1 * torch.randn(24),
            qkv=Linear(weight(64, 24)),
            head_norm=None,
            output=Linear(weight(24, 32)),
            mlp_norm=1 + 0.1 * torch.randn(24),
            gate_up=Linear(weight(80, 24)),
            down=Linear(weight(24, 40)),
        )
        for _ in windows
    )
    embedding = weight(VOCAB, 24)
    kernels = Kernels(torch.device("cpu"), torch.float32, 8)
    return Decoder(config, embedding, layers, torch.ones(24), Linear(embedding), kernels)


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _sees(query: int, other: int, window: Window | None) -> bool:
    if window is None:
        return other <= query
    return other <= query and (other > query - window.tokens or other < window.sinks)


@torch.inference_mode()
def plain_logits(model: Decoder, ids: Sequence[int], windows: LayerWindows) -> torch.Tensor:
    """float32 logits [len(ids), vocab]: every query against every key, through one dense mask per layer."""
    config, length = model.config, len(ids)
    heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_eps).sqrt() * weight

    rotations = rotation_table(config, length, model.device)
    hidden = model.embedding[torch.tensor(ids)]
    for layer, window in zip(model.layers, windows, strict=True):
        qkv = layer.qkv(norm(hidden, layer.attention_norm)).view(length, heads + 2 * kv_heads, size)
        pairs = torch.view_as_complex(
            qkv[:, : heads + kv_heads].reshape(length, -1, size // 2, 2).contiguous()
        )
        turned = torch.view_as_real(pairs * rotations).flatten(-2)
        key = turned[:, heads:].repeat_interleave(heads // kv_heads, 1)
        value = qkv[:, heads + kv_heads :].repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", turned[:, :heads], key) * size**-0.5
        seen = torch.tensor([[_sees(query, at, window) for at in range(length)] for query in range(length)])
        scores = scores.masked_fill(~seen, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(length, -1)
        hidden = hidden + layer.output(mixed)
        gate, up = layer.gate_up(norm(hidden, layer.mlp_norm)).chunk(2, -1)
        hidden = hidden + layer.down(gate * gate.sigmoid() * up)
    return model.head(norm(hidden, model.norm)).float()
