"""Linear layers with int8 weights and activations that are quantized as they come, through FBGEMM.

Weights: symmetric, one scale per output channel, [-127, 127]. Activations: symmetric, one scale per row, so
that a token's result does not depend on which other tokens share its step: sums are exact integers, and a
row's output is the same to the last bit in every batch, as LLM.int8() (arXiv 2208.07339) has it for its
vector-wise part. FBGEMM itself knows one scale per tensor; rows are therefore divided by their largest value
before and multiplied by it after.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from firsttoken_runtime.model.rotation import hadamard

_ENGINE = "fbgemm"
_MIXED = 16  # neighbours; 64 would be a little better, and cost three times as much


@dataclass(frozen=True)
class _Codes:
    """How activations of [-1, 1] become unsigned bytes: code = value / scale + zero."""

    scale: float
    zero: int


# FBGEMM adds two products of bytes in 16 bits where the CPU has no VNNI instructions. Codes of 7 bits keep
# the sum below 2**15; with 8 it saturates, and the answer is wrong without a word.
_EIGHT_BITS, _SEVEN_BITS = _Codes(1 / 127, 128), _Codes(1 / 63, 64)


class Int8Linear:
    """y = x W^T + b, W and x in int8, sums in int32, y in float32."""

    __slots__ = ("_codes", "_mixer", "_packed", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, mix_inputs: bool = False) -> None:
        """weight float32 [out, in], bias float32 [out], both on CPU. Needs `int8_obstacle() is None`.

        mix_inputs: spread each input channel over its neighbours before quantizing, in both x and W, for
        inputs with outliers that no rotation before this layer can take away. Costs 2 % of a prefill.
        """
        self._codes = _probe()
        self._mixer = None
        size = math.gcd(weight.shape[1], _MIXED)
        if mix_inputs and size > 1:
            self._mixer = hadamard(size)
            weight = self._mix(weight)
        self._packed = _pack(*quantize_channels(weight))
        self.bias = bias

    def _mix(self, x: Tensor) -> Tensor:
        return x if self._mixer is None else (x.view(-1, len(self._mixer)) @ self._mixer).view(x.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [T, in] -> float32 [T, out]. A row with NaN or inf in it gives no number."""
        x = self._mix(x)
        peak = x.abs().amax(-1, keepdim=True)
        # A row of zeros gives 0 / 0; whatever finite number becomes of NaN in there is then multiplied by 0.
        out = _multiply(x / peak, self._codes, self._packed).mul_(peak)
        return out if self.bias is None else out.add_(self.bias)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight float32 [out, in] -> int8 codes [out, in] and float32 scales [out]; code * scale is near it."""
    scales = weight.abs().amax(1) / 127
    scales[scales == 0] = 1.0
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def int8_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why int8 weights cannot be used here, None when they can."""
    if device.type != "cpu":
        return f"int8 weights are for CPU in this build, not {device.type}"
    if dtype != torch.float32:
        return f"int8 weights compute in float32, not {str(dtype).removeprefix('torch.')}"
    try:
        _probe()
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"this build of PyTorch has no FBGEMM for this CPU ({str(error).splitlines()[0][:80]})"
    return None


def _pack(codes: Tensor, scales: Tensor) -> Any:
    per_channel = torch._make_per_channel_quantized_tensor(
        codes, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
    )
    return torch.ops.quantized.linear_prepack(per_channel, None)


def _multiply(x: Tensor, codes: _Codes, packed: Any) -> Tensor:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
        x, codes.scale, codes.zero, packed
    )


@lru_cache(maxsize=1)
def _probe() -> _Codes:
    """Try FBGEMM out: the widest codes whose sums are right on this CPU.

    Raises RuntimeError when there are none, or what torch raises when the operators are missing.
    """
    if _ENGINE not in torch.backends.quantized.supported_engines:
        raise RuntimeError("not among its quantized engines")
    torch.backends.quantized.engine = _ENGINE
    with warnings.catch_warnings():
        # Quantized tensors are to go from a later release; the probe is what finds out when they have.
        warnings.simplefilter("ignore", UserWarning)
        packed = _pack(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
    largest = torch.ones(2, 64)
    for codes in (_EIGHT_BITS, _SEVEN_BITS):
        if bool((_multiply(largest, codes, packed) - 64 * 127).abs().max() < 0.1):
            return codes
    raise RuntimeError("its sums are wrong")
