"""From files to a decoder on a device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from firsttoken_runtime.kernels.dispatch import Kernels
from firsttoken_runtime.model.config import ModelConfig, read_config
from firsttoken_runtime.model.decoder import Decoder, Layer
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.files import find_model
from firsttoken_runtime.model.int8 import Int8Linear
from firsttoken_runtime.model.linear import Linear
from firsttoken_runtime.model.rope import inverse_frequencies, pair_rows
from firsttoken_runtime.model.rotation import LayerWeights, rotate_ends, rotate_layer
from firsttoken_runtime.model.weights import WeightSource, open_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` takes CUDA where it is. Raises ModelError when CUDA is asked for and there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "device cuda was asked for, but PyTorch finds no CUDA device; use --device cpu or auto"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on CPU, where 16 bit arithmetic is emulated and slower."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes: 2 x layers x KV heads x head size x bytes of an element."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def load_model(
    path: str | Path, device: torch.device | str, dtype: torch.dtype, int8: bool = False
) -> Decoder:
    """Read a model from a GGUF file or a Hugging Face folder.

    int8: hold the weights of every linear layer in int8, the head's included; only where
    `int8.int8_obstacle` finds nothing against it. The embedding stays in dtype. Hidden states and values are
    then in a rotated basis (rotation.py), which no answer shows.

    Raises ModelError in one line: file missing or cut off, unknown architecture, tensor missing, of the wrong
    shape, or not used by the architecture.
    """
    config = read_config(path)
    inverse_frequencies(config)  # refuses what the rotary code cannot do before gigabytes are read
    source = open_weights(find_model(path))
    return _Loader(config, source, torch.device(device), dtype, int8).load()


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        int8: bool,
    ) -> None:
        self.config, self.source, self.device, self.dtype = config, source, device, dtype
        self.int8 = int8
        self.names = source.names()
        self.used: set[str] = set()

    def load(self) -> Decoder:
        config = self.config
        hidden, vocab = config.hidden_size, config.vocab_size
        kernels = Kernels(self.device, self.dtype, config.head_dim)
        embedding = self._tensor("embed_tokens.weight", (vocab, hidden)).to(self.device)
        norm = self._tensor("norm.weight", (hidden,)).to(self.device)
        if config.tie_embeddings:
            self.used.add("lm_head.weight")  # some checkpoints store the tied weight twice
            head = embedding
        else:
            head = self._tensor("lm_head.weight", (vocab, hidden)).to(self.device)
        # Dequantizing and packing release the interpreter lock, so two layers at a time load faster.
        with ThreadPoolExecutor(max_workers=2) as pool:
            layers = tuple(pool.map(self._layer, range(config.layers)))
        self._refuse_unused()
        if self.int8:
            embedding, norm, head = rotate_ends(embedding, norm, head)
        return Decoder(config, embedding, layers, norm, self._pack(head, None), kernels)

    def _layer(self, number: int) -> Layer:
        weights = self._read_layer(number)
        if self.int8:
            weights = rotate_layer(weights, self.config.kv_heads, self.config.head_dim)
        return Layer(
            attention_norm=weights.attention_norm,
            qkv=self._pack(weights.qkv, weights.qkv_bias),
            head_norm=weights.head_norm,
            output=self._pack(weights.output, weights.output_bias),
            mlp_norm=weights.mlp_norm,
            gate_up=self._pack(weights.gate_up, weights.gate_up_bias),
            # What comes out of the gate has the largest outliers of all, and no norm before it to rotate by.
            down=self._pack(weights.down, weights.down_bias, mix_inputs=True),
        )

    def _pack(self, weight: Tensor, bias: Tensor | None, mix_inputs: bool = False) -> Linear | Int8Linear:
        return Int8Linear(weight, bias, mix_inputs) if self.int8 else Linear(weight, bias)

    def _read_layer(self, number: int) -> LayerWeights:
        config = self.config
        hidden, middle = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        at = f"layers.{number}."
        attention, mlp = at + "self_attn.", at + "mlp."
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        qkv = [self._tensor(f"{attention}{name}.weight", (size, hidden)) for name, size in sizes.items()]
        biases = None
        if config.attention_bias:
            biases = [self._tensor(f"{attention}{name}.bias", (size,)) for name, size in sizes.items()]
        gate_up = [self._tensor(f"{mlp}{name}_proj.weight", (middle, hidden)) for name in ("gate", "up")]
        return LayerWeights(
            attention_norm=self._tensor(at + "input_layernorm.weight", (hidden,)).to(self.device),
            qkv=self._stack(self._paired(qkv)),
            qkv_bias=self._stack(self._paired(biases)) if biases else None,
            head_norm=self._head_norm(attention) if config.qk_norm else None,
            output=self._tensor(attention + "o_proj.weight", (hidden, q_size)).to(self.device),
            output_bias=self._optional(attention + "o_proj.bias", (hidden,)),
            mlp_norm=self._tensor(at + "post_attention_layernorm.weight", (hidden,)).to(self.device),
            gate_up=self._stack(gate_up),
            gate_up_bias=self._gate_up_bias(mlp, middle),
            down=self._tensor(mlp + "down_proj.weight", (hidden, middle)).to(self.device),
            down_bias=self._optional(mlp + "down_proj.bias", (hidden,)),
        )

    def _paired(self, qkv: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v with the rows of q and k in rotary pairs."""
        query, key, value = qkv
        if self.source.rotary_pairs:
            return [query, key, value]
        return [pair_rows(query, self.config.heads), pair_rows(key, self.config.kv_heads), value]

    def _head_norm(self, attention: str) -> Tensor:
        rows = []
        for name, heads in (("q_norm", self.config.heads), ("k_norm", self.config.kv_heads)):
            weight = self._tensor(f"{attention}{name}.weight", (self.config.head_dim,))
            paired = weight if self.source.rotary_pairs else pair_rows(weight, 1)
            rows.append(paired.expand(heads, -1))
        return torch.cat(rows).to(self.device)

    def _gate_up_bias(self, mlp: str, middle: int) -> Tensor | None:
        if f"{mlp}gate_proj.bias" not in self.names:
            return None
        return self._stack([self._tensor(f"{mlp}{name}_proj.bias", (middle,)) for name in ("gate", "up")])

    def _optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self._tensor(name, shape).to(self.device) if name in self.names else None

    def _stack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(self.device)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.source.read(name, self.dtype)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.source.where}: tensor {name} has shape {list(tensor.shape)}, "
                f"the configuration makes it {list(shape)}"
            )
        self.used.add(name)
        return tensor

    def _refuse_unused(self) -> None:
        """A tensor nobody used means that the model does something this decoder does not."""
        unused = sorted(name for name in self.names - self.used if not name.endswith("rotary_emb.inv_freq"))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise ModelError(
                f"{self.source.where}: tensors that {self.config.architecture} does not have: "
                f"{', '.join(unused[:3])}{more}; the model is of another architecture"
            )
