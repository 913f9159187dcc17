"""Triton kernels on the interpreter: each program in numpy, one after another, no GPU needed.

It shows wrong masks, indices and arithmetic; it cannot show races, shared memory or layouts.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

# Triton reads this when it is imported, and again in every launch; nothing else in the test run uses Triton.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def fused() -> ModuleType:
    return importlib.import_module("firsttoken_runtime.kernels.triton_kernels")
