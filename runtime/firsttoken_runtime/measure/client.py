"""One streamed request to an OpenAI-compatible server, timed from outside.

Everything is measured where a user is: from just before the request is written (a new connection included,
where the pool has none free) to the chunk that brings the first text. The server's own account of that time
(`timings` of the last event, the `Server-Timing` header) travels along, to be laid beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx


class BenchError(Exception):
    """The server could not be measured; the text says why and what to do."""


class RequestError(BenchError):
    """One request failed. `kind` is short and the same for all failures of a kind, so it can be counted."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


@dataclass(frozen=True)
class Sample:
    """What one request took, in milliseconds from the moment it was sent.

    gaps_ms: times between chunks of text. timings: the server's account, `NAME_ms` and counts.
    prompt_tokens, output_tokens, cached_tokens: the server's `usage`, None where it does not say.
    """

    ttft_ms: float
    total_ms: float
    chunks: int
    text: str
    timings: dict[str, Any] = field(default_factory=dict)
    gaps_ms: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def tpot_ms(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1): milliseconds per token after the first; None for one token."""
        tokens = self.output_tokens if self.output_tokens is not None else self.chunks
        return (self.total_ms - self.ttft_ms) / (tokens - 1) if tokens > 1 else None


@dataclass(frozen=True)
class Dialect:
    """What of the OpenAI API, and beyond it, the server understands.

    chat: /v1/chat/completions instead of /v1/completions. ignore_eos: answers have the length asked for.
    stream_usage: the stream ends with token counts.
    """

    chat: bool = False
    ignore_eos: bool = True
    stream_usage: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
        """A greedy streamed request, so that every server does the same work for it."""
        asked: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.stream_usage:
            asked["stream_options"] = {"include_usage": True}
        return asked


async def complete(
    client: httpx.AsyncClient,
    model: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    dialect: Dialect = Dialect(),
    timeout_seconds: float = 600.0,
) -> Sample:
    """Send one greedy streaming completion and time it. Raises RequestError when it does not succeed."""
    body = dialect.body(model, prompt, max_tokens)
    reading = _Reading(time.perf_counter())
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            client.stream(
                "POST", dialect.path, json=body, headers={"Accept-Encoding": "identity"}
            ) as response,
        ):
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                status = response.status_code
                raise RequestError(f"HTTP {status}", f"HTTP {status}: {text[:500]}", status)
            reading.timings.update(server_timing(response.headers.get("server-timing", "")))
            async for data, now in _events(response):
                reading.take(data, now)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise RequestError("connect", f"cannot connect to {client.base_url}: {error}") from None
    except (TimeoutError, httpx.TimeoutException):
        raise RequestError("timeout", f"no complete answer within {timeout_seconds:g} s") from None
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise RequestError("disconnected", f"the connection broke: {why}") from None
    return reading.sample()


async def _events(response: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """The data of every server-sent event, with the time its bytes were read. Ends at `[DONE]`."""
    rest = b""
    async for piece in response.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data, now


class _Reading:
    """What the events of one answer add up to."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.last: float | None = None
        self.marks: list[float] = []
        self.pieces: list[str] = []
        self.timings: dict[str, Any] = {}
        self.usage: Mapping[str, Any] = {}

    def take(self, data: bytes, now: float) -> None:
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestError("stream error", f"the stream ended in an error: {event['error']}")
            choices = event.get("choices") or ()
            text = "".join(_text(choice) for choice in choices)
            self.timings.update(event.get("timings") or {})
            self.usage = event.get("usage") or self.usage
        except (ValueError, AttributeError, TypeError):
            shown = data[:200].decode(errors="replace")
            raise RequestError("bad event", f"not an event of the OpenAI API: {shown}") from None
        if choices:
            self.last = now
        if text:
            self.marks.append(now)
            self.pieces.append(text)

    def sample(self) -> Sample:
        if not self.marks or self.last is None:
            raise RequestError("no text", "the stream ended without any text")
        gaps = tuple((later - earlier) * 1e3 for earlier, later in itertools.pairwise(self.marks))
        details = self.usage.get("prompt_tokens_details") or {}
        return Sample(
            ttft_ms=(self.marks[0] - self.started) * 1e3,
            total_ms=(self.last - self.started) * 1e3,
            chunks=len(self.marks),
            text="".join(self.pieces),
            timings=self.timings,
            gaps_ms=gaps,
            prompt_tokens=_count(self.usage.get("prompt_tokens"), self.timings.get("prompt_tokens")),
            output_tokens=_count(self.usage.get("completion_tokens"), self.timings.get("completion_tokens")),
            cached_tokens=_count(details.get("cached_tokens"), self.timings.get("cached_tokens")),
        )


def _text(choice: Mapping[str, Any]) -> str:
    """The text of one choice of an event: of a completion, of a chat, or of its thinking."""
    delta = choice.get("delta") or {}
    thinking = delta.get("reasoning_content") or delta.get("reasoning")
    return choice.get("text") or delta.get("content") or thinking or ""


def _count(*candidates: Any) -> int | None:
    return next(
        (value for value in candidates if isinstance(value, int) and not isinstance(value, bool)), None
    )


def server_timing(header: str) -> dict[str, float]:
    """`NAME_ms` by the metrics of a `Server-Timing` header (W3C); those without a duration are left out."""
    parts: dict[str, float] = {}
    for metric in header.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            try:
                if key.strip().lower() == "dur":
                    parts[f"{name}_ms"] = float(value.strip().strip('"'))
            except ValueError:
                continue
    return parts


async def probe(
    client: httpx.AsyncClient, model: str, prompt: str, dialect: Dialect, timeout_seconds: float
) -> tuple[Dialect, Sample]:
    """Send a first request and find out what the server does not understand, least important first.

    Some servers refuse fields they do not know with 400 or 422: those two fields are left out then, and the
    report says so. Raises BenchError when the server refuses even a plain request.
    """
    attempts = dict.fromkeys(
        (
            dialect,
            replace(dialect, stream_usage=False),
            replace(dialect, ignore_eos=False),
            replace(dialect, stream_usage=False, ignore_eos=False),
        )
    )
    first: RequestError | None = None
    for attempt in attempts:
        try:
            return attempt, await complete(
                client, model, prompt, 8, dialect=attempt, timeout_seconds=timeout_seconds
            )
        except RequestError as error:
            first = first or error
            if error.status not in (400, 422):
                break
    assert first is not None
    raise BenchError(f"the server did not answer a first request for model {model!r}: {first}") from None
