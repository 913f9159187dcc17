"""Rotary position embedding: frequencies of the supported scalings, and the table of rotations.

RoPE: arXiv 2104.09864. YaRN: arXiv 2309.00071. Formulas in float32, as the reference implementations have
them, so that angles at large positions agree to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firsttoken_runtime.model.config import ModelConfig, RopeKind, RopeScaling
from firsttoken_runtime.model.errors import ModelError


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position of every pair, float32 [head_dim / 2], and the factor on cosine and sine."""
    size, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    plain = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    match scaling.kind:
        case RopeKind.DEFAULT:
            return plain, 1.0
        case RopeKind.LINEAR:
            return plain / scaling.factor, 1.0
        case RopeKind.FACTORS:
            if len(scaling.factors) != size // 2:
                found = len(scaling.factors)
                raise ModelError(f"rope_freqs.weight has {found} factors, head size {size} takes {size // 2}")
            return plain / torch.tensor(scaling.factors), 1.0
        case RopeKind.LLAMA3:
            return _llama3(plain, scaling), 1.0
        case RopeKind.YARN:
            return _yarn(plain, scaling, size, theta)
    raise ModelError(f"rotary scaling {scaling.kind} is not supported")


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow waves are stretched by factor, fast ones kept, those between blended."""
    turns = scaling.original_length * plain / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: keep, 0: stretch
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(plain: Tensor, scaling: RopeScaling, size: int, theta: float) -> tuple[Tensor, float]:
    def pair_of(turns: float) -> float:
        """The pair that makes so many turns within the original context."""
        return (size * math.log(scaling.original_length / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    frequencies = plain / scaling.factor * stretched + plain * (1 - stretched)
    return frequencies, _yarn_attention(scaling)


def _yarn_attention(scaling: RopeScaling) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def rotation_table(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Rotation of every pair at positions 0 … length-1: complex64 [length, 1, head_dim / 2]."""
    frequencies, factor = inverse_frequencies(config)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.complex(angles.cos() * factor, angles.sin() * factor)[:, None].to(device)


def pair_rows(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of a projection from halves (i, i + D/2 turn together) to pairs (2i, 2i + 1).

    weight [heads * D, ...]. Scores do not change when q and k are reordered alike.
    """
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
