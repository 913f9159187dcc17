"""Which path an operator takes, why, and that launches are counted."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from firsttoken_runtime.kernels import dispatch
from firsttoken_runtime.kernels.dispatch import (
    FusedKernelsUnavailable,
    Kernels,
    Obstacle,
    Operator,
    obstacle_of,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_on_cpu_nothing_runs_fused_and_triton_is_not_even_imported():
    sys.modules.pop("firsttoken_runtime.kernels.triton_kernels", None)
    kernels = Kernels(CPU, torch.float32, 64)
    kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
    assert "firsttoken_runtime.kernels.triton_kernels" not in sys.modules
    assert kernels.impossible is Obstacle.NO_CUDA


def test_launches_are_counted_per_operator():
    kernels = Kernels(CPU, torch.float32, 64)
    for _ in range(3):
        kernels.silu_gate(torch.ones(1, 4))
    counts = {d.operator: (d.fused_launches, d.reference_launches) for d in kernels.decisions()}
    assert counts[Operator.SILU_GATE] == (0, 3)
    assert counts[Operator.RMS_NORM] == (0, 0)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "operator", "expected"),
    [
        (CPU, torch.float32, 64, Operator.RMS_NORM, Obstacle.NO_CUDA),
        (CUDA, torch.bfloat16, 64, Operator.PAGED_DECODE, None),
        (CUDA, torch.float64, 64, Operator.SILU_GATE, Obstacle.DTYPE),
        (CUDA, torch.bfloat16, 72, Operator.PAGED_DECODE, Obstacle.HEAD_SIZE),
        (CUDA, torch.bfloat16, 72, Operator.RMS_NORM, None),
    ],
)
def test_obstacles(device, dtype, head_dim, operator, expected):
    assert obstacle_of(operator, device, dtype, head_dim) is expected


def test_sliding_windows_decode_unfused_and_that_is_said():
    """The kernel looks at whole contexts; `fusedKernels.required` must not pass over it."""
    kernels = Kernels(CUDA, torch.bfloat16, 64, windowed=True)
    assert kernels.obstacle(Operator.PAGED_DECODE) is Obstacle.WINDOW
    assert kernels.obstacle(Operator.ROTATE_AND_WRITE) is None
    with pytest.raises(FusedKernelsUnavailable, match=r"no kernel for sliding windows \(pagedDecode\)"):
        kernels.require_fused()


def test_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    assert obstacle_of(Operator.RMS_NORM, CUDA, torch.float16, 64) is Obstacle.NO_TRITON


def on_a_gpu(monkeypatch) -> tuple[Kernels, list[str]]:
    """Kernels that believe in a GPU, with fused operators that only note that they were called."""
    called: list[str] = []
    kernels = Kernels(CUDA, torch.bfloat16, 64)
    fake = SimpleNamespace(rms_norm=lambda *_: called.append("fused rms_norm"))
    monkeypatch.setattr(kernels, "_fused", lambda: fake)
    return kernels, called


def test_taking_fused_kernels_back_acts_on_the_next_operator_and_says_why(monkeypatch):
    kernels, called = on_a_gpu(monkeypatch)
    arguments = torch.ones(1, 4), torch.ones(4), 1e-6
    kernels.rms_norm(*arguments)
    kernels.set_allowed(False, Obstacle.KILLED)
    kernels.rms_norm(*arguments)
    assert called == ["fused rms_norm"]
    assert kernels.obstacle(Operator.RMS_NORM) is Obstacle.KILLED
    kernels.set_allowed(True)
    kernels.rms_norm(*arguments)
    assert called == ["fused rms_norm"] * 2
    decision = next(d for d in kernels.decisions() if d.operator is Operator.RMS_NORM)
    assert (decision.fused_launches, decision.reference_launches) == (2, 1)


def test_required_but_impossible_is_one_clear_line():
    with pytest.raises(
        FusedKernelsUnavailable, match=r"no CUDA device .*use a GPU.*required to false"
    ) as caught:
        Kernels(CPU, torch.float32, 64).require_fused()
    assert "\n" not in str(caught.value)
    assert {operator for operator, _ in caught.value.obstacles} == set(Operator)


def test_required_and_possible_is_silent(monkeypatch):
    on_a_gpu(monkeypatch)[0].require_fused()
