"""The loads: each takes a client and returns rows of figures (milliseconds, tokens per second).

Prompts are lists of random token ids of exact length, different in every request, so that nothing is
cached unless the scenario wants it to be.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from firsttoken_runtime.measure.client import Sample, complete
from firsttoken_runtime.measure.statistics import median, quantile

# Ids below are often special tokens; ids above may not exist in a small vocabulary.
FIRST_ID, LAST_ID = 1000, 20_000
SHORT_TOKENS, LONG_TOKENS = 40, 1500


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    scenario: str
    figure: str
    median: float
    worst: float
    unit: str
    rounds: int


class Prompts:
    """Endless different prompts from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets

    def of(self, tokens: int) -> list[int]:
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]


def row(scenario: str, figure: str, values: Sequence[float], unit: str = "ms") -> Row:
    return Row(scenario, figure, round(median(values), 2), round(max(values), 2), unit, len(values))


async def single(
    client: httpx.AsyncClient, model: str, rounds: int, prompts: Prompts, lengths: Sequence[int]
) -> list[Row]:
    """Cold TTFT and time per output token, one request at a time, at each prompt length."""
    rows = []
    gaps: list[float] = []
    for tokens in lengths:
        samples = [await complete(client, model, prompts.of(tokens), 16) for _ in range(rounds)]
        rows.append(row("single", f"cold TTFT, {tokens} tokens", [sample.ttft_ms for sample in samples]))
        gaps += [gap for sample in samples for gap in sample.gaps_ms]
    rows.append(row("single", "per output token", gaps))
    return rows


async def cached(client: httpx.AsyncClient, model: str, rounds: int, prompts: Prompts) -> list[Row]:
    """TTFT of 1,024 tokens cold, and with the first 1,000 of them cached."""
    cold, warm, hits = [], [], []
    for _ in range(rounds):
        prefix = prompts.of(1000)
        first = await complete(client, model, prefix + prompts.of(24), 4)
        second = await complete(client, model, prefix + prompts.of(24), 4)
        cold.append(first.ttft_ms)
        warm.append(second.ttft_ms)
        hits.append(float(second.timings.get("cached_tokens", 0)))
    ratios = [before / after for before, after in zip(cold, warm, strict=True)]
    return [
        row("cached", "cold TTFT, 1,024 tokens", cold),
        row("cached", "TTFT, first 1,000 tokens repeated", warm),
        row("cached", "cached tokens", hits, "tokens"),
        row("cached", "cold / cached", ratios, "x"),
    ]


async def short_behind_long(
    client: httpx.AsyncClient, model: str, rounds: int, prompts: Prompts, label: str
) -> list[Row]:
    """Four 40-token requests sent 50 ms after one of 1,500 tokens: what the short ones wait."""
    shorts: list[float] = []
    longs: list[float] = []
    for _ in range(rounds):
        long_one, short_ones = await _one_long_four_short(client, model, prompts)
        longs.append(long_one.ttft_ms)
        shorts += [sample.ttft_ms for sample in short_ones]
    return [
        row(label, "short TTFT P50", [quantile(shorts, 0.5)]),
        row(label, "short TTFT P99", [quantile(shorts, 0.99)]),
        row(label, "long TTFT", longs),
    ]


async def _one_long_four_short(
    client: httpx.AsyncClient, model: str, prompts: Prompts
) -> tuple[Sample, list[Sample]]:
    long_task = asyncio.create_task(complete(client, model, prompts.of(LONG_TOKENS), 8))
    await asyncio.sleep(0.05)
    short_tasks = [
        asyncio.create_task(complete(client, model, prompts.of(SHORT_TOKENS), 8)) for _ in range(4)
    ]
    short_samples = await asyncio.gather(*short_tasks)
    return await long_task, list(short_samples)


async def closed_loop(
    client: httpx.AsyncClient, model: str, requests: int, prompts: Prompts, concurrency: int = 4
) -> list[Row]:
    """`concurrency` callers, each sending its next request when the last one ended (128 in, 32 out)."""
    output_tokens = 32
    left = iter(range(requests))
    samples: list[Sample] = []

    async def caller() -> None:
        for _ in left:
            samples.append(await complete(client, model, prompts.of(128), output_tokens))

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    return [
        row("closed loop 4", "TTFT", [sample.ttft_ms for sample in samples]),
        row("closed loop 4", "output", [requests * output_tokens / seconds], "tokens/s"),
    ]
