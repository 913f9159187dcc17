"""What a step of the engine costs beside the model: scheduling, building the batch, sampling, bookkeeping.

The real engine with a model runner that computes nothing, so that all time left is the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from firsttoken_api.switches import parse_message
from firsttoken_runtime.engine.engine import Engine, EngineSettings
from firsttoken_runtime.engine.requests import Request, SamplingParams
from firsttoken_runtime.engine.sampling import Row, sample
from firsttoken_runtime.measure.figures import Figure, row
from firsttoken_runtime.measure.statistics import median
from firsttoken_runtime.model.kv_pool import KvTable
from firsttoken_runtime.model.runner import Chunk
from firsttoken_runtime.model.windows import LayerWindows

SEQUENCES = 32
STEPS = 200
PROMPT_TOKENS = 500
# A small vocabulary keeps the arg max, which a real model's head dwarfs, out of the figure.
VOCABULARY = 4096
# Sampling on the vocabulary of a real model, and on flat logits: the most work for top-p.
SAMPLED_VOCABULARY = 49152
CUTS: dict[str, dict[str, float]] = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


class _NoModel:
    """Answers with the same logits whatever is asked."""

    def __init__(self) -> None:
        self._logits = torch.zeros(SEQUENCES, VOCABULARY)
        self._logits[:, 7] = 1

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        return self._logits[: sum(chunk.logits for chunk in chunks)]

    def capabilities(self) -> dict[str, str | None]:
        return {}

    def set_fused_kernels(self, allowed: bool) -> None:
        pass

    def set_kv_table(self, table: KvTable) -> int:
        raise NotImplementedError

    def set_windows(self, windows: LayerWindows) -> None:
        raise NotImplementedError


def measure(rounds: int) -> list[Figure]:
    """Milliseconds per decode step at 32 sequences of 500 to 700 tokens; one figure per round, its median.

    On one thread: what is measured is Python, and idle threads of torch would only add noise.
    """
    torch.set_num_threads(1)
    figures = [_round() for _ in range(rounds)]
    overhead = row("engine", f"step overhead, {SEQUENCES} sequences decoding", figures)
    return [overhead, *(_sampling(name, cut, rounds) for name, cut in CUTS.items())]


def _sampling(name: str, cut: dict[str, Any], rounds: int) -> Figure:
    """Milliseconds to draw a token for each of 32 rows of normally distributed logits."""
    logits = torch.randn(SEQUENCES, SAMPLED_VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = [Row(SamplingParams(temperature=1.0, **cut), seed, 0) for seed in range(SEQUENCES)]
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        sample(logits, rows)
        times.append((time.perf_counter() - started) * 1e3)
    return row("engine", f"sampling, {SEQUENCES} flat rows, {name}", times[1:])


def _round() -> float:
    settings = EngineSettings(total_pages=4096, page_tokens=16, max_model_len=4096)
    engine = Engine(_NoModel(), settings, parse_message({"generation": 1, "switches": {}}))
    sampling = SamplingParams(max_tokens=STEPS + 50, temperature=0.0, ignore_eos=True)
    for number in range(SEQUENCES):
        prompt = tuple((number * 31 + place) % VOCABULARY for place in range(PROMPT_TOKENS))
        engine.add(Request(f"r{number}", prompt, sampling, time.monotonic_ns()))
    while any(entry["state"] != "decode" for entry in engine.requests()):
        engine.step()
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        events = engine.step()
        times.append((time.perf_counter() - started) * 1e3)
        if len(events) != SEQUENCES:
            raise RuntimeError(f"{len(events)} sequences decoded in a step, not {SEQUENCES}")
    return median(times)
