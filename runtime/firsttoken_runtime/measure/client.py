"""One streamed completion over HTTP, timed from outside.

TTFT here is what the caller sees: from just before the request is written to the first chunk that carries
text. The server's own account (`timings` of the last event) travels along for comparison.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


class BenchError(Exception):
    """The server could not be measured; the text says why."""


@dataclass(frozen=True)
class Sample:
    """What one request took, in milliseconds; `gaps_ms` are the times between chunks of text."""

    ttft_ms: float
    total_ms: float
    chunks: int
    text: str
    timings: dict[str, Any] = field(default_factory=dict)
    gaps_ms: tuple[float, ...] = ()


async def complete(
    client: httpx.AsyncClient,
    model: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    ignore_eos: bool = True,
) -> Sample:
    """Send one greedy streaming completion and time it. Raises BenchError when it does not succeed."""
    body = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": ignore_eos,
        "stream": True,
    }
    started = time.perf_counter()
    marks: list[float] = []
    pieces: list[str] = []
    timings: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise BenchError(f"HTTP {response.status_code}: {text[:500]}")
        async for line in response.aiter_lines():
            event = _event(line)
            if event is None:
                continue
            if "error" in event:
                raise BenchError(f"the stream ended in an error: {event['error']}")
            timings = event.get("timings") or timings
            text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
            if text:
                marks.append(time.perf_counter())
                pieces.append(text)
    ended = time.perf_counter()
    if not marks:
        raise BenchError("the stream ended without any text")
    gaps = tuple((later - earlier) * 1e3 for earlier, later in itertools.pairwise(marks))
    return Sample(
        (marks[0] - started) * 1e3, (ended - started) * 1e3, len(marks), "".join(pieces), timings, gaps
    )


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("data:"):
        return None
    data = line[len("data:") :].strip()
    if not data or data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    return event


async def served_model(client: httpx.AsyncClient) -> str:
    """Name of the first served model. Raises BenchError when the server does not answer."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError) as error:
        raise BenchError(f"no model server answers at {client.base_url}: {error}") from None
