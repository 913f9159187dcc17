"""Time to first token, split so that the parts add up.

TTFT runs from the server receiving the request to the first token being written to the caller. Five stamps
on one clock (`time.monotonic_ns`, shared by every process of the host) cut it in four segments:

    arrival
       │  queue      validation, tokenising, waiting for the engine
    prefill start
       │  prefill    computing the prompt
    prefill end
       │  decode     sampling, the way to the API process, detokenising
    handed over
       │  transport  headers and first chunk given to the socket
    written

A response that is not streamed has no first token on the wire: its TTFT ends at the hand-over, and its
transport is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

SEGMENTS = ("queue", "prefill", "decode", "transport")
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Segments:
    """The four parts of one request's TTFT, in whole nanoseconds, so that their sum is exact."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    transport_ns: int

    @property
    def ttft_ns(self) -> int:
        return self.queue_ns + self.prefill_ns + self.decode_ns + self.transport_ns

    def seconds(self) -> dict[str, float]:
        """Seconds by segment name."""
        return {name: getattr(self, f"{name}_ns") / 1e9 for name in SEGMENTS}

    def to_json(self) -> dict[str, float]:
        """Milliseconds under the names that responses carry; six decimals, so nothing is rounded away."""
        parts = {f"{name}_ms": getattr(self, f"{name}_ns") / _NS_PER_MS for name in SEGMENTS}
        return {**parts, "ttft_ms": self.ttft_ns / _NS_PER_MS}

    def server_timing(self) -> str:
        """The `Server-Timing` header (W3C Server Timing): everything up to the hand-over, in milliseconds."""
        parts = [("queue", self.queue_ns), ("prefill", self.prefill_ns), ("decode", self.decode_ns)]
        parts.append(("total", self.ttft_ns - self.transport_ns))
        return ", ".join(f"{name};dur={ns / _NS_PER_MS:.6f}" for name, ns in parts)


def segments(
    arrival_ns: int, prefill_start_ns: int, prefill_end_ns: int, handed_over_ns: int, written_ns: int
) -> Segments:
    """Cut five stamps in four segments whose sum is `written_ns - arrival_ns`.

    A stamp earlier than the one before it counts as equal to it: a segment is never negative.
    """
    start = max(arrival_ns, prefill_start_ns)
    end = max(start, prefill_end_ns)
    handed = max(end, handed_over_ns)
    written = max(handed, written_ns)
    return Segments(start - arrival_ns, end - start, handed - end, written - handed)


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Nearest-rank quantile of sorted, non-empty values: a value that was really measured."""
    return ordered[max(ceil(fraction * len(ordered)), 1) - 1]


def quantiles(values: Iterable[float], suffix: str = "") -> dict[str, float | None]:
    """`p50`, `p95`, `p99` (with the suffix) of the values; None for each when there are none."""
    ordered = sorted(values)
    return {
        f"p{per_cent}{suffix}": quantile(ordered, per_cent / 100) if ordered else None
        for per_cent in (50, 95, 99)
    }


class TtftWindow:
    """The last requests that got their first token: at most `limit` of them, none older than `seconds`."""

    def __init__(self, limit: int = 2000, seconds: float = 300.0) -> None:
        self.seconds = seconds
        self._entries: deque[tuple[int, Segments, int]] = deque(maxlen=limit)

    def add(self, now_ns: int, segments: Segments, prompt_tokens: int) -> None:
        self._entries.append((now_ns, segments, prompt_tokens))

    def ttft(self, now_ns: int) -> dict[str, object]:
        """Count, quantiles and mean segments in milliseconds, as in the state JSON."""
        recent = self._recent(now_ns)
        means = {
            name: sum(getattr(parts, f"{name}_ns") for parts, _ in recent) / len(recent) / _NS_PER_MS
            if recent
            else None
            for name in SEGMENTS
        }
        values = quantiles((parts.ttft_ns / _NS_PER_MS for parts, _ in recent), "_ms")
        return {"count": len(recent), **values, "segments_ms": means, "window_seconds": self.seconds}

    def prompt_tokens(self, now_ns: int) -> dict[str, float | None]:
        return quantiles(tokens for _, tokens in self._recent(now_ns))

    def _recent(self, now_ns: int) -> list[tuple[Segments, int]]:
        oldest = now_ns - int(self.seconds * 1e9)
        while self._entries and self._entries[0][0] < oldest:
            self._entries.popleft()
        return [(parts, tokens) for _, parts, tokens in self._entries]
