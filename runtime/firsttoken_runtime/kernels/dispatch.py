"""The one place that decides, per operator, between the fused Triton kernel and its PyTorch reference.

A fused kernel that silently does not run doubles prefill while everything looks normal. So every decision has
a typed reason, every launch is counted, and `require_fused` turns a fallback into a start-up error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType

import torch
from torch import Tensor

from firsttoken_runtime.kernels import reference
from firsttoken_runtime.kernels.kv_quantization import KvPrecision


class Operator(StrEnum):
    RMS_NORM = "rmsNorm"
    ADD_RMS_NORM = "addRmsNorm"
    SILU_GATE = "siluGate"
    ROTATE_AND_WRITE = "rotateAndWrite"
    PAGED_DECODE = "pagedDecode"


class Obstacle(StrEnum):
    """Why a fused kernel does not run."""

    NO_CUDA = "no CUDA device"
    NO_TRITON = "Triton is not installed"
    DTYPE = "no kernel for this dtype"
    HEAD_SIZE = "no kernel for this head size"
    WINDOW = "no kernel for sliding windows"
    KV_PRECISION = "no kernel for quantized KV"
    SWITCHED_OFF = "switched off"
    ROLLED_BACK = "rolled back"
    KILLED = "killed"


_POOL_OPERATORS = (Operator.ROTATE_AND_WRITE, Operator.PAGED_DECODE)
FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FUSED_HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Decision:
    """obstacle: None when the fused kernel runs."""

    operator: Operator
    obstacle: Obstacle | None
    fused_launches: int
    reference_launches: int


class FusedKernelsUnavailable(Exception):
    """`fusedKernels.required` is set and at least one operator would run unfused."""

    def __init__(self, obstacles: Sequence[tuple[Operator, Obstacle]]) -> None:
        self.obstacles = tuple(obstacles)
        by_reason: dict[Obstacle, list[str]] = {}
        for operator, obstacle in obstacles:
            by_reason.setdefault(obstacle, []).append(operator.value)
        parts = [f"{reason.value} ({', '.join(names)})" for reason, names in by_reason.items()]
        super().__init__(
            f"fusedKernels.required is set, but fused kernels cannot run: {'; '.join(parts)}; "
            "use a GPU they support or set fusedKernels.required to false"
        )


def obstacle_of(
    operator: Operator, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool = False
) -> Obstacle | None:
    """What keeps an operator's fused kernel from running on this machine and model, None if nothing does.

    windowed: whether a layer has a sliding window.
    """
    if device.type != "cuda":
        return Obstacle.NO_CUDA
    if importlib.util.find_spec("triton") is None:
        return Obstacle.NO_TRITON
    if dtype not in FUSED_DTYPES:
        return Obstacle.DTYPE
    if operator in _POOL_OPERATORS and head_dim not in FUSED_HEAD_SIZES:
        return Obstacle.HEAD_SIZE
    if operator is Operator.PAGED_DECODE and windowed:
        return Obstacle.WINDOW
    return None


class Kernels:
    """The operators of one model on one device. Not thread-safe: owned by the engine's step loop."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool = False
    ) -> None:
        self._machine = (device, dtype, head_dim)
        self.set_windowed(windowed)
        self._taken_back: Obstacle | None = None
        self._kv_quantized = False
        self._launches = {(op, fused): 0 for op in Operator for fused in (False, True)}
        self._fused_module: ModuleType | None = None

    def set_allowed(self, allowed: bool, because: Obstacle = Obstacle.SWITCHED_OFF) -> None:
        """Allow fused kernels, or take them back from the next operator on, saying why."""
        self._taken_back = None if allowed else because

    def set_windowed(self, windowed: bool) -> None:
        """Whether a layer has a sliding window from now on: decode attention then runs unfused."""
        self._possible = {op: obstacle_of(op, *self._machine, windowed) for op in Operator}

    def set_kv_quantized(self, quantized: bool) -> None:
        """Whether a layer's KV is quantized from now on: those that touch the pool then run unfused."""
        self._kv_quantized = quantized

    def obstacle(self, operator: Operator) -> Obstacle | None:
        """Why this operator runs unfused now, None when it runs fused."""
        found = self._possible[operator] or self._taken_back
        if found is None and self._kv_quantized and operator in _POOL_OPERATORS:
            return Obstacle.KV_PRECISION
        return found

    @property
    def impossible(self) -> Obstacle | None:
        """Why no operator could run fused here even if asked for; None when at least one could."""
        obstacles = list(self._possible.values())
        return None if None in obstacles else obstacles[0]

    def decisions(self) -> list[Decision]:
        """What runs how, and how often it ran, operator by operator."""
        return [
            Decision(op, self.obstacle(op), self._launches[op, True], self._launches[op, False])
            for op in Operator
        ]

    def require_fused(self) -> None:
        """Raises FusedKernelsUnavailable when an operator cannot run fused on this machine."""
        missing = [(op, obstacle) for op, obstacle in self._possible.items() if obstacle is not None]
        if missing:
            raise FusedKernelsUnavailable(missing)

    def _pick(self, operator: Operator, plain: Callable[..., object]) -> Callable[..., object]:
        fused = self.obstacle(operator) is None
        self._launches[operator, fused] += 1
        return getattr(self._fused(), plain.__name__) if fused else plain

    def _fused(self) -> ModuleType:
        if self._fused_module is None:
            self._fused_module = importlib.import_module("firsttoken_runtime.kernels.triton_kernels")
        return self._fused_module

    # Signatures and meanings: reference.py.

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._pick(Operator.RMS_NORM, reference.rms_norm)(x, weight, eps)  # type: ignore[return-value]

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        picked = self._pick(Operator.ADD_RMS_NORM, reference.add_rms_norm)
        return picked(delta, residual, weight, eps)  # type: ignore[return-value]

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        return self._pick(Operator.SILU_GATE, reference.silu_gate)(gate_up)  # type: ignore[return-value]

    def rotate_and_write(
        self, qkv: Tensor, rotations: Tensor, slots: Tensor, pool: Tensor, heads: int, kv_heads: int
    ) -> None:
        picked = self._pick(Operator.ROTATE_AND_WRITE, reference.rotate_and_write)
        picked(qkv, rotations, slots, pool, heads, kv_heads)

    def rotate_quantize_and_write(
        self,
        qkv: Tensor,
        rotations: Tensor,
        slots: Tensor,
        precision: KvPrecision,
        codes: Tensor,
        scales: Tensor,
        heads: int,
        kv_heads: int,
    ) -> None:
        self._launches[Operator.ROTATE_AND_WRITE, False] += 1
        reference.rotate_quantize_and_write(qkv, rotations, slots, precision, codes, scales, heads, kv_heads)

    def paged_decode(
        self, query: Tensor, pool: Tensor, page_table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        picked = self._pick(Operator.PAGED_DECODE, reference.paged_decode)
        return picked(query, pool, page_table, lengths, scale)  # type: ignore[return-value]

    def count_gathered_decode(self) -> None:
        """Note that decode attention ran unfused, on gathered pages (model/attention.py)."""
        self._launches[Operator.PAGED_DECODE, False] += 1
