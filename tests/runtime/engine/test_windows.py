"""Windows in the engine: pages behind them come back, long prompts fit, and the switch works live."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_model import Bench, message, prompt

from firsttoken_runtime.engine.page_needs import GIVEN_BACK, PageNeeds, least_pages, pages_for
from firsttoken_runtime.engine.requests import AdmissionError, Finish
from firsttoken_runtime.model.windows import Window, layer_windows, widest

WINDOW = {"slidingWindow": {"window": 16, "sinkTokens": 5}}
CHUNKS = {"chunkedPrefill": {"chunkSize": 16}}
NO_CACHE = {"prefixCache": False}


def answer(bench: Bench) -> tuple[str, str]:
    found = next(state for state in bench.engine.switch_states() if state["name"] == "slidingWindow")
    return found["state"], found["reason"]


def pages_of(bench: Bench, id: str) -> list[int]:
    return bench.engine._running[id].pages


def finish(bench: Bench) -> None:
    """Step to the end, and look at every page after every step."""
    while bench.engine.has_work():
        bench.step()
        bench.check()
        assert bench.engine.stats()["steps_without_progress"] == 0, bench.engine.requests()


# What meets in a layer


def test_the_switch_counts_where_it_is_narrower_than_the_layers_own() -> None:
    asked = Window(100, 4)
    assert layer_windows([None, 4096, 100, 64], asked) == (asked, asked, Window(100), Window(64))
    assert layer_windows([None, 64]) == (None, Window(64))
    assert widest(layer_windows([None, 4096, 64], asked)) == Window(100, 4)
    assert widest(layer_windows([None, 64])) is None
    assert widest(()) is None


# The arithmetic


@given(
    page_tokens=st.integers(1, 8),
    total=st.integers(1, 60),
    window=st.builds(Window, st.integers(1, 40), st.integers(0, 20)),
    known=st.integers(1, 400),
    share=st.booleans(),
    data=st.data(),
)
def test_a_sequence_never_holds_more_than_it_was_said_to_need(
    page_tokens: int, total: int, window: Window, known: int, share: bool, data: st.DataObject
) -> None:
    """Computed in steps of any allowed size, with its first pages locked in the tree or not."""
    needs = PageNeeds.of(page_tokens, total, window)
    assert needs.bounded == (least_pages(page_tokens, window) <= total)
    known = min(known, needs.longest)
    sequence = SimpleNamespace(tokens=range(known), held=0, given_back=0)
    computed = locked = 0
    needed = [needs.needed(sequence)]
    while computed < known:
        most = min(known - computed, needs.step_tokens(sequence))
        assert most >= 1
        computed += data.draw(st.integers(1, most))
        sequence.held = pages_for(computed, page_tokens) - sequence.given_back
        assert sequence.held <= needed[-1]
        if share and not sequence.given_back:
            locked = min(computed // page_tokens, needs.shareable)
        gone = needs.gone(computed)
        if gone >= locked and gone > needs.sinks:
            sequence.given_back = gone - needs.sinks
        needed.append(needs.needed(sequence))
    assert all(before >= after for before, after in pairwise(needed))
    assert needed[0] <= total


# Pages come back


@pytest.mark.parametrize(("sinks", "kept"), [(0, 0), (1, 1), (5, 2)])
def test_just_the_pages_that_nobody_sees_any_more_are_given_back(sinks: int, kept: int) -> None:
    switches = message(1, slidingWindow={"window": 16, "sinkTokens": sinks}, **CHUNKS, **NO_CACHE)
    bench = Bench(total_pages=64, page_tokens=4, switches=switches)
    id = bench.add(prompt(60), max_tokens=40)
    while len(bench.tokens(id)) < 39:
        bench.step()
        bench.check()
        computed = bench.engine._running[id].computed
        first_seen = max(computed + 1 - 16, 0) // 4  # of the token that is computed next
        pages = pages_of(bench, id)
        assert [page == GIVEN_BACK for page in pages] == [kept <= at < first_seen for at in range(len(pages))]
        held = pages_for(computed, 4) - max(first_seen - kept, 0)
        assert bench.engine.pages()["owned"] == held
    bench.run()
    bench.assert_right()
    assert bench.engine.pages() == {"free": 64, "cached": 0, "locked": 0, "owned": 0, "total": 64}


def test_where_one_layer_sees_everything_nothing_is_given_back() -> None:
    bench = Bench(total_pages=64, page_tokens=4, layer_windows=(16, None), switches=message(1, **NO_CACHE))
    bench.add(prompt(60), max_tokens=9)
    bench.steps(5)
    assert bench.engine.pages()["owned"] == 16


def test_pages_in_the_tree_are_unlocked_and_stay_cached() -> None:
    """The first 15 of 16 tokens of the window are 3 pages: they enter the tree, and no others do."""
    bench = Bench(total_pages=64, page_tokens=4, switches=message(1, **WINDOW, **CHUNKS))
    first = bench.add(prompt(60), max_tokens=4)
    bench.step()
    assert bench.engine.pages()["locked"] == 3
    bench.steps(3)
    assert bench.engine.pages() | {"free": 0} == {
        "free": 0,
        "cached": 1,
        "locked": 2,
        "owned": 4,
        "total": 64,
    }
    bench.run()
    second = bench.add(prompt(60), max_tokens=4)
    bench.run()
    bench.assert_right()
    assert (bench.cached(first), bench.cached(second)) == (0, 12)
    bench.assert_drained()


def test_flushed_in_between_the_tree_keeps_nothing() -> None:
    bench = Bench(total_pages=64, page_tokens=4, switches=message(1, **WINDOW, **CHUNKS))
    bench.add(prompt(60), max_tokens=4)
    bench.step()
    bench.engine.flush_prefix_cache()
    bench.steps(3)
    bench.check()
    assert bench.engine.pages()["cached"] == 0
    bench.run()
    bench.assert_right()
    assert bench.engine.pages()["free"] == 64


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_a_prompt_longer_than_the_pool_runs_where_its_window_fits(
    batching: bool, chunks: bool, cache: bool
) -> None:
    """12 pages are 48 tokens; the model's own window of 16 needs 5 pages."""
    switches = message(1, continuousBatching=batching, chunkedPrefill=chunks, prefixCache=cache)
    bench = Bench(total_pages=12, page_tokens=4, layer_windows=(16, 12), switches=switches)
    for salt in range(3):
        bench.add(prompt(200, salt), max_tokens=30)
    finish(bench)
    bench.assert_right()
    assert all(len(bench.tokens(id)) == 30 for id in bench.requests)
    bench.assert_drained()


def test_beside_long_ones_more_run_at_a_time_than_without_windows() -> None:
    peaks = []
    for switches in ({}, WINDOW):
        bench = Bench(total_pages=80, page_tokens=4, switches=message(1, **switches, **CHUNKS))
        for salt in range(6):
            bench.add(prompt(100, salt), max_tokens=60)
        peak = 0
        while bench.engine.has_work():
            bench.step()
            assert bench.engine.stats()["steps_without_progress"] == 0
            peak = max(peak, bench.engine.stats()["running"])
        peaks.append(peak)
        bench.assert_right()
    assert peaks[0] < peaks[1]


def test_a_prompt_is_refused_where_not_even_the_window_fits() -> None:
    bench = Bench(total_pages=4, page_tokens=4, layer_windows=(16, 16))
    with pytest.raises(AdmissionError, match="needs 5 KV pages; the pool has 4 of 4 tokens"):
        bench.add(prompt(30))
    bench.add(prompt(10), max_tokens=50)
    bench.run()
    assert len(bench.tokens("r0")) == 7  # the pool's 16 tokens, and one that needs no KV
    bench.assert_right()


# The switch


def test_a_window_of_the_switch_lets_nobody_in_who_could_not_go_on_without_it() -> None:
    bench = Bench(total_pages=12, page_tokens=4, switches=message(1, **WINDOW))
    assert answer(bench) == ("on", "")
    with pytest.raises(AdmissionError, match="the pool has 12 of 4 tokens"):
        bench.add(prompt(49))
    bench.add(prompt(45), max_tokens=50)
    bench.steps(2)
    assert bench.engine.set_switches(message(2))
    bench.run()
    assert bench.finish("r0") == Finish.LENGTH
    bench.assert_right()


def test_no_wider_than_the_models_own_it_is_inactive() -> None:
    bench = Bench(layer_windows=(16, 12), switches=message(1, **WINDOW))
    assert answer(bench) == ("inactive", "window 16: this model's own windows are of 16 tokens at most")


def test_sinks_for_which_the_pool_has_no_room_beside_the_window_are_refused() -> None:
    bench = Bench(
        total_pages=12,
        page_tokens=4,
        layer_windows=(18, 18),
        switches=message(1, slidingWindow={"window": 17, "sinkTokens": 100}),
    )
    reason = "window 17 with sinkTokens 100 needs 30 KV pages, the pool has 12"
    assert answer(bench) == ("inactive", reason)
    bench.add(prompt(100), max_tokens=3)
    bench.run()
    bench.assert_right()


def test_nothing_of_another_window_is_a_hit() -> None:
    bench = Bench(switches=message(1))
    for generation, switches in enumerate(
        ({}, WINDOW, WINDOW, {"slidingWindow": {"sinkTokens": 4, "window": 16}}), 2
    ):
        bench.engine.set_switches(message(generation, **switches))
        bench.add(prompt(14), max_tokens=1)
        bench.run()
    assert [bench.cached(id) for id in bench.requests] == [0, 0, 12, 0]


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("own", [(None, None), (40, 24)])
def test_toggled_under_load_nothing_fails_and_afterwards_answers_are_those_of_the_window(
    own: tuple[int | None, ...], batching: bool
) -> None:
    bench = Bench(total_pages=60, page_tokens=4, layer_windows=own)
    for salt in range(6):
        bench.add(prompt(10 + 17 * salt, salt), max_tokens=12, priority=salt % 2)
    settings = [{"window": 16, "sinkTokens": 5}, False, {"window": 20, "sinkTokens": 0}, {"window": 16}]
    generation = 1
    while bench.engine.has_work():
        generation += 1
        changed = message(
            generation,
            continuousBatching=batching,
            slidingWindow=settings[generation % 4],
            kvQuantization=generation % 3 == 0,
        )
        assert bench.engine.set_switches(changed)
        bench.check()
        bench.steps(8)
        assert bench.engine.stats()["steps_without_progress"] == 0
    bench.assert_right()  # with the window that was in force for each token
    assert all(len(bench.tokens(id)) == 12 for id in bench.requests)
    bench.assert_drained()
    bench.engine.set_switches(message(generation + 1, **WINDOW))
    after = bench.add(prompt(70, 9), max_tokens=12)
    bench.run()
    assert set(bench.windows[after]) == {Window(16, 5)}
    bench.assert_right(after)


def test_speculation_within_a_window_gives_the_same_tokens() -> None:
    found = []
    for speculation in (False, {"method": "ngram", "tokens": 8}):
        bench = Bench(
            total_pages=64,
            page_tokens=4,
            repeats=True,
            switches=message(1, **WINDOW, speculativeDecoding=speculation),
        )
        bench.add(prompt(40), max_tokens=80)
        finish(bench)
        bench.assert_right()
        found.append(bench.tokens("r0"))
    assert bench.engine.stats()["spec_accepted_tokens"] > 10
    assert found[0] == found[1]


# What the integrity check finds


def keep_a_page(bench: Bench) -> None:
    sequence = bench.engine._running["r0"]
    sequence.pages[3] = bench.engine._tables.pool.take(1)[0]


def give_one_too_many_back(bench: Bench) -> None:
    sequence = bench.engine._running["r0"]
    last = max(at for at, page in enumerate(sequence.pages) if page == GIVEN_BACK)
    bench.engine._tables.pool._free.append(sequence.pages[last + 1])
    sequence.pages[last + 1] = GIVEN_BACK


def miscount(bench: Bench) -> None:
    bench.engine._running["r0"].given_back -= 1


@pytest.mark.parametrize("damage", [keep_a_page, give_one_too_many_back, miscount])
def test_a_page_given_back_wrongly_is_reported(damage) -> None:
    bench = Bench(total_pages=64, page_tokens=4, switches=message(1, **WINDOW, **CHUNKS))
    bench.add(prompt(60), max_tokens=20)
    bench.steps(6)
    bench.check()
    damage(bench)
    problems = bench.engine.integrity()["problems"]
    assert any("of its table are given back" in problem for problem in problems), problems
