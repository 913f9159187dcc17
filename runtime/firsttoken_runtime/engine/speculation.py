"""Speculative decoding: tokens proposed ahead, and kept while they are what would be drawn anyway.

A decode chunk is the sequence's last token and k proposals, and the model answers for all k + 1 in one step:

    known  … t │ p1  p2  p3        computed:  t p1 p2 p3
    drawn      │ d1  d2  d3  d4    kept: d1; d2 if d1 = p1; d3 if also d2 = p2; …

Every draw is the one that decoding step by step would make, from the same logits with the same random number
(`sampling.uniform` of seed and position). So proposals change when tokens come and never which, for greedy
and drawn answers alike. The KV of proposals that were not drawn is overwritten, and enters no prefix tree.

Proposals are optional work. They are made only in steps that prefill nothing, from the step's own token
budget and from pages nobody waits for; nobody is preempted for them, and no request's first token waits
behind them, but for the one step that is under way when it comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from firsttoken_runtime.engine.ngram import NgramIndex
from firsttoken_runtime.engine.scheduler import Step
from firsttoken_runtime.engine.sequence import Sequence

# Positions filed in one step for all sequences together: some tenths of a millisecond.
_FILED_PER_STEP = 1024


NO_DRAFT = "no draft model was loaded; serve with --draft-model"


class Method(StrEnum):
    """Where proposals come from."""

    NGRAM = "ngram"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The switch's parameters. tokens: most proposals of one sequence in one step."""

    method: Method
    tokens: int


class DraftFailed(Exception):
    """The draft model raised; the text says what."""


class Proposer(Protocol):
    """What speculation needs of `draft.DraftModel`. Keys are `Sequence.number`."""

    def propose(self, wanted: Sequences[tuple[Sequence, int]]) -> dict[int, list[int]]: ...
    def forget(self, number: int) -> None: ...
    def clear(self) -> None: ...
    def set_fused_kernels(self, allowed: bool) -> None: ...


class Track:
    """What is known of one sequence's proposals.

    confidence: recent part of proposals that were drawn, of those that were reached; 0 to 1. While it is too
    low for a proposal to pay, it creeps up, so that one is tried again after a while.
    """

    __slots__ = ("confidence", "index")
    _AT_FIRST = 0.7
    _WEIGHT = 0.15
    _CREEP = 0.002

    def __init__(self) -> None:
        self.confidence = self._AT_FIRST
        self.index: NgramIndex | None = None

    def judged(self, proposed: int, accepted: int) -> None:
        """`accepted` were drawn; the one after, if there was one, was not; those behind say nothing."""
        for _ in range(accepted):
            self.confidence += self._WEIGHT * (1.0 - self.confidence)
        if accepted < proposed:
            self.confidence -= self._WEIGHT * self.confidence

    def rested(self) -> None:
        """It could have proposed, and was not let."""
        self.confidence = min(self.confidence + self._CREEP, self._AT_FIRST)


class StepCost:
    """Seconds of a decode step as base + rows x slope, fitted to recent steps.

    Least squares with forgetting, drawn towards the slope that prefill shows while the steps' sizes hardly
    differ.
    """

    _KEEP = 0.98
    _PRIOR_WEIGHT = 0.05

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        keep = self._KEEP
        self._weight = self._weight * keep + 1.0
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._rows_rows = self._rows_rows * keep + rows * rows
        self._rows_seconds = self._rows_seconds * keep + rows * seconds

    def line(self, prior_slope: float) -> tuple[float, float]:
        """base and slope, neither below 0; (0, 0) before the first step."""
        if self._weight == 0.0:
            return 0.0, 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = max(self._rows_rows / self._weight - rows * rows, 0.0)
        covariance = self._rows_seconds / self._weight - rows * seconds
        slope = (covariance + self._PRIOR_WEIGHT * prior_slope) / (variance + self._PRIOR_WEIGHT)
        slope = max(slope, 0.0)
        return max(seconds - slope * rows, 0.0), slope


# A proposal less likely than this is not made, however cheap.
_LEAST_LIKELY = 0.1


def allot(
    confidences: Sequences[float],
    rooms: Sequences[int],
    sequences: int,
    budget: int,
    base_seconds: float,
    row_seconds: float,
) -> list[int]:
    """How many proposals each sequence makes, so that the step yields the most tokens per second.

    confidences: chance of a proposal, given that those before it were drawn. rooms: most for each.
    sequences: all that decode in the step; each yields one token anyway. budget: proposals in all.
    """
    counts = [0] * len(rooms)
    seconds, tokens = base_seconds + row_seconds * sequences, float(sequences)
    likely = [
        (-confidence, place)
        for place, (confidence, room) in enumerate(zip(confidences, rooms, strict=True))
        if room > 0 and confidence >= _LEAST_LIKELY
    ]
    heapq.heapify(likely)
    for _ in range(budget):
        if not likely:
            break
        chance, place = -likely[0][0], likely[0][1]
        if chance * seconds < tokens * row_seconds:
            break  # a row more costs more than it can be expected to bring
        seconds, tokens = seconds + row_seconds, tokens + chance
        counts[place] += 1
        following = chance * confidences[place]
        if counts[place] < rooms[place] and following >= _LEAST_LIKELY:
            heapq.heapreplace(likely, (-following, place))
        else:
            heapq.heappop(likely)
    return counts


class Speculation:
    """Proposals of all sequences of one engine. `draft`: the draft model, if one was loaded."""

    def __init__(self, draft: Proposer | None = None) -> None:
        self.draft = draft
        self.settings: SpeculationSettings | None = None
        self.obstacle: str | None = None  # why the draft model cannot propose
        self.retry()
        self._cost = StepCost()
        self._drafts = self._proposed = self._accepted = 0
        self._recent_proposed = self._recent_accepted = 0.0

    def configure(self, settings: SpeculationSettings | None, fused_kernels: bool) -> None:
        """In force from the next step on; None proposes nothing."""
        self.settings = settings
        if self.draft is not None:
            self.draft.set_fused_kernels(fused_kernels)
            if settings is None or settings.method is not Method.DRAFT:
                self.draft.clear()

    def retry(self) -> None:
        """Let a draft model that failed try again."""
        self.obstacle = NO_DRAFT if self.draft is None else None

    def propose(self, step: Step, page_tokens: int, seconds_per_row: float) -> dict[int, list[int]]:
        """Proposals for the step's decodes, by Sequence.number.

        seconds_per_row: of prefill, what a row may cost as long as nothing better is known.
        Raises DraftFailed, once: the draft model is not asked again before `retry`.
        """
        settings = self.settings
        if settings is None or step.spare_tokens <= 0 or not step.decodes:
            return {}
        able = [sequence for sequence in step.decodes if may_speculate(sequence)]
        rooms = self._rooms(able, step.spare_pages, page_tokens, settings.tokens)
        found: dict[int, list[int]] = {}
        if settings.method is Method.NGRAM:
            found = self._look_up(able, rooms)
            rooms = [len(found.get(sequence.number, ())) for sequence in able]
        tracks = [_track(sequence) for sequence in able]
        base, slope = self._cost.line(seconds_per_row)
        confidences = [track.confidence for track in tracks]
        counts = allot(confidences, rooms, len(step.decodes), step.spare_tokens, base, slope)
        for track, room, count in zip(tracks, rooms, counts, strict=True):
            if room and not count:
                track.rested()
        wanted = [(sequence, count) for sequence, count in zip(able, counts, strict=True) if count]
        if settings.method is Method.NGRAM:
            return {sequence.number: found[sequence.number][:count] for sequence, count in wanted}
        return self._ask_draft(wanted) if wanted else {}

    def _ask_draft(self, wanted: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        if self.draft is None:
            return {}
        try:
            return self.draft.propose(wanted)
        except Exception as error:
            self.draft.clear()
            words = " ".join(f"{type(error).__name__}: {error}".split())
            self.obstacle = f"the draft model failed: {words}"[:300]
            raise DraftFailed(self.obstacle) from error

    def judged(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Of a sequence's proposals so many were drawn."""
        _track(sequence).judged(proposed, accepted)
        self._drafts += 1
        self._proposed += proposed
        self._accepted += accepted
        keep = 0.5 ** (proposed / _HALF_LIFE_PROPOSALS)
        self._recent_proposed = self._recent_proposed * keep + proposed
        self._recent_accepted = self._recent_accepted * keep + accepted

    def stepped(self, rows: int, seconds: float) -> None:
        """A step that only decoded took so long, its proposals included."""
        if self.settings is not None:
            self._cost.add(rows, seconds)

    def forget(self, sequence: Sequence) -> None:
        """It ended."""
        sequence.speculation = None
        if self.draft is not None:
            self.draft.forget(sequence.number)

    def to_json(self) -> dict[str, Any]:
        """Counts since the start, and the recent part of proposals that were drawn (absent before any)."""
        recent = self._recent_proposed
        return {
            "spec_drafts": self._drafts,
            "spec_proposed_tokens": self._proposed,
            "spec_accepted_tokens": self._accepted,
            **({"spec_acceptance_rate": round(self._recent_accepted / recent, 4)} if recent else {}),
        }

    def _rooms(self, able: list[Sequence], spare_pages: int, page_tokens: int, most: int) -> list[int]:
        """Most proposals of each, by what is left of its answer and of the pages."""
        rooms = []
        for sequence in able:
            # The last token of an answer is never computed, so nothing is proposed behind it.
            room = min(most, sequence.max_tokens - sequence.output_len - 1)
            known = len(sequence.tokens)
            held = max(len(sequence.pages), -(-known // page_tokens))
            extra = -(-(known + room) // page_tokens) - held
            if extra > spare_pages:
                extra = spare_pages
                room = (held + extra) * page_tokens - known
            spare_pages -= max(extra, 0)
            rooms.append(room)
        return rooms

    def _look_up(self, able: list[Sequence], rooms: list[int]) -> dict[int, list[int]]:
        left = _FILED_PER_STEP
        found = {}
        for sequence, room in zip(able, rooms, strict=True):
            track = _track(sequence)
            if track.index is None:
                track.index = NgramIndex()
            left -= track.index.catch_up(sequence.tokens, left)
            if room > 0 and (tokens := track.index.continuation(sequence.tokens, room)):
                found[sequence.number] = tokens
        return found


_HALF_LIFE_PROPOSALS = 1024


def may_speculate(sequence: Sequence) -> bool:
    """Not where what may be drawn depends on the tokens drawn before: bias, penalties, a grammar."""
    return sequence.token_counts is None and sequence.constraint is None


def _track(sequence: Sequence) -> Track:
    if sequence.speculation is None:
        sequence.speculation = Track()
    return sequence.speculation
