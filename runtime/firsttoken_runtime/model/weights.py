"""Weights by one set of names, whatever container they come from.

Names are those of Hugging Face checkpoints without the leading `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.files import read_json
from firsttoken_runtime.model.gguf import GgufFile, open_gguf


class WeightSource(Protocol):
    """rotary_pairs: whether q and k rows already lie as rotary pairs (see rope.pair_rows)."""

    where: str
    rotary_pairs: bool

    def names(self) -> Set[str]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor, copied out of the file. Raises ModelError when it is missing or cut off."""
        ...


def open_weights(place: Path) -> WeightSource:
    """place: as `find_model` returned it. Raises ModelError."""
    return GgufWeights(open_gguf(place)) if place.is_file() else FolderWeights(place)


class FolderWeights:
    """Safetensors of a Hugging Face folder: one file, or several with an index."""

    rotary_pairs = False

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._stack = ExitStack()
        self._file_of: dict[str, tuple[Any, str]] = {}
        for file in _weight_files(folder):
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
            except FileNotFoundError:
                if file.is_symlink():
                    raise ModelError(
                        f"{file}: a link to a file that is not there; download it again"
                    ) from None
                raise ModelError(f"{file}: not found, but model.safetensors.index.json lists it") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{file}: not a whole safetensors file: {error}; download it again"
                ) from None
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                self._file_of[name.removeprefix("model.")] = (opened, name)

    def names(self) -> Set[str]:
        return self._file_of.keys()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._file_of:
            raise ModelError(f"{self.where}: tensor {name} is missing")
        opened, stored = self._file_of[name]
        tensor: Tensor = opened.get_tensor(stored)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self.where}: tensor {name} holds {tensor.dtype}; only float weights are supported"
            )
        # A copy even in the same dtype: what safetensors hands out is the file, mapped into memory. Its pages
        # would be read by the first prompt instead of now, and a file changed in place would change answers.
        return tensor.to(dtype, copy=True)


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ModelError(f"{index}: weight_map is missing")
        names = sorted(set(map(str, listed.values())))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index}: weight files must lie in the same folder")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{index}: not found, but the folder holds {len(found)} safetensors files")
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))]
    if pickled:
        raise ModelError(
            f"{folder}: only pickled weights ({pickled[0]}), which can run code when opened; "
            "convert them to safetensors"
        )
    raise ModelError(f"{folder}: no weights; expected model.safetensors or model.safetensors.index.json")


_GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def _canonical(name: str) -> str:
    matched = _GGUF_NAME.fullmatch(name)
    if matched is None or matched[2] not in _GGUF_NAMES:
        return name
    layer = f"layers.{matched[1]}." if matched[1] is not None else ""
    return f"{layer}{_GGUF_NAMES[matched[2]]}.{matched[3]}"


class GgufWeights:
    """Tensors of a GGUF file, dequantized on reading."""

    def __init__(self, file: GgufFile) -> None:
        self.where = str(file.path)
        self.rotary_pairs = file.architecture == "llama"
        self._file = file
        # rope_freqs is part of the configuration.
        self._stored = {_canonical(name): name for name in file.tensors if name != "rope_freqs.weight"}

    def names(self) -> Set[str]:
        return self._stored.keys()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
        from numpy import array, errstate, frombuffer, uint8

        if name not in self._stored:
            raise ModelError(f"{self.where}: tensor {name} is missing")
        info = self._file.tensors[self._stored[name]]
        try:
            kind = GGMLQuantizationType(info.kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(f"{self.where}: tensor {info.name} has unknown type {info.kind}") from None
        *rows, width = info.shape
        if width % block:
            raise ModelError(f"{self.where}: tensor {info.name}: rows of {width} are no multiple of {block}")
        row_bytes = width // block * block_bytes
        count = info.elements // width
        raw = self._file.tensor_bytes(info.name, count * row_bytes)
        if kind == GGMLQuantizationType.F32:
            return torch.from_numpy(array(frombuffer(raw, "<f4"))).view(info.shape).to(dtype)
        if kind == GGMLQuantizationType.F16:
            return torch.from_numpy(array(frombuffer(raw, "<f2"))).view(info.shape).to(dtype)
        if info.kind in _BLOCKS_OF_32:
            blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, block_bytes)
            return _dequantized(info.kind, blocks).view(info.shape).to(dtype)
        try:
            with errstate(all="ignore"):
                values = dequantize(frombuffer(raw, uint8).reshape(*rows, row_bytes), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self.where}: tensor {info.name} is {kind.name}, which cannot be read; "
                "use Q4_0, Q4_1, Q8_0, a K-quant, F16, BF16 or F32"
            ) from None
        return torch.from_numpy(values).to(dtype)


_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8
_BLOCKS_OF_32 = frozenset({_Q4_0, _Q4_1, _Q8_0})


def _dequantized(kind: int, blocks: Tensor) -> Tensor:
    """The common block formats in few large operations; gguf's own reader takes ten times as long.

    blocks uint8 [n, bytes of a block]: a float16 scale, for Q4_1 a float16 minimum, then the codes; of 4 bit
    codes a byte has element i below and i + 16 above. Returns float32 [n, 32].
    """
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == _Q8_0:
        return blocks[:, 2:].contiguous().view(torch.int8) * scale
    codes = blocks[:, 2 if kind == _Q4_0 else 4 :]
    values = torch.cat([codes & 15, codes >> 4], dim=1).float()
    if kind == _Q4_0:
        return values.sub_(8).mul_(scale)
    minimum = blocks[:, 2:4].contiguous().view(torch.float16).float()
    return values.mul_(scale).add_(minimum)
