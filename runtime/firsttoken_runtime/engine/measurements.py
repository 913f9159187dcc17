"""What the engine measures of itself: counters, recent times, load."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence as Sequences
from typing import Any

from firsttoken_runtime.engine.prediction import Calibration, PrefillRate
from firsttoken_runtime.engine.prefill_cost import PrefillCosts, pairs
from firsttoken_runtime.engine.scheduler import Step
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.snapshot import Load
from firsttoken_runtime.model.step import Chunk

_RECENT_STEPS = 256
_RECENT_PROMPTS = 1024
_NS_PER_MS = 1e6
PROMPT_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Measurements:
    """Counters since the start, and medians over recent steps and prompts."""

    def __init__(self, prefill_tokens_per_second: float | None) -> None:
        self.steps = 0
        self.steps_without_progress = 0
        self.failed_steps = 0
        self.preemptions = 0
        self.kv_changes = 0  # changes of KV precision; each preempts everything that runs
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefill_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.rate = PrefillRate(prefill_tokens_per_second)
        self.calibration = Calibration()
        self.prefill_costs = PrefillCosts()
        self.stay_seconds: float | None = None  # mean of recent sequences, from admission to the end
        self.prompt_histogram: Counter[str] = Counter()
        self._prompts: deque[int] = deque(maxlen=_RECENT_PROMPTS)
        self._prompt_sum = 0
        self._sequences: float | None = None
        self._overhead_ns: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._model_ns: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._sampling_ns: deque[int] = deque(maxlen=_RECENT_STEPS)

    def arrived(self, prompt_tokens: int, sequences: int) -> None:
        """A request was taken; `sequences` run and wait now."""
        if len(self._prompts) == _RECENT_PROMPTS:
            self._prompt_sum -= self._prompts[0]
        self._prompts.append(prompt_tokens)
        self._prompt_sum += prompt_tokens
        self._sequences = sequences if self._sequences is None else 0.95 * self._sequences + 0.05 * sequences
        bucket = next((str(bound) for bound in PROMPT_BUCKETS if prompt_tokens <= bound), "+Inf")
        self.prompt_histogram[bucket] += 1

    def stepped(self, total_ns: int, model_ns: int, sampling_ns: int, prefill_tokens: int) -> None:
        """A step ended. prefill_tokens: prompt tokens it computed, in `model_ns` along with its decodes."""
        self._overhead_ns.append(total_ns - model_ns - sampling_ns)
        self._model_ns.append(model_ns)
        self._sampling_ns.append(sampling_ns)
        if prefill_tokens:
            self.prefill_tokens += prefill_tokens
            self.rate.learn(prefill_tokens, model_ns / 1e9)

    def prefilled(self, step: Step, chunks: Sequences[Chunk], model_ns: int) -> None:
        """Divide the model's time among the prompts that have no token yet, by tokens, and learn from it."""
        prefilled = chunks[len(step.decodes) :]
        if not prefilled:
            return
        total = sum(len(chunk.token_ids) for chunk in chunks)
        tokens = attended = end = 0
        for grant, chunk in zip(step.prefills, prefilled, strict=True):
            length = len(chunk.token_ids)
            tokens += length
            attended += pairs(chunk.start, length)
            end = max(end, chunk.start + length)
            sequence = grant.sequence
            if not sequence.output_len:
                sequence.computing_ns += model_ns * length // total
                sequence.chunks += 1
        self.prefill_costs.stepped(model_ns / 1e9, tokens, attended, len(step.decodes), end)

    def first_token(self, sequence: Sequence, now_ns: int) -> None:
        """A request got its first token; how did the prediction turn out?"""
        if sequence.predicted_seconds is not None:
            self.calibration.learn(sequence.predicted_seconds, (now_ns - sequence.queued_ns) / 1e9)

    def ended(self, sequence: Sequence, finish: str, now_ns: int) -> None:
        """A request ended, for whatever reason, running or waiting."""
        self.finished[finish] += 1
        if sequence.prefill_start_ns is not None:
            stay = (now_ns - sequence.prefill_start_ns) / 1e9
            self.stay_seconds = stay if self.stay_seconds is None else 0.9 * self.stay_seconds + 0.1 * stay

    @property
    def prefill_tokens_per_second(self) -> float | None:
        return self.rate.tokens_per_second

    def load(self) -> Load:
        prompts = len(self._prompts)
        return Load(
            self._prompt_sum / prompts if prompts else None, self._sequences, self.prefill_tokens_per_second
        )

    def to_json(self) -> dict[str, Any]:
        """Times are medians over the last 256 steps; prompt lengths over the last 1024 prompts."""
        rate = self.prefill_tokens_per_second
        return {
            "steps": self.steps,
            "steps_without_progress": self.steps_without_progress,
            "failed_steps": self.failed_steps,
            "preemptions": self.preemptions,
            "kv_changes": self.kv_changes,
            "prefix_cache_queries": self.prefix_queries,
            "prefix_cache_hits": self.prefix_hits,
            "prefill_tokens": self.prefill_tokens,
            "generation_tokens": self.generation_tokens,
            "finished": dict(self.finished),
            "refused": dict(self.refused),
            "step_overhead_ms": _median_ms(self._overhead_ns),
            "step_model_ms": _median_ms(self._model_ns),
            "step_sampling_ms": _median_ms(self._sampling_ns),
            "prefill_tokens_per_second": round(rate, 1) if rate is not None else None,
            "predicted_ttft": self.calibration.to_json(),
            "stay_seconds": round(self.stay_seconds, 3) if self.stay_seconds is not None else None,
            "prompt_tokens": _quantiles(self._prompts),
            "prompt_tokens_histogram": {
                bound: self.prompt_histogram[bound]
                for bound in (*map(str, PROMPT_BUCKETS), "+Inf")
                if bound in self.prompt_histogram
            },
        }


def _median_ms(values_ns: deque[int]) -> float | None:
    return round(statistics.median(values_ns) / _NS_PER_MS, 4) if values_ns else None


def _quantiles(values: deque[int]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        "mean": round(sum(ordered) / len(ordered), 1) if ordered else None,
        **{
            f"p{part}": ordered[min(len(ordered) * part // 100, len(ordered) - 1)] if ordered else None
            for part in (50, 95, 99)
        },
    }
