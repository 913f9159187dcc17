"""How long a request that comes now would wait for its first token.

Two things hold it up, and the longer one counts: the prompt tokens that are computed before its own, at the
measured speed of prefill, and the sequences that must end before there is a place and pages for it, at the
measured time that a sequence stays. What comes later and goes before it is not known; `Calibration` knows how
much that is usually.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from firsttoken_runtime.engine.prefill_cost import PrefillCost, pairs
from firsttoken_runtime.engine.scheduler import PageView, ScheduleSettings, order_of, uncached_left
from firsttoken_runtime.engine.sequence import Sequence

_HALF_LIFE_TOKENS = 4096
_RECENT = 64
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 4.0


class PrefillRate:
    """Prompt tokens per second of recent steps, along with what decoded beside them."""

    def __init__(self, tokens_per_second: float | None) -> None:
        self._tokens = self._seconds = 0.0
        if tokens_per_second:
            # Worth some hundred tokens: the first real steps soon weigh more.
            self._tokens = _HALF_LIFE_TOKENS / 16
            self._seconds = self._tokens / tokens_per_second

    def learn(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens. Older steps fade by tokens, not by steps: many tiny prompts
        say little about speed."""
        keep = 0.5 ** (tokens / _HALF_LIFE_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """None before anything was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def seconds(self, tokens: int) -> float | None:
        rate = self.tokens_per_second
        return tokens / rate if rate else None


class Calibration:
    """How predictions turned out: measured over predicted, of the last 64 requests that got a token."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_RECENT)

    def learn(self, predicted_seconds: float, measured_seconds: float) -> None:
        if predicted_seconds > 0:
            self._ratios.append(measured_seconds / predicted_seconds)

    @property
    def factor(self) -> float:
        """What a prediction is multiplied by to hold nine times in ten: the ratios' P90, within 0.5 to 4."""
        if not self._ratios:
            return 1.0
        ratio = sorted(self._ratios)[len(self._ratios) * 9 // 10]
        return min(max(ratio, _LEAST_FACTOR), _MOST_FACTOR)

    def to_json(self) -> dict[str, Any]:
        ordered = sorted(self._ratios)
        quantiles = {
            f"p{part}": round(ordered[min(len(ordered) * part // 100, len(ordered) - 1)], 3)
            if ordered
            else None
            for part in (5, 50, 95)
        }
        return {"requests": len(ordered), "measured_over_predicted": quantiles}


@dataclass(frozen=True, slots=True)
class Load:
    """Who is here, and what is measured of them.

    cost: of prefill; None before enough steps, then `rate` stands in. stay_seconds: mean from admission to
    the end of a sequence; None before one ended.
    """

    running: Collection[Sequence]
    waiting: Collection[Sequence]
    pages: PageView
    settings: ScheduleSettings
    rate: PrefillRate
    cost: PrefillCost | None
    stay_seconds: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """seconds: from now to the first token. ahead: uncached prompt tokens that are computed before its own.

    waits: whether anything delays it at all.
    """

    seconds: float
    ahead: int
    waits: bool


def predict(sequence: Sequence, load: Load, now_ns: int) -> Prediction | None:
    """When a sequence that is not among the waiting ones yet would get its first token.

    Its prefix was looked up already. None before any prefill was measured. Linear in the sequences here.
    """
    settings, size, needs = load.settings, load.pages.page_tokens, load.pages.needs
    order = order_of(settings, now_ns, size)
    place = order(sequence)
    ahead = ahead_pairs = behind = before = 0
    needed = needs.needed(sequence) - sequence.hit.pages
    for other in load.waiting:
        left = uncached_left(other, size)
        if order(other) < place:
            ahead += left
            ahead_pairs += _pairs(other, size)
            before += 1
            needed += needs.needed(other) - other.hit.pages
        else:
            behind += left
    for other in load.running:
        needed += needs.missing(other)
        if other.in_prefill:
            if order(other) < place:
                ahead += other.left
                ahead_pairs += _pairs(other, size)
            else:
                behind += other.left
    own = uncached_left(sequence, size)
    own_pairs = _pairs(sequence, size)
    work = _prefill_seconds(ahead + own, ahead_pairs + own_pairs, behind, load)
    alone = _prefill_seconds(own, own_pairs, 0, load)
    if work is None or alone is None:
        return None
    ends = _ends_before(before, needed - load.pages.available, load)
    free_after = ends * (load.stay_seconds or 0.0) / max(len(load.running), 1)
    return Prediction(max(work, free_after + alone if ends else 0.0), ahead, bool(ahead or ends))


def _pairs(sequence: Sequence, page_tokens: int) -> int:
    left = uncached_left(sequence, page_tokens)
    return pairs(len(sequence.tokens) - left, left)


def _prefill_seconds(tokens: int, attended: int, behind: int, load: Load) -> float | None:
    """Until the step ends that computes the last of `tokens`; that step is filled up from those behind."""
    settings, cost = load.settings, load.cost
    decodes = sum(not sequence.in_prefill for sequence in load.running)
    budget = settings.prefill_tokens
    if settings.max_batch_tokens is not None:
        budget = settings.max_batch_tokens - decodes
    budget = max(budget, 1)
    steps = -(-tokens // budget)
    tokens = min(steps * budget, tokens + behind)
    if cost is None:
        return load.rate.seconds(tokens)
    per_step = cost.base + cost.per_decode * decodes
    return steps * per_step + tokens * cost.per_token + attended * cost.per_pair


def _ends_before(before: int, missing_pages: int, load: Load) -> int:
    """Running sequences that must end before one with `before` waiting ones ahead of it can start."""
    running = len(load.running)
    if not running:
        return 0
    if not load.settings.continuous:
        return running
    for_place = before + 1 - (load.settings.max_sequences - running)
    for_pages = 0
    if missing_pages > 0:
        held = sum(sequence.held for sequence in load.running)
        for_pages = -(-missing_pages * running // max(held, 1))
    return max(for_place, for_pages, 0)
