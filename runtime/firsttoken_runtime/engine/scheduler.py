"""Who computes how many tokens in the next step: a pure function of the sequences and the page counts.

1. Every running sequence keeps the promise that all its known tokens fit; where growth breaks it, the least
   urgent sequences are preempted (pages dropped, tokens kept, computed again later).
2. Everybody who decodes gets its one token.
3. The rest of the budget goes to prefill, most urgent first, several prompts in one step. Who cannot finish
   in this step leaves a floor to those behind it, so that short prompts get through beside a long one, and
   the oldest partial prefill always gets a floor, so that it ends in bounded time.
4. New sequences are admitted only when all their tokens fit beside what is promised. So prefill never runs
   out of pages midway, and what was preempted cannot come back before somebody else leaves: no thrashing.
5. Who could find a long prefix in the cache that another one is computing just now waits for those pages: it
   keeps its place, and lends its turn to the one who computes them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from firsttoken_runtime.engine.page_needs import PageNeeds
from firsttoken_runtime.engine.prefix import Hit
from firsttoken_runtime.engine.sequence import Sequence

# Waiting sequences looked at in one step, and how many may turn out not to fit before the look-up ends.
_CANDIDATES = 64
_BLOCKED = 4
_FLOOR_TOKENS = 32
_FLOOR_PARTS = 8  # a floor is an eighth of the budget
_STRETCH_PARTS = 2  # an automatic budget may grow by half for prompts that it would just not finish
_SHARED_TOKENS = 32  # a shared prefix that is worth a step of waiting

Key = tuple[float, ...]


class PageView(Protocol):
    """What the scheduler may ask about pages; asking changes nothing."""

    page_tokens: int

    @property
    def needs(self) -> PageNeeds: ...
    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int: ...
    def probe(self, sequence: Sequence) -> Hit: ...
    def releasable(self, sequences: list[Sequence]) -> int: ...
    def shared_pages(self, sequence: Sequence, other: Sequence) -> int: ...


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The switches and limits of one step.

    continuous: False forms static batches: whole prompts, first come first served, the next batch when the
    last member has ended. max_batch_tokens: of the whole step; None means prefill_tokens beside all that
    decode. chunk_size: most prompt tokens of one sequence; None computes whole prompts. by_priority: False
    is first come first served, and Request.priority is not looked at. share_prefixes: wait for pages that
    another sequence is computing; needs the prefix cache.
    """

    continuous: bool
    max_sequences: int
    max_batch_tokens: int | None
    prefill_tokens: int
    chunk_size: int | None
    by_priority: bool
    ageing_tokens_per_second: float
    max_wait_ns: int
    share_prefixes: bool = False


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
    """A step's work. A sequence is in at most one of the three.

    spare_tokens, spare_pages: left for work that can be left out (speculation).
    """

    preempted: list[Sequence]
    decodes: list[Sequence]
    prefills: list[Grant]
    spare_tokens: int = 0
    spare_pages: int = 0

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefills


def schedule(state: State, now_ns: int, settings: ScheduleSettings) -> Step:
    """Decide the next step. Changes nothing."""
    missing = state.pages.needs.missing
    spare = state.pages.available - sum(missing(sequence) for sequence in state.running)
    if spare < 0:
        running, preempted = _without_victims(state, settings)
        # Hits and page counts were taken before these left, so nobody is admitted on them in this step.
        return _Planner(state, now_ns, settings, running, preempted, 0, may_admit=False).step()
    return _Planner(state, now_ns, settings, list(state.running), [], spare, may_admit=True).step()


def _without_victims(state: State, settings: ScheduleSettings) -> tuple[list[Sequence], list[Sequence]]:
    """Those who stay and those who are preempted: the least urgent, as few as the others' growth needs.

    The order is strict and does not change while they run, so the most urgent one always gets on. One
    sequence always stays, and fits: longer ones than the pool are refused at admission.
    """
    staying = sorted(state.running, key=lambda sequence: _rank(sequence, settings))
    victims: list[Sequence] = []
    needs = state.pages.needs
    while len(staying) > 1:
        missing = sum(needs.missing(sequence) for sequence in staying)
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


def uncached_left(sequence: Sequence, page_tokens: int) -> int:
    """Tokens it must compute; for a waiting one, by the last look into the prefix cache."""
    if sequence.handle is not None:
        return sequence.left
    return len(sequence.tokens) - sequence.hit.pages * page_tokens


def order_of(settings: ScheduleSettings, now_ns: int, page_tokens: int) -> Callable[[Sequence], Key]:
    """The order in which sequences get their prompt tokens: lower keys first.

    By arrival, or with priority: overdue ones first, in order of arrival; then priority, preempted work
    first, few tokens left first, where waiting makes up for tokens.
    """
    if not (settings.continuous and settings.by_priority):
        return _arrival

    def urgency(sequence: Sequence) -> Key:
        request, waited_ns = sequence.request, sequence.waited(now_ns)
        if waited_ns >= settings.max_wait_ns:
            return (0, 0, 0, request.arrival_ns, sequence.number)
        left = uncached_left(sequence, page_tokens)
        key = left - settings.ageing_tokens_per_second * waited_ns / 1e9
        return (1, request.priority, not sequence.preempted, key, sequence.number)

    return urgency


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
        self.granted: set[Sequence] = set()
        self.by_priority = settings.continuous and settings.by_priority
        self.order = order_of(settings, now_ns, state.pages.page_tokens)

    def step(self) -> Step:
        if self.waiting or self.prefilling:
            self._prefill()
        return Step(self.preempted, self.decodes, self.grants, *self._spare())

    def _spare(self) -> tuple[int, int]:
        """Tokens and pages for optional work: none beside prefill, whose first tokens it would hold up, and
        no pages while somebody waits for some."""
        if self.grants:
            return 0, 0
        return max(self._budget(), 0), 0 if self.waiting else self.spare

    def _prefill(self) -> None:
        settings = self.settings
        if not settings.continuous and self.running:
            self.may_admit = False  # a static batch takes nobody in until all its members have ended
        candidates = sorted([*self.prefilling, *self._candidates()], key=self.order)
        budget = self._budget()
        if settings.chunk_size is None or not settings.continuous:
            self._whole(candidates, budget)
        else:
            self._chunks(candidates, budget, settings.chunk_size)

    def _budget(self) -> int:
        """Tokens of the step beside one for everybody who decodes."""
        if self.settings.max_batch_tokens is None:
            return self.settings.prefill_tokens
        return self.settings.max_batch_tokens - len(self.decodes)

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
        for candidate in candidates:
            if self._most(candidate) > budget and self.grants:
                break
            sequence = self._turn(candidate, admission)
            if sequence is not None:
                tokens = self._most(sequence)
                if sequence is not candidate and tokens > budget and self.grants:
                    continue
                admission.take(sequence, tokens)
                budget -= tokens

    def _chunks(self, candidates: list[Sequence], budget: int, chunk_size: int) -> None:
        """Chunks in order, with floors; what is over in the end goes to those who could not finish."""
        if budget <= 0:
            return
        floor = min(max(budget // _FLOOR_PARTS, min(_FLOOR_TOKENS, budget)), chunk_size)
        stretch = budget // _STRETCH_PARTS if self.settings.max_batch_tokens is None else 0
        oldest = min((s for s in self.prefilling if s.computed), key=_arrival, default=None)
        reserved = min(floor, oldest.left, budget // 2) if oldest is not None else 0
        budget -= reserved
        behind = sum(self._floor(sequence, floor) for sequence in candidates if sequence is not oldest)
        admission = _Admission(self)
        for candidate in candidates:
            if candidate is not oldest:
                behind -= self._floor(candidate, floor)
            if budget + stretch <= 0 and candidate is not oldest:
                continue
            sequence = self._turn(candidate, admission)
            if sequence is None:
                continue
            usable = max(budget, 0)
            if sequence is oldest:
                usable, budget, reserved = usable + reserved, budget + reserved, 0
            left = self._left(sequence)
            tokens = most = self._most(sequence, chunk_size)
            more = stretch + min(budget, 0) if left <= 2 * floor or behind == 0 else 0
            if left > usable + more or left > most:  # it cannot finish in this step
                tokens = min(tokens, max(usable - min(behind, usable // 2), min(floor, usable)))
            if tokens <= 0 or (sequence.handle is None and tokens < min(most, floor)):
                admission.skip(sequence)  # a place and pages for a crumb
                continue
            admission.take(sequence, tokens)
            budget -= tokens
        budget += reserved
        for place, grant in enumerate(self.grants):
            more = self._most(grant.sequence, chunk_size) - grant.tokens
            if budget > 0 and more > 0:
                self.grants[place] = replace(grant, tokens=grant.tokens + min(more, budget))
                budget -= min(more, budget)

    def _turn(self, candidate: Sequence, admission: _Admission) -> Sequence | None:
        """Who computes now that it is the candidate's turn: itself, the one it waits for, or nobody."""
        if candidate in self.granted or not admission.open_to(candidate):
            return None
        leader = self._leader(candidate)
        if leader is None:
            return candidate
        admission.keep(candidate, leader)
        return leader if leader not in self.granted else None

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """The one in prefill that computes the pages which this waiting sequence needs next."""
        settings, pages = self.settings, self.pages
        if sequence.handle is not None or not (settings.share_prefixes and settings.continuous):
            return None
        if sequence.preempted or sequence.waited(self.now_ns) >= settings.max_wait_ns:
            return None
        least = sequence.hit.pages + -(-_SHARED_TOKENS // pages.page_tokens)
        best, most = None, least - 1
        for leader in (*self.prefilling, *(grant.sequence for grant in self.grants if grant.admitted)):
            if self.by_priority and leader.request.priority > sequence.request.priority:
                continue
            if leader in self.preempted or not _fills_the_cache(leader, pages.page_tokens):
                continue
            shared = pages.shared_pages(sequence, leader)
            if shared > most and leader.computed < shared * pages.page_tokens:
                best, most = leader, shared
        return best

    def _floor(self, sequence: Sequence, floor: int) -> int:
        """What those before it leave to it: a floor, or all of a prompt that is hardly longer."""
        left = self._left(sequence)
        return left if left <= 2 * floor else floor

    def _left(self, sequence: Sequence) -> int:
        return uncached_left(sequence, self.pages.page_tokens)

    def _most(self, sequence: Sequence, chunk_size: int | None = None) -> int:
        """Tokens that it may compute in one step: all that are left, a chunk, or what its window allows."""
        most = min(self._left(sequence), self.pages.needs.step_tokens(sequence))
        return most if chunk_size is None else min(most, chunk_size)


def _fills_the_cache(leader: Sequence, page_tokens: int) -> bool:
    """Whether what it computes can be found by others: not at the cache's cap, not after a flush."""
    handle = leader.handle
    if handle is None:  # admitted in this step
        return True
    return not handle.root.detached and handle.pages == leader.computed // page_tokens


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
        total = planner.pages.needs.needed(sequence)
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
        planner.granted.add(sequence)

    def keep(self, sequence: Sequence, leader: Sequence) -> None:
        """Nobody takes the place and the pages of one that waits for a leader's pages."""
        planner = self.planner
        if self.victim is None:
            shared = planner.pages.shared_pages(sequence, leader)
            planner.spare -= planner.pages.needs.needed(sequence) - shared
            planner.places -= 1

    def _headroom(self) -> int:
        """Pages left to the growth of those that run, so that nobody is admitted only to be preempted."""
        busy = len(self.planner.running) + len(self.planner.grants)
        return min(busy, self.planner.pages.total // 16)

    def skip(self, sequence: Sequence) -> None:
        """There are no tokens left for it. Who needs few may pass, unless its turn is due."""
        planner = self.planner
        if sequence.handle is None and (
            not planner.by_priority
            or sequence.preempted
            or sequence.waited(planner.now_ns) >= planner.settings.max_wait_ns
        ):
            self.closed = True

    def _block(self, sequence: Sequence) -> None:
        """It does not fit. Smaller ones may pass, unless it has a right to what becomes free next."""
        self.blocked += 1
        self.skip(sequence)
        self.closed = self.closed or self.blocked >= _BLOCKED
        self.least_priority = sequence.request.priority

    def _victim(self, sequence: Sequence, need: int) -> Sequence | None:
        """A running sequence of strictly lower priority that makes room, if there is one."""
        planner = self.planner
        if not planner.by_priority or self.admitted:
            return None  # who was admitted in this step may count on pages that only the victim locks
        victims = [
            other
            for other in planner.running
            if other.request.priority > sequence.request.priority
            and other not in planner.granted
            and not other.preempted  # it resumed and has got no token since: nobody could ever get on
            and not (other.in_prefill and other.waited(planner.now_ns) >= planner.settings.max_wait_ns)
        ]
        if not victims:
            return None
        victim = max(victims, key=lambda other: _rank(other, planner.settings))
        return victim if need <= planner.spare + self._gain(victim) - self._headroom() else None

    def _gain(self, victim: Sequence) -> int:
        pages = self.planner.pages
        return pages.releasable([victim]) + pages.needs.missing(victim)

    def _displace(self, victim: Sequence) -> None:
        planner = self.planner
        planner.spare += self._gain(victim)
        planner.places += 1
        planner.preempted.append(victim)
        planner.decodes = [sequence for sequence in planner.decodes if sequence is not victim]
