"""Time to first token, split so that the parts add up.

TTFT runs from the server receiving the request to the first token being sent to the caller. Stamps on one
clock (`time.monotonic_ns`, shared by every process of the host) cut it in four segments, and each in its
parts:

    first bytes seen   arrival
       │  queue        receive   the whole request read and checked            → parsed
       │               tokenize  template and tokenizer, and the wait for them → tokenized
       │               submit    on the way to the engine process              → queued
       │               wait      until a step takes it in                      → admitted
       │               schedule  the step's own preparation                    → prefill start
    first chunk starts
       │  prefill      compute   its share, by tokens, of the steps that computed its chunks
       │               blocked   the rest: others in those steps, steps without it, preemption
    last chunk ends    prefill end
       │  decode       sample    the token picked                              → sampled
       │               deliver   on the way to the API process                 → delivered
       │               detokenize                                              → detokenized
       │               hold      further tokens until there is text to show    → handed over
    handed over
       │  transport    write     headers and first chunk on the wire           → written
    written

Written: nothing of it waits on this side any more, neither in this process nor (on Linux) unsent in the
kernel, as it would for a caller who does not read. The acknowledgement by the caller's TCP stack is reported
beside TTFT and is no part of it: it has the way back in it, and the delay with which TCP acknowledges, so it
would be more than the caller waited.

A response that is not streamed has no first token on the wire: its TTFT ends at the hand-over, and its
transport is 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import ceil

PARTS = {
    "queue": ("receive", "tokenize", "submit", "wait", "schedule"),
    "prefill": ("compute", "blocked"),
    "decode": ("sample", "deliver", "detokenize", "hold"),
    "transport": ("write",),
}
SEGMENTS = tuple(PARTS)
LENGTH_BOUNDS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_NS_PER_MS = 1_000_000


@dataclass(slots=True)
class Stamps:
    """When things happened to one request; nanoseconds, monotonic. None: not (yet), or not known.

    computing_ns is a duration: of the time from prefill start to prefill end, what was its own.
    """

    arrival_ns: int
    parsed_ns: int | None = None
    tokenized_ns: int | None = None
    queued_ns: int | None = None
    admitted_ns: int | None = None
    prefill_start_ns: int | None = None
    prefill_end_ns: int | None = None
    sampled_ns: int | None = None
    delivered_ns: int | None = None
    detokenized_ns: int | None = None
    handed_over_ns: int | None = None
    written_ns: int | None = None
    computing_ns: int = 0

    def in_order(self) -> list[int | None]:
        """The ends of the parts; prefill has one for both of its own."""
        return [getattr(self, name) for name in _ENDS]

    def forget_after(self, end_ns: int) -> None:
        """What happened after a request had ended is no part of it."""
        for name in _ENDS:
            stamp = getattr(self, name)
            if stamp is not None and stamp > end_ns:
                setattr(self, name, None)

    @property
    def segment(self) -> str | None:
        """The segment that is not over yet; None when the first token is written."""
        ends = (self.prefill_start_ns, self.prefill_end_ns, self.handed_over_ns, self.written_ns)
        if self.written_ns is not None:
            return None
        known = max((place for place, end in enumerate(ends) if end is not None), default=-1)
        return SEGMENTS[known + 1]


_ENDS = tuple(field.name for field in fields(Stamps) if field.name not in ("arrival_ns", "computing_ns"))


@dataclass(frozen=True, slots=True)
class Segments:
    """The four segments of one request's TTFT, in whole nanoseconds, so that their sum is exact."""

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


@dataclass(frozen=True, slots=True)
class Account:
    """One request's TTFT, or what there is of it, in parts.

    parts_ns: whole nanoseconds in the order of PARTS. Segments are sums of parts and TTFT is the sum of
    segments, so that everything adds up to the nanosecond.
    """

    parts_ns: tuple[int, ...]

    @property
    def segments(self) -> Segments:
        q, p, d = _FIRST_PARTS
        parts = self.parts_ns
        return Segments(sum(parts[:q]), sum(parts[q:p]), sum(parts[p:d]), sum(parts[d:]))

    def parts(self) -> dict[tuple[str, str], int]:
        """Nanoseconds by segment and part."""
        return dict(zip(_PART_KEYS, self.parts_ns, strict=True))

    def to_json(self) -> dict[str, float]:
        """Milliseconds of every part, as responses carry them."""
        return {f"{part}_ms": ns / _NS_PER_MS for (_, part), ns in self.parts().items()}

    def server_timing(self) -> str:
        """The `Server-Timing` header (W3C Server Timing): all that is over at the hand-over, in milliseconds.

        The segments and their total first, then the parts they are made of.
        """
        segments = self.segments
        shown = [
            ("queue", segments.queue_ns),
            ("prefill", segments.prefill_ns),
            ("decode", segments.decode_ns),
        ]
        shown.append(("total", segments.ttft_ns - segments.transport_ns))
        shown += [(part, ns) for (segment, part), ns in self.parts().items() if segment != "transport"]
        return ", ".join(f"{name};dur={ns / _NS_PER_MS:.6f}" for name, ns in shown)


_PART_KEYS = tuple((segment, part) for segment, parts in PARTS.items() for part in parts)
_FIRST_PARTS = tuple(accumulate(len(parts) for parts in PARTS.values()))[:-1]
_PREFILL = _PART_KEYS.index(("prefill", "compute"))


def account(stamps: Stamps, end_ns: int | None = None) -> Account:
    """Cut the stamps in parts whose sum is the last stamp minus the arrival.

    end_ns: with it the account goes up to that moment: the part that was under way gets the time since the
    last stamp, those after it nothing. A stamp that is not known, or earlier than the one before it, counts
    as equal to the one before it: a part is never negative.
    """
    ends = stamps.in_order()
    if end_ns is not None:
        place = max((place for place, end in enumerate(ends) if end is not None), default=-1) + 1
        ends[place:] = [end_ns] * (len(ends) - place)
    lengths, moment = [], stamps.arrival_ns
    for end in ends:
        if end is None or end <= moment:
            lengths.append(0)
        else:
            lengths.append(end - moment)
            moment = end
    compute = min(stamps.computing_ns, lengths[_PREFILL])
    lengths[_PREFILL : _PREFILL + 1] = (compute, lengths[_PREFILL] - compute)
    return Account(tuple(lengths))


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


@dataclass(frozen=True, slots=True)
class _Entry:
    at_ns: int
    segments: Segments
    prompt_tokens: int
    cached_tokens: int


class TtftWindow:
    """The last requests that got their first token: at most `limit` of them, none older than `seconds`."""

    def __init__(self, limit: int = 2000, seconds: float = 300.0) -> None:
        self.seconds = seconds
        self._entries: deque[_Entry] = deque(maxlen=limit)

    def add(self, now_ns: int, segments: Segments, prompt_tokens: int, cached_tokens: int = 0) -> None:
        self._entries.append(_Entry(now_ns, segments, prompt_tokens, cached_tokens))

    def ttft(self, now_ns: int) -> dict[str, object]:
        """Count, quantiles and mean segments in milliseconds, as in the state JSON."""
        recent = self._recent(now_ns)
        means = {
            name: sum(getattr(entry.segments, f"{name}_ns") for entry in recent) / len(recent) / _NS_PER_MS
            if recent
            else None
            for name in SEGMENTS
        }
        values = quantiles((entry.segments.ttft_ns / _NS_PER_MS for entry in recent), "_ms")
        return {"count": len(recent), **values, "segments_ms": means, "window_seconds": self.seconds}

    def prompt_tokens(self, now_ns: int) -> dict[str, float | None]:
        return quantiles(entry.prompt_tokens for entry in self._recent(now_ns))

    def lengths(self, now_ns: int) -> dict[str, object]:
        """How long prompts are, and how much of them had to be computed: requests per range of lengths.

        A range is named by its upper end and begins above the end of the one before it; empty ones are left
        out.
        """
        recent = self._recent(now_ns)
        return {
            "count": len(recent),
            "window_seconds": self.seconds,
            "prompt_tokens": histogram(entry.prompt_tokens for entry in recent),
            "computed_tokens": histogram(entry.prompt_tokens - entry.cached_tokens for entry in recent),
        }

    def _recent(self, now_ns: int) -> list[_Entry]:
        oldest = now_ns - int(self.seconds * 1e9)
        while self._entries and self._entries[0].at_ns < oldest:
            self._entries.popleft()
        return list(self._entries)


def histogram(lengths: Iterable[int]) -> dict[str, int]:
    """How many lengths are in each range; see `TtftWindow.lengths`."""
    counts = [0] * (len(LENGTH_BOUNDS) + 1)
    for length in lengths:
        counts[bisect_left(LENGTH_BOUNDS, length)] += 1
    names = (*map(str, LENGTH_BOUNDS), "+Inf")
    return {name: count for name, count in zip(names, counts, strict=True) if count}
