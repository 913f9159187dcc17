"""Who computes how many tokens in the next step: a pure function of the sequences and the page counts.

1. Every running sequence keeps the promise that all its known tokens fit; where growth breaks it, the least
   urgent sequences are preempted (pages dropped, tokens kept, computed again later).
2. Everybody who decodes gets its one token.
3. The rest of the budget goes to prefill, most urgent first, several prompts in one step. Who cannot finish
   in this step leaves a floor to those behind it, so that short prompts get through beside a long one, and
   the oldest partial prefill always gets a floor, so that it ends in bounded time.
4. New sequences are admitted only when all their tokens fit beside what is promised. So prefill never runs
   out of pages midway, and what was preempted cannot come back before somebody else leaves: no thrashing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from firsttoken_runtime.engine.prefix import Hit
from firsttoken_runtime.engine.sequence import Sequence

# Waiting sequences looked at in one step, and how many may turn out not to fit before the look-up ends.
_CANDIDATES = 64
_BLOCKED = 4
_FLOOR_TOKENS = 32
_FLOOR_PARTS = 8  # a floor is an eighth of the budget

Key = tuple[float, ...]


class PageView(Protocol):
    """What the scheduler may ask about pages; asking changes nothing."""

    page_tokens: int

    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int: ...
    def probe(self, sequence: Sequence) -> Hit: ...
    def releasable(self, sequences: list[Sequence]) -> int: ...


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The switches and limits of one step.

    continuous: False forms static batches: whole prompts, first come first served, the next batch when the
    last member has ended. max_batch_tokens: of the whole step; None means prefill_tokens beside all that
    decode. chunk_size: most prompt tokens of one sequence; None computes whole prompts. by_priority: False is
    first come first served, and Request.priority is not looked at.
    """

    continuous: bool
    max_sequences: int
    max_batch_tokens: int | None
    prefill_tokens: int
    chunk_size: int | None
    by_priority: bool
    ageing_tokens_per_second: float
    max_wait_ns: int


@dataclass(frozen=True, slots=True)
class State:
    """What a step is decided on; `waiting` in any order."""

    running: Collection[Sequence]
    waiting: Collection[Sequence]
    pages: PageView


@dataclass(frozen=True, slots=True)
class Grant:
    """Prompt tokens that a sequence computes in this step. admitted: it was waiting until now."""

    sequence: Sequence
    tokens: int
    admitted: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A step's work. A sequence is in at most one of the three."""

    preempted: list[Sequence]
    decodes: list[Sequence]
    prefills: list[Grant]

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefills


def schedule(state: State, now_ns: int, settings: ScheduleSettings) -> Step:
    """Decide the next step. Changes nothing."""
    page_tokens = state.pages.page_tokens
    missing = 0
    for sequence in state.running:
        missing += -(-len(sequence.tokens) // page_tokens) - len(sequence.pages)
    spare = state.pages.available - missing
    if spare < 0:
        running, preempted = _without_victims(state, settings)
        # Hits and page counts were taken before these left, so nobody is admitted on them in this step.
        return _Planner(state, now_ns, settings, running, preempted, 0, may_admit=False).step()
    return _Planner(state, now_ns, settings, list(state.running), [], spare, may_admit=True).step()


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_tokens)


def _without_victims(state: State, settings: ScheduleSettings) -> tuple[list[Sequence], list[Sequence]]:
    """Those who stay and those who are preempted: the least urgent, as few as the others' growth needs.

    The order is strict and does not change while they run, so the most urgent one always gets on. One
    sequence always stays, and fits: longer ones than the pool are refused at admission.
    """
    staying = sorted(state.running, key=lambda sequence: _rank(sequence, settings))
    victims: list[Sequence] = []
    page_tokens = state.pages.page_tokens
    while len(staying) > 1:
        missing = sum(pages_for(len(s.tokens), page_tokens) - len(s.pages) for s in staying)
        if state.pages.available + state.pages.releasable(victims) >= missing:
            break
        victims.append(staying.pop())
    return staying, victims


def _rank(sequence: Sequence, settings: ScheduleSettings) -> Key:
    """Who keeps its pages: lower ranks first."""
    request = sequence.request
    return (request.priority if settings.by_priority else 0, request.arrival_ns, sequence.number)


def _arrival(sequence: Sequence) -> Key:
    return (sequence.request.arrival_ns, sequence.number)


class _Planner:
    """The working figures of one `schedule` call: what is left of budget, pages and places."""

    def __init__(
        self,
        state: State,
        now_ns: int,
        settings: ScheduleSettings,
        running: list[Sequence],
        preempted: list[Sequence],
        spare: int,
        may_admit: bool,
    ) -> None:
        self.pages = state.pages
        self.waiting = state.waiting
        self.now_ns = now_ns
        self.settings = settings
        self.running = running
        self.preempted = preempted
        self.spare = spare
        self.may_admit = may_admit
        self.places = settings.max_sequences - len(running)
        self.decodes: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        for sequence in running:
            (self.prefilling if sequence.in_prefill else self.decodes).append(sequence)
        self.grants: list[Grant] = []
        self.by_priority = settings.continuous and settings.by_priority
        self.order: Callable[[Sequence], Key] = self._urgency if self.by_priority else _arrival

    def step(self) -> Step:
        if self.waiting or self.prefilling:
            self._prefill()
        return Step(self.preempted, self.decodes, self.grants)

    def _prefill(self) -> None:
        settings = self.settings
        if not settings.continuous and self.running:
            self.may_admit = False  # a static batch takes nobody in until all its members have ended
        candidates = sorted([*self.prefilling, *self._candidates()], key=self.order)
        if settings.max_batch_tokens is None:
            budget = settings.prefill_tokens
        else:
            budget = settings.max_batch_tokens - len(self.decodes)
        if settings.chunk_size is None or not settings.continuous:
            self._whole(candidates, budget)
        else:
            self._chunks(candidates, budget, settings.chunk_size)

    def _candidates(self) -> list[Sequence]:
        """The waiting sequences worth a look, in no order."""
        if not self.may_admit or not self.waiting:
            return []
        if self.places > 0:
            return heapq.nsmallest(_CANDIDATES, self.waiting, key=self.order)
        if not self.by_priority:
            return []
        least = max(sequence.request.priority for sequence in self.running)
        above = [sequence for sequence in self.waiting if sequence.request.priority < least]
        return heapq.nsmallest(_BLOCKED, above, key=self.order)

    def _whole(self, candidates: list[Sequence], budget: int) -> None:
        """Whole prompts in order while the budget lasts, and one at least."""
        admission = _Admission(self)
        for sequence in candidates:
            left = self._left(sequence)
            if left > budget and self.grants:
                break
            if admission.open_to(sequence):
                left = self._left(sequence)
                admission.take(sequence, left)
                budget -= left

    def _chunks(self, candidates: list[Sequence], budget: int, chunk_size: int) -> None:
        """Chunks in order, with floors; what is over in the end goes to those who could not finish."""
        if budget <= 0:
            return
        floor = min(max(budget // _FLOOR_PARTS, min(_FLOOR_TOKENS, budget)), chunk_size)
        oldest = min((s for s in self.prefilling if s.computed), key=_arrival, default=None)
        reserved = min(floor, oldest.left, budget // 2) if oldest is not None else 0
        behind = sum(self._floor(sequence, floor) for sequence in candidates if sequence is not oldest)
        admission = _Admission(self)
        for sequence in candidates:
            if sequence is oldest:
                reserved = 0
            else:
                behind -= self._floor(sequence, floor)
            usable = budget - reserved
            if usable <= 0 or not admission.open_to(sequence):
                continue
            left = self._left(sequence)
            tokens = min(left, chunk_size)
            if left > usable or left > chunk_size:  # it cannot finish in this step
                tokens = min(tokens, max(usable - min(behind, usable // 2), min(floor, usable)))
            if sequence.handle is None and tokens < min(left, floor):
                continue  # a place and pages for a crumb
            admission.take(sequence, tokens)
            budget -= tokens
        for place, grant in enumerate(self.grants):
            more = min(self._left(grant.sequence), chunk_size) - grant.tokens
            if budget > 0 and more > 0:
                self.grants[place] = replace(grant, tokens=grant.tokens + min(more, budget))
                budget -= min(more, budget)

    def _floor(self, sequence: Sequence, floor: int) -> int:
        """What those before it leave to it: a floor, or all of a prompt that is hardly longer."""
        left = self._left(sequence)
        return left if left <= 2 * floor else floor

    def _left(self, sequence: Sequence) -> int:
        """Tokens it must compute; for a waiting one, by the last look into the prefix cache."""
        if sequence.handle is not None:
            return sequence.left
        return len(sequence.tokens) - sequence.hit.pages * self.pages.page_tokens

    def _urgency(self, sequence: Sequence) -> Key:
        """Overdue first, in order of arrival; then priority, preempted work first, few tokens left first."""
        request, settings = sequence.request, self.settings
        waited_ns = sequence.waited(self.now_ns)
        if waited_ns >= settings.max_wait_ns:
            return (0, 0, 0, request.arrival_ns, sequence.number)
        key = self._left(sequence) - settings.ageing_tokens_per_second * waited_ns / 1e9
        return (1, request.priority, not sequence.preempted, key, sequence.number)


class _Admission:
    """Lets waiting sequences in while places and pages last; keeps order where passing would be unfair."""

    def __init__(self, planner: _Planner) -> None:
        self.planner = planner
        self.closed = not planner.may_admit
        self.admitted = False
        self.blocked = 0
        self.least_priority: int | None = None
        self.need = 0
        self.victim: Sequence | None = None

    def open_to(self, sequence: Sequence) -> bool:
        """Whether it may compute in this step: it runs already and stays, or there is room for it."""
        planner = self.planner
        if sequence.handle is not None:
            return sequence not in planner.preempted
        if self.closed or (
            self.least_priority is not None and sequence.request.priority > self.least_priority
        ):
            return False
        hit = planner.pages.probe(sequence)
        total = pages_for(len(sequence.tokens), planner.pages.page_tokens)
        self.need, self.victim = total - hit.pages + hit.unlocked, None
        room = planner.spare - self._headroom()
        if planner.places > 0 and self.need <= room:
            return True
        # With a victim's pages gone, those it shared with us alone count as unlocked: take all hits as such.
        victim = self._victim(sequence, total)
        if victim is not None:
            self.need, self.victim = total, victim
            return True
        if planner.places > 0:
            self._block(sequence)
        return False

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Grant `tokens`; a waiting sequence is admitted, in its victim's place if it needs one."""
        planner = self.planner
        admitted = sequence.handle is None
        if admitted:
            if self.victim is not None:
                self._displace(self.victim)
                self.closed = True  # one victim in a step, and later look-ups would not know that it left
            planner.spare -= self.need
            planner.places -= 1
            self.admitted = True
        planner.grants.append(Grant(sequence, tokens, admitted))

    def _headroom(self) -> int:
        """Pages left to the growth of those that run, so that nobody is admitted only to be preempted."""
        busy = len(self.planner.running) + len(self.planner.grants)
        return min(busy, self.planner.pages.total // 16)

    def _block(self, sequence: Sequence) -> None:
        """It does not fit. Smaller ones may pass, unless it has a right to what becomes free next."""
        planner = self.planner
        self.blocked += 1
        strict = not planner.by_priority or sequence.preempted
        if (
            strict
            or self.blocked >= _BLOCKED
            or sequence.waited(planner.now_ns) >= planner.settings.max_wait_ns
        ):
            self.closed = True
        self.least_priority = sequence.request.priority

    def _victim(self, sequence: Sequence, need: int) -> Sequence | None:
        """A running sequence of strictly lower priority that makes room, if there is one."""
        planner = self.planner
        if not planner.by_priority or self.admitted:
            return None  # who was admitted in this step may count on pages that only the victim locks
        taken = {grant.sequence.id for grant in planner.grants}
        victims = [
            other
            for other in planner.running
            if other.request.priority > sequence.request.priority
            and other.id not in taken
            and not other.preempted  # it resumed and has got no token since: nobody could ever get on
            and not (other.in_prefill and other.waited(planner.now_ns) >= planner.settings.max_wait_ns)
        ]
        if not victims:
            return None
        victim = max(victims, key=lambda other: _rank(other, planner.settings))
        return victim if need <= planner.spare + self._gain(victim) - self._headroom() else None

    def _gain(self, victim: Sequence) -> int:
        pages = self.planner.pages
        missing = pages_for(len(victim.tokens), pages.page_tokens) - len(victim.pages)
        return pages.releasable([victim]) + missing

    def _displace(self, victim: Sequence) -> None:
        planner = self.planner
        planner.spare += self._gain(victim)
        planner.places += 1
        planner.preempted.append(victim)
        planner.decodes = [sequence for sequence in planner.decodes if sequence is not victim]
