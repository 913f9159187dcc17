"""Who is told of requests: metrics, the window of the state, the list of requests, and traces when they are
on."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from firsttoken_runtime.api.timeline import Ended, Timeline
from firsttoken_runtime.metrics import Metrics
from firsttoken_runtime.timing import PARTS, TtftWindow
from firsttoken_runtime.tracing import SegmentSpan, SpanRecord, Tracing, Value

KEPT_REQUESTS = 1000


class Order(StrEnum):
    SLOWEST = "slowest"
    NEWEST = "newest"


class Ledger:
    """The requests that run, and the last ones that ended, without a word of their prompts or answers."""

    def __init__(self, kept: int = KEPT_REQUESTS) -> None:
        self._running: dict[int, Timeline] = {}  # by identity: callers may use an id twice at once
        self._ended: deque[Timeline] = deque(maxlen=kept)

    def began(self, timeline: Timeline) -> None:
        self._running[id(timeline)] = timeline

    def ended(self, timeline: Timeline) -> None:
        self._running.pop(id(timeline), None)
        # An overload refuses many, and they would push out what there is to learn from.
        if timeline.state is not Ended.REFUSED:
            self._ended.append(timeline)

    def running(self) -> list[dict[str, Any]]:
        """The oldest first."""
        return [_entry(timeline) for timeline in self._running.values()]

    def finished(self, order: Order, limit: int) -> list[dict[str, Any]]:
        """At most `limit` of those kept. Slowest: by TTFT, or by the time until they ended without one."""
        newest = list(reversed(self._ended))
        if order is Order.SLOWEST:
            newest.sort(key=lambda timeline: timeline.account.segments.ttft_ns, reverse=True)
        return [_entry(timeline) for timeline in newest[:limit]]


def _entry(timeline: Timeline) -> dict[str, Any]:
    """One request as `GET /admin/v1/requests` shows it."""
    facts, account = timeline.facts, timeline.account
    segments = account.segments.to_json()
    so_far_ms = segments.pop("ttft_ms")
    written = timeline.stamps.written_ns is not None
    now_ns = timeline.clock()
    return {
        "id": facts.id,
        "state": timeline.state.value if timeline.state else "running",
        "segment": timeline.segment,
        "ttft_ms": so_far_ms if written else None,
        "without_first_token_ms": None if written else so_far_ms,
        **segments,
        "parts": account.to_json(),
        **timeline.ack_json(),
        "arrived_at": round(time.time() - (now_ns - timeline.stamps.arrival_ns) / 1e9, 3),
        "total_ms": ((timeline.ended_ns or now_ns) - timeline.stamps.arrival_ns) / 1e6,
        **timeline.counts_json(),
        "operation": facts.operation,
        "stream": facts.stream,
        "choices": facts.choices,
        "priority": facts.priority,
        "finish_reasons": list(timeline.finish_reasons),
        "error": timeline.error_code or None,
    }


@dataclass
class Recorder:
    """Tells everyone; see `timeline.Recorder`."""

    metrics: Metrics
    window: TtftWindow = field(default_factory=TtftWindow)
    ledger: Ledger = field(default_factory=Ledger)
    tracing: Tracing | None = None

    def began(self, timeline: Timeline) -> None:
        self.ledger.began(timeline)

    def token(self, gap_seconds: float | None) -> None:
        self.metrics.token(gap_seconds)

    def first_token(self, timeline: Timeline) -> None:
        account = timeline.account
        written_ns = timeline.stamps.written_ns
        assert written_ns is not None
        self.window.add(written_ns, account.segments, timeline.prompt_tokens, timeline.cached_tokens)
        self.metrics.first_token(account, timeline.prompt_tokens)

    def ended(self, timeline: Timeline) -> None:
        self.ledger.ended(timeline)
        if timeline.state is Ended.FINISHED:
            self.metrics.finished(
                timeline.finish_reasons[-1],
                timeline.completion_tokens,
                timeline.stamps.arrival_ns,
                timeline.stamps.prefill_start_ns or timeline.stamps.arrival_ns,
                timeline.first_token_ns,
                timeline.last_token_ns,
                timeline.facts.choices,
            )

    def acknowledged(self, seconds: float | None) -> None:
        self.metrics.acknowledged(seconds)

    def complete(self, timeline: Timeline) -> None:
        if timeline.state is Ended.ABORTED:
            self.metrics.aborted(timeline.segment or "answer")
        if self.tracing is not None and timeline.state is not Ended.REFUSED:
            to_wall_ns = time.time_ns() - timeline.clock()
            self.tracing.take(span_record(timeline, self.metrics.model_name, to_wall_ns))


def span_record(timeline: Timeline, model: str, to_wall_ns: int) -> SpanRecord:
    """The trace of a request that has ended. to_wall_ns: what makes of its clock nanoseconds since 1970."""
    facts, account, stamps = timeline.facts, timeline.account, timeline.stamps
    written = stamps.written_ns is not None
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": facts.operation,
        "gen_ai.provider.name": "firsttoken",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": facts.id,
        "gen_ai.request.stream": facts.stream,
        **{f"gen_ai.request.{name}": value for name, value in facts.sampling.items()},
        "gen_ai.usage.input_tokens": timeline.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
        "gen_ai.usage.output_tokens": timeline.completion_tokens,
        "firsttoken.chunks": timeline.chunks,
        "firsttoken.preemptions": timeline.preemptions,
    }
    if facts.choices != 1:
        attributes["gen_ai.request.choice.count"] = facts.choices
    if timeline.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = tuple(timeline.finish_reasons)
    if written:
        attributes["firsttoken.ttft"] = account.segments.ttft_ns / 1e9
        if facts.stream:
            attributes["gen_ai.response.time_to_first_chunk"] = account.segments.ttft_ns / 1e9
    if timeline.state is not Ended.FINISHED:
        attributes["error.type"] = timeline.error_code or str(timeline.state)
    begin_ns = stamps.arrival_ns + to_wall_ns
    return SpanRecord(
        f"{facts.operation} {model}",
        begin_ns,
        timeline.ended_ns + to_wall_ns,
        attributes,
        _segment_spans(timeline, begin_ns),
        failed=timeline.state is Ended.FAILED,
        parent={"traceparent": facts.traceparent, "tracestate": facts.tracestate},
    )


def _segment_spans(timeline: Timeline, begin_ns: int) -> tuple[SegmentSpan, ...]:
    """One after the other, from the arrival to the first token, or to where the request ended."""
    parts = timeline.account.parts()
    spans: list[SegmentSpan] = []
    for segment, names in PARTS.items():
        lengths = {name: parts[segment, name] for name in names}
        end_ns = begin_ns + sum(lengths.values())
        attributes = {f"firsttoken.{segment}.{name}": ns / 1e9 for name, ns in lengths.items()}
        spans.append(SegmentSpan(segment, begin_ns, end_ns, attributes))
        begin_ns = end_ns
        if segment == timeline.segment:
            break
    return tuple(spans)
