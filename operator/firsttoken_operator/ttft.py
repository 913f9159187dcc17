"""Time to first token in status, from what the pods measure; rewritten only when it changed materially."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firsttoken_api.quantity import QuantityError, format_duration, parse_duration
from firsttoken_api.resources.inference_service_status import SegmentStatus, TtftStatus
from firsttoken_operator.runtime_client import PodState

QUANTILES = ("p50", "p95", "p99")
SEGMENTS = ("queue", "prefill", "decode", "transport")
# A status write per request would be noise: values within this of the shown ones leave the status alone.
MATERIAL_FRACTION = 0.1
MATERIAL_SECONDS = 0.001
# How sure the figures are grows with the requests behind them; a count that is half as large again is news.
MATERIAL_COUNT = 1.5


def ttft_status(states: Sequence[PodState], previous: TtftStatus | None) -> TtftStatus | None:
    """TTFT over all pods; None while no pod has served a request in its window.

    Quantiles are those of the slowest pod, because quantiles of several pods cannot be put together exactly;
    segments are means over all requests. `previous` comes back unchanged while nothing changed materially.
    """
    measured = [(count, state.ttft) for state in states if (count := _count(state.ttft)) > 0]
    if not measured:
        return None
    total = sum(count for count, _ in measured)
    found = TtftStatus(
        count=total,
        window_seconds=max((int(ttft.get("window_seconds") or 0) for _, ttft in measured), default=0) or None,
        **{name: _slowest([ttft for _, ttft in measured], name) for name in QUANTILES},
        segments=SegmentStatus(**{name: _mean(measured, total, name) for name in SEGMENTS}),
    )
    return previous if previous is not None and not _material(previous, found) else found


def _count(ttft: Mapping[str, Any]) -> int:
    count = ttft.get("count")
    return count if isinstance(count, int) else 0


def _number(value: Any) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        else None
    )


def _slowest(measured: Sequence[Mapping[str, Any]], name: str) -> str | None:
    values = [value for ttft in measured if (value := _number(ttft.get(f"{name}_ms"))) is not None]
    return format_duration(max(values) / 1000) if values else None


def _mean(measured: Sequence[tuple[int, Mapping[str, Any]]], total: int, name: str) -> str | None:
    values = [(count, _number((ttft.get("segments_ms") or {}).get(name))) for count, ttft in measured]
    if any(value is None for _, value in values):
        return None
    return format_duration(sum(count * (value or 0.0) for count, value in values) / total / 1000)


def _material(previous: TtftStatus, found: TtftStatus) -> bool:
    fewer, more = sorted((previous.count or 0, found.count or 0))
    if more >= MATERIAL_COUNT * fewer and more != fewer:
        return True
    pairs = [(getattr(previous, name), getattr(found, name)) for name in QUANTILES]
    before, now = previous.segments or SegmentStatus(), found.segments or SegmentStatus()
    pairs += [(getattr(before, name), getattr(now, name)) for name in SEGMENTS]
    return any(_differ(old, new) for old, new in pairs)


def _differ(old: str | None, new: str | None) -> bool:
    if old is None or new is None:
        return old != new
    one, other = _seconds(old), _seconds(new)
    return abs(one - other) > max(MATERIAL_SECONDS, MATERIAL_FRACTION * max(one, other))


def _seconds(text: str) -> float:
    """Seconds of a shown duration; 0 for `0ms`, which no input may be but a measurement can."""
    try:
        return parse_duration(text)
    except QuantityError:
        return 0.0
