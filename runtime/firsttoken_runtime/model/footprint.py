"""How many bytes a loaded model takes."""

from __future__ import annotations

from torch import Tensor

from firsttoken_runtime.model.decoder import Decoder
from firsttoken_runtime.model.int8 import Int8Linear
from firsttoken_runtime.model.linear import Linear

# Beside a byte per weight FBGEMM keeps a scale and a sum for each output.
_INT8_ROW_BYTES = 8


def weight_bytes(model: Decoder) -> int:
    """Bytes of all weights as they are held: packed, quantized, and shared ones once."""
    config = model.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    counted: dict[int, int] = {}

    def count(tensor: Tensor | None) -> None:
        if tensor is not None:
            counted[id(tensor)] = tensor.numel() * tensor.element_size()

    def count_linear(linear: Linear | Int8Linear, rows: int, columns: int) -> None:
        count(linear.bias)
        if isinstance(linear, Int8Linear):
            counted[id(linear)] = rows * (columns + _INT8_ROW_BYTES)
        else:
            count(linear.weight)

    count(model.embedding)
    count(model.norm)
    count_linear(model.head, config.vocab_size, config.hidden_size)
    for layer in model.layers:
        for tensor in (layer.attention_norm, layer.head_norm, layer.mlp_norm):
            count(tensor)
        count_linear(layer.qkv, queries + 2 * keys, config.hidden_size)
        count_linear(layer.output, config.hidden_size, queries)
        count_linear(layer.gate_up, 2 * config.intermediate_size, config.hidden_size)
        count_linear(layer.down, config.hidden_size, config.intermediate_size)
    return sum(counted.values())
