"""Loads with a name, each of which answers one question. One call is one round and returns its figures.

Every prompt differs from its first page on, so nothing is cached unless the scenario wants it to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from firsttoken_runtime.measure.client import BenchError, RequestError, Sample
from firsttoken_runtime.measure.figures import Better, Figure, row
from firsttoken_runtime.measure.load import Job, run_round
from firsttoken_runtime.measure.plan import Planned
from firsttoken_runtime.measure.prompts import Prefix, Text
from firsttoken_runtime.measure.statistics import mean, quantile
from firsttoken_runtime.measure.summary import output_tokens
from firsttoken_runtime.measure.target import Target

SINGLE_TOKENS = (32, 128, 512, 1024)
SINGLE_ANSWER = 16
PREFIX_TOKENS, CACHED_TOKENS = 1000, 1024
SHORT_TOKENS, LONG_TOKENS, SHORTS, BEHIND_SECONDS = 40, 1500, 4, 0.05
CLOSED_TOKENS, CLOSED_ANSWER = 128, 32
CLOSED_LOOPS = ((4, 12), (8, 16))  # callers, requests in all


async def single(target: Target) -> list[Figure]:
    """Cold TTFT and time per output token, one request at a time, at each prompt length."""
    figures = []
    gaps: list[float] = []
    for tokens in SINGLE_TOKENS:
        if not _fits(target, tokens + SINGLE_ANSWER):
            continue
        sample = await target.send(await target.prompts.of(tokens), SINGLE_ANSWER)
        figures.append(row("single", f"cold TTFT, {tokens:,} tokens", [sample.ttft_ms]))
        gaps += [] if sample.tpot_ms is None else [sample.tpot_ms]
    if not figures:
        raise BenchError(f"scenario single needs a context of {SINGLE_TOKENS[0] + SINGLE_ANSWER} tokens")
    return [*figures, row("single", "per output token", [mean(gaps)])] if gaps else figures


async def cached(target: Target) -> list[Figure]:
    """TTFT of 1,024 tokens cold, and of 1,024 tokens the first 1,000 of which were sent before."""
    _needs(target, "cached", CACHED_TOKENS + 4)
    prefix = Prefix(("cached", target.prompts.fresh()), PREFIX_TOKENS)
    prompts = [
        await target.prompts.write(Text(CACHED_TOKENS, (prefix.name, end), (prefix,))) for end in (1, 2)
    ]
    cold, warm = [await target.send(prompt, 4) for prompt in prompts]
    figures = [
        row("cached", "cold TTFT, 1,024 tokens", [cold.ttft_ms]),
        row("cached", "TTFT, first 1,000 tokens repeated", [warm.ttft_ms]),
        row("cached", "cold / repeated", [cold.ttft_ms / warm.ttft_ms], "x", Better.HIGHER),
    ]
    if warm.cached_tokens is not None:
        figures.append(row("cached", "cached tokens", [warm.cached_tokens], "tokens"))
    return figures


async def short_behind_long(target: Target, label: str = "short behind long") -> list[Figure]:
    """Four 40-token requests sent 50 ms after one of 1,500 tokens: what the short ones wait, what it costs
    the long one."""
    _needs(target, "short-behind-long", LONG_TOKENS + 8)
    long_prompt = await target.prompts.of(LONG_TOKENS)
    alone = await target.send(await target.prompts.of(LONG_TOKENS), 8)
    short_prompts = [await target.prompts.of(SHORT_TOKENS) for _ in range(SHORTS)]

    async def later(prompt: str) -> Sample:
        await asyncio.sleep(BEHIND_SECONDS)
        return await target.send(prompt, 8)

    try:
        async with asyncio.TaskGroup() as group:
            long_task = group.create_task(target.send(long_prompt, 8))
            short_tasks = [group.create_task(later(prompt)) for prompt in short_prompts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    shorts = [task.result().ttft_ms for task in short_tasks]
    long_ttft = long_task.result().ttft_ms
    return [
        row(label, "short TTFT P50", [quantile(shorts, 0.5)]),
        row(label, "short TTFT P99", [quantile(shorts, 0.99)]),
        row(label, "long TTFT", [long_ttft]),
        row(label, "long TTFT / alone", [long_ttft / alone.ttft_ms], "x", Better.LOWER),
    ]


async def closed_loop(target: Target) -> list[Figure]:
    """4, then 8 callers, each sending its next request when the last one ended (128 tokens in, 32 out)."""
    _needs(target, "closed-loop", CLOSED_TOKENS + CLOSED_ANSWER)
    figures = []
    for callers, requests in CLOSED_LOOPS:
        planned = Planned(None, Text(CLOSED_TOKENS, ()), CLOSED_ANSWER)
        jobs = [Job(planned, await target.prompts.of(CLOSED_TOKENS)) for _ in range(requests)]
        done = await target.counted(await run_round(target.send, jobs, asyncio.Event(), callers))
        for outcome in done.outcomes:
            if outcome.error is not None:
                raise RequestError(outcome.error, outcome.message)
        label = f"closed loop {callers}"
        output = sum(output_tokens(sample) for sample in done.samples)
        figures.append(row(label, "TTFT P50", [quantile([sample.ttft_ms for sample in done.samples], 0.5)]))
        figures.append(row(label, "output", [output / done.seconds], "tokens/s"))
    return figures


SCENARIOS: dict[str, Callable[[Target], Coroutine[Any, Any, list[Figure]]]] = {
    "single": single,
    "cached": cached,
    "short-behind-long": short_behind_long,
    "closed-loop": closed_loop,
}


def _fits(target: Target, tokens: int) -> bool:
    return target.max_tokens is None or tokens <= target.max_tokens


def _needs(target: Target, scenario: str, tokens: int) -> None:
    if not _fits(target, tokens):
        raise BenchError(
            f"scenario {scenario} needs a context of {tokens:,} tokens, {target.model} has "
            f"{target.max_tokens:,}; name the others with --scenario"
        )
