"""How a key or a value is stored in fewer bits, in plain PyTorch: the oracle of the Triton kernels to come.

Scales are per token and head. x is one head's key or value, D elements; s and m are bfloat16:

    precision  codes                                         scales         meaning
    fp8        [..., D] float8_e4m3fn                        [..., 1] s     x  = code * s
    int8       [..., D] int8, -127 … 127                     [..., 1] s     Hx = code * s
    int4       [..., D/2] uint8, element j in the low and    [..., 2] s, m  Hx = code * s + m
               element j + D/2 in the high half of byte j

H is an orthonormal Hadamard matrix, its own inverse. A few channels of trained models' keys are many times
larger than the rest, and steps that are as wide as they need are too wide for the rest; H spreads every
channel over all. (fp8 has steps in proportion to the element, and gains nothing.)
Nothing has to be turned back: queries are turned by the same H, which leaves scores as they are, and turning
the output of attention once is turning every value. Measured on SmolLM2-135M (logit KL against unquantized
KV, nats per token, 1,292 tokens of four texts): int4 symmetric 0.39, with a minimum 0.16, with H as well
0.064; groups of 32 elements 0.049 at 11 % more bytes; keys per channel over a page 0.023, but a page can be
quantized so only when it is full. int8 0.0014, with H 0.0003. fp8 0.008.

Codes are made with the scale as it is stored, so its own rounding costs nothing; bfloat16 has the range of
float32, so there is no value that a scale cannot reach.
"""

from __future__ import annotations

import functools
from enum import StrEnum

import torch
from torch import Tensor


class KvPrecision(StrEnum):
    """How the KV of one layer is stored. MODEL: in the model's own dtype, without scales."""

    MODEL = "model"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def turned(self) -> bool:
        """Whether what is stored is Hx."""
        return self in (KvPrecision.INT8, KvPrecision.INT4)


SCALE_DTYPE = torch.bfloat16
CODE_DTYPES = {
    KvPrecision.FP8: torch.float8_e4m3fn,
    KvPrecision.INT8: torch.int8,
    KvPrecision.INT4: torch.uint8,
}
_LARGEST = {KvPrecision.FP8: 448.0, KvPrecision.INT8: 127.0}
_INT4_LARGEST = 15
# Keeps 0 / 0 away; what is smaller is stored as zero.
_LEAST_SCALE = 1e-30


def codes_per_head(precision: KvPrecision, head_dim: int) -> int:
    """Elements of the code tensor that one key or value of a head takes."""
    return head_dim // 2 if precision is KvPrecision.INT4 else head_dim


def scales_per_head(precision: KvPrecision) -> int:
    """Scales that one key or value of a head takes."""
    return {KvPrecision.MODEL: 0, KvPrecision.INT4: 2}.get(precision, 1)


def quantize(x: Tensor, precision: KvPrecision) -> tuple[Tensor, Tensor]:
    """x [..., D], turned already where that is due -> codes and scales as in the table above."""
    x = x.float()
    if precision is KvPrecision.INT4:
        return _quantize_int4(x)
    largest = _LARGEST[precision]
    scales = _stored(x.abs().amax(-1, keepdim=True) / largest)
    codes = (x / scales.float()).clamp_(-largest, largest)
    if precision is KvPrecision.INT8:
        codes.round_()
    return codes.to(CODE_DTYPES[precision]), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes and scales -> x [..., D] in `dtype`, Hx where it was turned."""
    if codes.dtype == torch.uint8:
        halves = torch.cat((codes & _INT4_LARGEST, codes >> 4), dim=-1)
        factor, least = scales.float().unbind(-1)
        return halves.float().mul_(factor.unsqueeze(-1)).add_(least.unsqueeze(-1)).to(dtype)
    numbers = _fp8_numbers(codes) if codes.dtype == torch.float8_e4m3fn else codes.float()
    return numbers.mul_(scales.float()).to(dtype)


def _fp8_numbers(codes: Tensor) -> Tensor:
    """As float32. On CPU from a table of all 256, five times as fast as PyTorch's conversion."""
    if codes.device.type != "cpu":
        return codes.float()
    return _fp8_table().index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


@functools.cache
def _fp8_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def turn(x: Tensor, head_dim: int) -> Tensor:
    """Hx of every head: x [..., n D] -> the same shape; turned twice it is x again."""
    matrix = hadamard(head_dim, x.device, x.dtype)
    return (x.reshape(-1, len(matrix)) @ matrix).view(x.shape)


@functools.cache
def hadamard(head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, n], n the largest power of two that divides the head size: heads are turned in blocks of n."""
    size = head_dim & -head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / size**0.5).to(device, dtype)


def _quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    least = x.amin(-1, keepdim=True).to(SCALE_DTYPE)
    above = x - least.float()
    scales = _stored(above.amax(-1, keepdim=True) / _INT4_LARGEST)
    codes = (above / scales.float()).round_().clamp_(0, _INT4_LARGEST).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, torch.cat((scales, least), dim=-1)


def _stored(scales: Tensor) -> Tensor:
    return scales.clamp(min=_LEAST_SCALE).to(SCALE_DTYPE)
