"""The scheduler as a pure function: who computes how much, who waits, who gives way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.engine.page_needs import PageNeeds, pages_for
from firsttoken_runtime.engine.prefix import NO_HIT, Hit, Namespace, PrefixHandle, Root
from firsttoken_runtime.engine.requests import Request, SamplingParams
from firsttoken_runtime.engine.scheduler import ScheduleSettings, State, Step, schedule
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.tables import common_prefix

SIZE = 16
SECOND = 1_000_000_000
ON = ScheduleSettings(
    continuous=True,
    max_sequences=64,
    max_batch_tokens=None,
    prefill_tokens=256,
    chunk_size=256,
    by_priority=True,
    ageing_tokens_per_second=100.0,
    max_wait_ns=10 * SECOND,
)
FCFS = replace(ON, by_priority=False)
WHOLE = replace(ON, chunk_size=None)
STATIC = replace(ON, continuous=False)


@dataclass
class Pages:
    """Page counts without pages. `hits`: what the cache has for a sequence's id."""

    total: int = 4096
    available: int = 4096
    page_tokens: int = SIZE
    hits: dict[str, Hit] = field(default_factory=dict)

    @property
    def needs(self) -> PageNeeds:
        return PageNeeds(self.page_tokens, self.total)

    def probe(self, sequence: Sequence) -> Hit:
        sequence.hit = self.hits.get(sequence.id, NO_HIT)
        return sequence.hit

    def releasable(self, sequences: list[Sequence]) -> int:
        return sum(len(sequence.pages) for sequence in sequences)

    def shared_pages(self, sequence: Sequence, other: Sequence) -> int:
        return common_prefix(sequence.request.prompt, other.request.prompt) // self.page_tokens


def waiting(name: str, tokens: int, arrived: float = 0.0, priority: int = 0, number: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=100)
    request = Request(name, tuple(range(tokens)), sampling, int(arrived * SECOND), priority)
    return Sequence(request, number, 100, Namespace("m"))


def running(
    name: str, tokens: int, computed: int, arrived: float = 0.0, priority: int = 0, output: int = 0
) -> Sequence:
    """In prefill, or with output tokens; on just the pages its computed tokens need."""
    sequence = waiting(name, tokens, arrived, priority)
    sequence.tokens += [7] * output
    sequence.computed = computed
    sequence.pages = list(range(pages_for(computed, SIZE)))
    sequence.handle = PrefixHandle(Root(sequence.namespace), None, 0)
    if output:
        sequence.waiting_since_ns = None
    return sequence


def decoding(name: str, tokens: int, arrived: float = 0.0, priority: int = 0) -> Sequence:
    return running(name, tokens - 1, tokens - 1, arrived, priority, output=1)


def plan(
    run: list[Sequence],
    wait: list[Sequence],
    settings: ScheduleSettings = ON,
    now: float = 0.0,
    pages: Pages | None = None,
) -> Step:
    return schedule(State(run, wait, pages or Pages()), int(now * SECOND), settings)


def grants(step: Step) -> dict[str, int]:
    return {grant.sequence.id: grant.tokens for grant in step.prefills}


def test_nothing_to_do_is_an_empty_step() -> None:
    assert plan([], []).empty


def test_everybody_who_decodes_gets_a_token_before_any_prefill() -> None:
    decodes = [decoding(f"d{i}", 30 + i) for i in range(20)]
    step = plan(decodes, [waiting("p", 1000)], replace(ON, max_batch_tokens=36))
    assert step.decodes == decodes
    assert grants(step) == {"p": 16}


def test_decoding_goes_on_when_it_fills_the_budget_alone() -> None:
    decodes = [decoding(f"d{i}", 30) for i in range(20)]
    step = plan(decodes, [waiting("p", 1000)], replace(ON, max_batch_tokens=16))
    assert (len(step.decodes), step.prefills) == (20, [])


def test_a_long_prompt_is_cut_in_chunks() -> None:
    assert grants(plan([], [waiting("p", 1000)], replace(ON, chunk_size=100))) == {"p": 100}


def test_short_prompts_are_computed_in_one_step_beside_a_long_ones_chunk() -> None:
    long = running("long", 1500, 256)
    shorts = [waiting(f"s{i}", 40, 0.05) for i in range(4)]
    assert grants(plan([long], shorts, now=0.5)) == {"s0": 40, "s1": 40, "s2": 40, "s3": 40, "long": 96}


@pytest.mark.parametrize("settings", [ON, FCFS])
def test_the_step_stays_within_its_budget_with_many_prompts(settings: ScheduleSettings) -> None:
    long = running("long", 1500, 256)
    shorts = [waiting(f"s{i}", 40, 0.05, number=i) for i in range(40)]
    fixed = plan([long], shorts, replace(settings, max_batch_tokens=256), now=0.5)
    assert sum(grants(fixed).values()) == 256
    # … and an automatic one grows by half at most, for prompts that it would just not finish
    automatic = plan([long], shorts, settings, now=0.5)
    assert 256 <= sum(grants(automatic).values()) <= 256 * 3 // 2
    assert all(tokens == 40 for id, tokens in grants(automatic).items() if id != "long")


def test_a_partial_prefill_always_gets_its_floor_under_a_stream_of_short_prompts() -> None:
    long = running("long", 1500, 256)
    step = plan([long], [waiting(f"s{i}", 40, 0.05, number=i) for i in range(40)], now=0.5)
    assert grants(step)["long"] >= 256 // 8


def test_first_come_first_served_leaves_a_floor_to_those_behind() -> None:
    long = running("long", 1500, 256)
    step = plan([long], [waiting(f"s{i}", 40, 0.1, number=i) for i in range(3)], FCFS)
    given_tokens = grants(step)
    assert next(iter(given_tokens)) == "long"
    assert all(given_tokens[f"s{i}"] >= 32 for i in range(3))
    assert given_tokens["long"] >= 128


def test_short_goes_first_and_long_waits_no_longer_than_ageing_says() -> None:
    long, short = waiting("long", 600, 0.0), waiting("short", 100, 4.9)
    only_one = replace(ON, max_sequences=1)
    assert list(grants(plan([], [long, short], only_one, now=4.9))) == ["short"]
    # 500 tokens more, at 100 tokens a second: made up for by 5 s longer waiting
    later = waiting("short", 100, 5.1)
    assert list(grants(plan([], [long, later], only_one, now=5.1))) == ["long"]


def test_without_ageing_only_the_longest_wait_bounds_the_long_one() -> None:
    settings = replace(ON, max_sequences=1, ageing_tokens_per_second=0.0)
    long, short = waiting("long", 3000, 0.0), waiting("short", 10, 9.9)
    assert list(grants(plan([], [long, short], settings, now=9.99))) == ["short"]
    assert list(grants(plan([], [long, short], settings, now=10.0))) == ["long"]


def test_tokens_in_the_prefix_cache_count_as_done() -> None:
    pages = Pages(hits={"hit": Hit(60, 60)})
    hit, cold = waiting("hit", 1000), waiting("cold", 100)
    pages.probe(hit)  # as on arrival
    step = plan([], [hit, cold], replace(ON, max_sequences=1), pages=pages)
    assert grants(step) == {"hit": 40}


def test_priority_goes_before_length_and_overdue_before_priority() -> None:
    one = replace(ON, max_sequences=1)
    urgent, short = waiting("urgent", 500, priority=-1, arrived=5.0), waiting("short", 5, 0.0)
    assert list(grants(plan([], [short, urgent], one, now=5.0))) == ["urgent"]
    assert list(grants(plan([], [short, urgent], one, now=10.0))) == ["short"]


def test_first_come_first_served_does_not_look_at_length_or_priority() -> None:
    first, second = waiting("first", 900, 0.0), waiting("second", 5, 0.1, priority=-9)
    assert list(grants(plan([], [second, first], replace(FCFS, max_sequences=1)))) == ["first"]


def test_whole_prompts_are_computed_in_one_step_while_the_budget_lasts() -> None:
    step = plan([], [waiting(n, size) for n, size in [("a", 100), ("b", 120), ("c", 130)]], WHOLE)
    assert grants(step) == {"a": 100, "b": 120}


def test_a_whole_prompt_longer_than_the_budget_goes_alone() -> None:
    assert grants(plan([], [waiting("a", 1000)], WHOLE)) == {"a": 1000}


def test_a_prefill_begun_in_chunks_is_completed_in_one_step_without_chunking() -> None:
    assert grants(plan([running("a", 1000, 256)], [], WHOLE)) == {"a": 744}


def test_a_static_batch_is_first_come_first_served_and_takes_nobody_in() -> None:
    first, second = waiting("first", 100, 0.0), waiting("second", 10, 1.0)
    assert list(grants(plan([], [second, first], replace(STATIC, max_sequences=1)))) == ["first"]
    assert grants(plan([decoding("d", 30)], [second], STATIC)) == {}


def test_no_more_sequences_run_than_there_are_places() -> None:
    step = plan([decoding("d", 30)], [waiting(f"w{i}", 10) for i in range(5)], replace(ON, max_sequences=3))
    assert len(step.prefills) == 2


def test_nobody_is_admitted_whose_tokens_do_not_all_fit_beside_what_is_promised() -> None:
    # Given a prefill with 59 of its 63 pages still to come, and 62 pages to be had
    long = running("long", 1000, 64)
    pages = Pages(total=200, available=62)
    step = plan([long], [waiting("small", 33), waiting("large", 100)], pages=pages, settings=replace(ON))
    # Then 3 pages are over, one of which is left for growth
    assert grants(step) == {"long": 256}
    assert "small" in grants(plan([long], [waiting("small", 30)], pages=pages))


def test_cached_pages_that_a_hit_would_lock_count_as_needed() -> None:
    pages = Pages(available=10, hits={"p": Hit(pages=9, unlocked=9)})
    assert grants(plan([], [waiting("p", 16 * 11)], pages=pages)) == {}
    pages.hits["p"] = Hit(pages=9, unlocked=0)  # held by others anyway
    assert grants(plan([], [waiting("p", 16 * 11)], pages=pages)) == {"p": 32}


def test_smaller_ones_pass_one_that_does_not_fit_until_it_is_overdue() -> None:
    pages = Pages(total=100, available=20)
    large, small = waiting("large", 600, 0.0), waiting("small", 16, 1.0)
    run = [decoding("d", 30)]
    assert list(grants(plan(run, [large, small], now=1.0, pages=pages))) == ["small"]
    assert list(grants(plan(run, [large, small], now=9.9, pages=pages))) == ["small"]
    assert list(grants(plan(run, [large, small], now=10.0, pages=pages))) == []


def test_nobody_passes_under_first_come_first_served() -> None:
    wait = [waiting("large", 600, 0.0), waiting("small", 16, 1.0)]
    step = plan([decoding("d", 30)], wait, FCFS, pages=Pages(total=100, available=20))
    assert grants(step) == {}


def test_lower_priority_does_not_pass_a_blocked_higher_one() -> None:
    pages = Pages(total=100, available=20)
    wait = [waiting("large", 600, priority=0), waiting("small", 16, priority=1)]
    assert grants(plan([decoding("d", 30)], wait, pages=pages)) == {}


def test_preempted_work_resumes_before_new_work_of_its_class() -> None:
    back, new = waiting("back", 900, 0.0), waiting("new", 5, 0.0)
    back.preempted = True
    assert list(grants(plan([], [new, back], replace(ON, max_sequences=1)))) == ["back"]
    # … and while it does not fit, nothing new of its class takes the pages it waits for
    few, run = Pages(total=100, available=20), [decoding("d", 30)]
    assert grants(plan(run, [new, back], pages=few)) == {}
    assert list(grants(plan(run, [waiting("urgent", 5, priority=-1), back], pages=few))) == ["urgent"]


def test_growth_beyond_the_pool_preempts_the_latest_of_the_lowest_priority() -> None:
    # Given three sequences whose next token each needs a new page, and one page
    run = [decoding("old", 33, 0.0), decoding("low", 33, 1.0, priority=1), decoding("new", 33, 2.0)]
    step = plan(run, [], pages=Pages(available=1))
    assert [sequence.id for sequence in step.preempted] == ["low"]
    assert [sequence.id for sequence in step.decodes] == ["old", "new"]
    # FCFS does not look at priority
    step = plan(run, [], FCFS, pages=Pages(available=1))
    assert [sequence.id for sequence in step.preempted] == ["new"]


def test_a_step_that_preempts_admits_nobody() -> None:
    run = [decoding("old", 33, 0.0), decoding("new", 33, 2.0)]
    assert grants(plan(run, [waiting("tiny", 1)], pages=Pages(available=1))) == {}


def test_one_sequence_always_stays() -> None:
    run = [decoding("old", 33, 0.0), decoding("new", 33, 2.0)]
    step = plan(run, [], pages=Pages(available=0))
    assert [sequence.id for sequence in step.decodes] == ["old"]


def test_higher_priority_takes_the_place_of_strictly_lower_one_victim_a_step() -> None:
    full = replace(ON, max_sequences=2)
    run = [decoding("a", 30, 0.0, priority=1), decoding("b", 30, 1.0, priority=1)]
    urgent = [waiting("u0", 20, 2.0), waiting("u1", 20, 2.0)]
    step = plan(run, urgent, full, now=2.0)
    assert [sequence.id for sequence in step.preempted] == ["b"]
    assert [sequence.id for sequence in step.decodes] == ["a"]
    assert list(grants(step)) == ["u0"]


def test_nobody_is_displaced_whose_pages_another_admission_of_the_step_counts_on() -> None:
    # Given an overdue request that hits the pages of the one who could be displaced
    run = [decoding("victim", 65, 0.0, priority=2)]
    overdue, urgent = waiting("overdue", 70, 0.0, priority=1), waiting("urgent", 300, 10.0)
    pages = Pages(total=100, available=8, hits={"overdue": Hit(pages=4, unlocked=0)})
    step = plan(run, [overdue, urgent], now=10.0, pages=pages)
    assert list(grants(step)) == ["overdue"]
    assert step.preempted == []


def test_equal_priority_never_displaces() -> None:
    full = replace(ON, max_sequences=1)
    step = plan([decoding("a", 30)], [waiting("b", 20)], full)
    assert (step.preempted, step.prefills) == ([], [])


def test_who_resumed_and_has_got_no_token_since_is_not_displaced() -> None:
    back = decoding("back", 30, priority=1)
    back.preempted = True
    step = plan([back], [waiting("urgent", 20)], replace(ON, max_sequences=1))
    assert (step.preempted, step.prefills) == ([], [])


def test_an_overdue_prefill_is_not_displaced() -> None:
    run = [running("p", 900, 64, 0.0, priority=1)]
    step = plan(run, [waiting("urgent", 20, 10.0)], replace(ON, max_sequences=1), now=10.0)
    assert step.preempted == []
    assert list(grants(step)) == ["p"]


def test_a_displaced_prefill_gets_no_tokens_in_the_same_step() -> None:
    run = [running("p", 900, 64, 0.0, priority=1)]
    step = plan(run, [waiting("urgent", 20, 1.0)], replace(ON, max_sequences=1), now=1.0)
    assert [sequence.id for sequence in step.preempted] == ["p"]
    assert grants(step) == {"urgent": 20}


tokens, seconds = st.integers(1, 400), st.floats(0, 20)
sequences = st.tuples(tokens, st.integers(0, 400), seconds, st.integers(0, 2), st.booleans())
few_tokens, few_places = replace(ON, max_batch_tokens=20), replace(ON, max_sequences=3)


@given(
    st.lists(sequences, max_size=8),
    st.lists(sequences, max_size=8),
    st.integers(0, 60),
    st.sampled_from([ON, FCFS, WHOLE, STATIC, few_tokens, few_places]),
    st.floats(0, 30),
)
def test_any_step_keeps_the_rules(run, wait, available, settings, now) -> None:
    run_sequences = [
        running(f"r{i}", tokens, min(computed, tokens - 1), arrived, priority)
        if computed < tokens
        else decoding(f"r{i}", tokens + 1, arrived, priority)
        for i, (tokens, computed, arrived, priority, _) in enumerate(run)
    ]
    wait_sequences = [waiting(f"w{i}", t, a, p, i) for i, (t, _, a, p, _) in enumerate(wait)]
    for sequence, (*_, preempted) in zip(wait_sequences, wait, strict=True):
        sequence.preempted = preempted
    held = sum(len(sequence.pages) for sequence in run_sequences)
    pages = Pages(total=held + available, available=available)
    step = plan(run_sequences, wait_sequences, settings, now, pages)

    granted = [grant.sequence for grant in step.prefills]
    everyone = [*step.preempted, *step.decodes, *granted]
    assert len({s.id for s in everyone}) == len(everyone), "preempted and scheduled in one step"
    assert all(s in run_sequences for s in (*step.preempted, *step.decodes))
    for grant in step.prefills:
        assert 1 <= grant.tokens <= grant.sequence.left
        assert grant.admitted == (grant.sequence in wait_sequences)
    staying = [s for s in run_sequences if s not in step.preempted]
    assert {s.id for s in step.decodes} == {s.id for s in staying if not s.in_prefill}
    admitted = [grant.sequence for grant in step.prefills if grant.admitted]
    assert len(staying) + len(admitted) <= max(settings.max_sequences, len(run_sequences))
    if len(staying) > 1 or admitted:  # all known tokens of all that run fit
        free = available + sum(len(s.pages) for s in step.preempted)
        assert sum(pages_for(len(s.tokens), SIZE) - len(s.pages) for s in (*staying, *admitted)) <= free
    if settings.chunk_size is not None and settings.continuous:
        budget = settings.prefill_tokens * 3 // 2
        if settings.max_batch_tokens is not None:
            budget = max(settings.max_batch_tokens - len(step.decodes), 0)
        assert sum(grant.tokens for grant in step.prefills) <= budget
        assert all(grant.tokens <= settings.chunk_size for grant in step.prefills)
    fits = [s for s in wait_sequences if pages_for(len(s.tokens), SIZE) <= pages.total]
    if not run_sequences and len(fits) == len(wait_sequences) and fits:
        assert step.prefills, "requests wait, nobody runs, and nobody is let in"


@pytest.mark.parametrize(
    ("limit", "here", "spare"),
    [
        (None, [], (256, 4095)),
        (12, [], (11, 4095)),
        (1, [], (0, 4095)),
        # Somebody is in prefill: nothing is spare. Somebody waits for a place: no pages are.
        (None, [running("prefills", 90, 20)], (0, 0)),
        (None, [waiting("waits", 70_000)], (256, 0)),
    ],
)
def test_what_is_spare_is_nobodys_first_token_and_nobodys_pages(limit, here, spare) -> None:
    decodes = running("decodes", 32, 32, output=1)
    step = schedule(
        State(
            [decodes, *(s for s in here if s.handle is not None)],
            [s for s in here if s.handle is None],
            Pages(),
        ),
        0,
        replace(ON, max_batch_tokens=limit),
    )
    assert (step.spare_tokens, step.spare_pages) == spare
