"""Symptoms that inference engines were reported to show, one test each. Named by what the user saw."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_model import VOCAB, Bench, message, prompt

from firsttoken_runtime.engine.requests import AdmissionError, Finish

CPU_SECONDS_PER_TOKEN = 1 / 500


def test_a_short_request_does_not_wait_for_a_long_prefill() -> None:
    """One prompt of 1,500 tokens, four of 40 tokens 50 ms later, on a machine that prefills 500 tokens/s."""

    def slowest_short_and_long(chunked: bool) -> tuple[float, float]:
        bench = Bench(
            total_pages=512,
            page_tokens=16,
            seconds_per_token=CPU_SECONDS_PER_TOKEN,
            switches=message(1, chunkedPrefill=chunked),
            prefill_tokens_per_second=500,
        )
        begin = bench.clock.now_ns
        bench.add(prompt(1500), id="long")
        arrival = begin + 50_000_000
        bench.step()
        now, bench.clock.now_ns = bench.clock.now_ns, arrival  # they arrive while the first step runs
        shorts = [bench.add(prompt(40, salt)) for salt in (2, 3, 4, 5)]
        bench.clock.now_ns = now
        bench.run()
        bench.assert_right()
        slowest = max(bench.first_at[id] for id in shorts) - arrival
        return slowest / 1e9, (bench.first_at["long"] - begin) / 1e9

    short, long = slowest_short_and_long(chunked=True)
    short_behind, long_alone = slowest_short_and_long(chunked=False)
    assert short < 0.3 * short_behind, (short, short_behind)
    assert short < 1.0
    assert long < 1.25 * long_alone, (long, long_alone)


def test_a_prompt_between_the_pools_size_and_the_models_length_blocks_nobody() -> None:
    bench = Bench(total_pages=8, page_tokens=4, max_model_len=400)
    with pytest.raises(AdmissionError, match="needs 13 KV pages; the pool has 8 of 4 tokens") as refused:
        bench.add(prompt(50))
    assert (refused.value.code, refused.value.status) == ("pool_too_small", 400)
    bench.add(prompt(20))
    bench.run()
    bench.assert_right()


def test_few_pages_do_not_hang() -> None:
    bench = Bench(total_pages=50, page_tokens=16)
    for salt in range(10):
        bench.add(prompt(12, salt), max_tokens=30)
    for salt in range(5):
        bench.add(prompt(700, salt), max_tokens=30)
    bench.run()
    bench.assert_right()
    bench.assert_drained()


@pytest.mark.parametrize("seed", range(4))
def test_sizes_near_capacity_do_not_leave_everybody_waiting(seed: int) -> None:
    """`Bench.run` fails on any step with requests here and nothing running."""
    dice = random.Random(seed)
    bench = Bench(total_pages=24, page_tokens=4, switches=message(1, prefixCache={"maxMemory": "100%"}))
    for _ in range(40):
        tokens = prompt(dice.choice([1, 40, 60, 80, 93]), dice.randrange(4))
        bench.add(tokens, max_tokens=dice.choice([1, 3, 12]))
        bench.steps(dice.randrange(6))
    bench.run()
    bench.assert_right()
    bench.assert_drained()


@pytest.mark.parametrize("cache", [True, False])
def test_two_sequences_of_more_than_half_the_pool_do_not_preempt_each_other_for_ever(cache: bool) -> None:
    bench = Bench(total_pages=20, page_tokens=4, switches=message(1, prefixCache=cache))
    # Given two that fit side by side at first and grow to 60 % of the pool each
    bench.add(prompt(20, 1), max_tokens=28)
    bench.add(prompt(20, 2), max_tokens=28)
    steps = bench.run()
    bench.assert_right()
    assert bench.engine.stats()["preemptions"] <= 2
    assert steps < 70
    # … and two that fill 60 % from the start
    bench.add(prompt(48, 3), max_tokens=4)
    bench.add(prompt(48, 4), max_tokens=4)
    before = bench.engine.stats()["preemptions"]
    bench.run()
    bench.assert_right()
    assert bench.engine.stats()["preemptions"] == before


@pytest.mark.parametrize("seed", range(4))
def test_mixed_priorities_and_long_outputs_on_a_small_pool(seed: int) -> None:
    """Nobody is scheduled and preempted in one step; the page model and integrity would show it."""
    dice = random.Random(seed)
    bench = Bench(total_pages=16, page_tokens=4, switches=message(1, continuousBatching={"maxSequences": 3}))
    for _ in range(30):
        bench.add(prompt(dice.randrange(1, 30), dice.randrange(3)), max_tokens=30, priority=dice.randrange(3))
        for _ in range(dice.randrange(5)):
            bench.step()
            bench.check()
            bench.clock.pass_seconds(0.05)
    bench.run()
    bench.assert_right()
    bench.assert_drained()
    assert bench.engine.stats()["preemptions"] > 0


def test_high_priority_takes_a_place_from_low_and_equals_do_not_ping_pong() -> None:
    bench = Bench(total_pages=2000, switches=message(1, continuousBatching={"maxSequences": 2}))
    for salt in (1, 2):
        bench.add(prompt(8, salt), max_tokens=1000, priority=5)
    bench.steps(10)
    urgent = bench.add(prompt(8, 3), max_tokens=50, priority=0)
    bench.steps(2)
    assert bench.events[urgent], "no token within two steps"
    for salt in (4, 5):  # of the class of those that run: they wait
        bench.add(prompt(8, salt), max_tokens=10, priority=5)
    bench.run()
    bench.assert_right()
    assert bench.engine.stats()["preemptions"] == 1


def test_low_priority_gets_on_between_two_displacements() -> None:
    bench = Bench(switches=message(1, continuousBatching={"maxSequences": 1}))
    bench.add(prompt(8, 1), max_tokens=60, id="low", priority=1)
    bench.steps(3)
    for salt in range(2, 8):
        had = len(bench.tokens("low"))
        urgent = bench.add(prompt(8, salt), max_tokens=3, priority=0)
        while bench.finish(urgent) is None:
            bench.step()
        bench.steps(2)  # it resumes, and gets a token before the next one takes its place
        assert len(bench.tokens("low")) > had
    assert bench.engine.stats()["preemptions"] == 6
    bench.run()
    bench.assert_right()


def test_a_long_prompt_finishes_under_an_endless_stream_of_short_ones() -> None:
    bench = Bench(
        total_pages=600,
        page_tokens=4,
        seconds_per_token=CPU_SECONDS_PER_TOKEN,
        switches=message(
            1,
            continuousBatching={"maxSequences": 2, "maxBatchTokens": 64},
            priorityScheduling={"ageingTokensPerSecond": 0.0, "maxWaitSeconds": 4.0},
        ),
    )
    begin = bench.clock.now_ns
    for salt in range(2):
        bench.add(prompt(40, salt), max_tokens=1)
    bench.add(prompt(900), id="long", max_tokens=1)
    for salt in range(400):
        if bench.events["long"]:
            break
        while bench.engine.stats()["waiting"] < 3:  # there is always a shorter one
            bench.add(prompt(40, salt % 50), max_tokens=1)
            salt += 1
        bench.step()
    waited = (bench.first_at["long"] - begin) / 1e9
    assert waited < 4.0 + 900 * CPU_SECONDS_PER_TOKEN + 1.0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65])
def test_a_prompt_answers_the_same_from_the_cache_around_page_and_chunk_edges(length: int) -> None:
    bench = Bench(page_tokens=4, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    for _ in range(3):
        bench.add(prompt(length), max_tokens=9)
        bench.run()
    bench.assert_right()
    assert bench.tokens("r0") == bench.tokens("r1") == bench.tokens("r2")
    assert bench.cached("r1") == (length - 1) // 4 * 4


def test_an_abort_mid_prefill_leaves_no_page_that_was_not_computed() -> None:
    bench = Bench(page_tokens=4, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    bench.add(prompt(46))
    bench.step()
    assert bench.engine.abort("r0")
    assert [event.finish for event in bench.step()] == [Finish.ABORT]
    bench.assert_drained()
    again = bench.add(prompt(46))
    bench.run()
    bench.assert_right(again)
    assert bench.cached(again) == 16


@pytest.mark.parametrize("seed", range(4))
def test_preemption_and_aborts_in_mid_prefill_do_not_poison_the_prefix(seed: int) -> None:
    dice = random.Random(seed)
    bench = Bench(
        total_pages=20,
        page_tokens=4,
        switches=message(1, chunkedPrefill={"chunkSize": 16}, prefixCache={"maxMemory": "100%"}),
    )
    kept = []
    for _ in range(40):
        id = bench.add(prompt(dice.randrange(20, 60)), max_tokens=16)
        bench.steps(dice.randrange(4))
        if dice.random() < 0.4:
            bench.engine.abort(id)
        else:
            kept.append(id)
        bench.check()
    bench.run()
    bench.assert_right(*kept)
    bench.assert_drained()
    assert bench.engine.stats()["prefix_cache_hits"] > 0


def test_two_equal_prompts_admitted_in_one_step_do_not_hit_each_others_uncomputed_pages() -> None:
    """Short enough that waiting for the other's pages would not be worth a step."""
    bench = Bench(page_tokens=4, switches=message(1, continuousBatching={"maxBatchTokens": 100}))
    first, second = bench.add(prompt(31)), bench.add(prompt(31))
    bench.step()
    assert [len(chunk.token_ids) for chunk in bench.model.steps[0]] == [31, 31]
    bench.run()
    bench.assert_right()
    assert bench.cached(first) == bench.cached(second) == 0
    bench.assert_drained()
    assert bench.engine.pages()["cached"] == 8, "pages computed twice are kept once"


@pytest.mark.parametrize("length", [16, 17, 32, 33, 48, 64])
def test_a_full_hit_computes_one_token_at_least(length: int) -> None:
    bench = Bench(page_tokens=16, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    for _ in range(2):
        bench.add(prompt(length), max_tokens=2)
        bench.run()
    bench.assert_right()
    assert all(chunk.token_ids for step in bench.model.steps for chunk in step)


def test_a_cold_prompt_in_chunks_reports_no_cached_tokens() -> None:
    bench = Bench(page_tokens=4, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    bench.add(prompt(60))
    bench.run()
    assert bench.cached("r0") == 0
    assert bench.engine.stats()["prefix_cache_hits"] == 0
    assert bench.engine.stats()["prefix_cache_queries"] == 60


def test_own_pages_found_again_after_preemption_are_no_hits() -> None:
    bench = Bench(total_pages=20, page_tokens=4, switches=message(1, prefixCache={"maxMemory": "100%"}))
    bench.add(prompt(20, 1), max_tokens=40)
    bench.add(prompt(20, 2), max_tokens=40)
    bench.run()
    stats = bench.engine.stats()
    assert stats["preemptions"] > 0
    assert (stats["prefix_cache_hits"], stats["prefix_cache_queries"]) == (0, 40)


def test_256_requests_with_random_aborts_leave_no_page_behind() -> None:
    dice = random.Random(1)
    bench = Bench(
        total_pages=3000, page_tokens=4, switches=message(1, continuousBatching={"maxSequences": 256})
    )
    for salt in range(256):
        bench.add(prompt(dice.randrange(1, 60), salt % 9), max_tokens=dice.randrange(1, 20))
    victims = dice.sample(sorted(bench.requests), 128)
    while bench.engine.has_work():
        bench.step()
        if victims and dice.random() < 0.7:
            bench.engine.abort(victims.pop())
    bench.assert_drained()
    bench.assert_right(*(id for id in bench.requests if bench.finish(id) != Finish.ABORT))


@given(place=st.integers(0, 38), change=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_prompt_crafted_to_collide_finds_no_page_of_another(place: int, change: int) -> None:
    """Equal sums and equal polynomial hashes (base 31), at any place: pages are found by tokens alone."""
    victim = [40 + number % 7 for number in range(40)]
    twin = list(victim)
    twin[place] += change
    twin[place + 1] -= 31 * change if place % 2 else change
    twin[place + 1] %= VOCAB
    bench = Bench(page_tokens=4)
    for tokens in (victim, twin):
        bench.add(tokens)
        bench.run()
    bench.assert_right()
    assert bench.cached("r1") == place // 4 * 4


def test_tenants_with_different_salts_share_no_pages() -> None:
    bench = Bench(page_tokens=4)
    for salt in ("one", "two", "one"):
        bench.add(prompt(40), cache_salt=salt)
        bench.run()
    assert [bench.cached(id) for id in ("r0", "r1", "r2")] == [0, 0, 36]
    bench.assert_right()


def test_a_one_token_reply_has_its_stamps() -> None:
    bench = Bench(seconds_per_token=0.001)
    bench.add(prompt(10), max_tokens=1)
    [event] = bench.step()
    assert event.finish == Finish.LENGTH
    assert event.prefill_end_ns - event.prefill_start_ns == 10_000_000


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_an_aborted_request_frees_its_pages_at_once_queued_in_prefill_or_decoding(steps: int) -> None:
    bench = Bench(page_tokens=4, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    bench.add(prompt(60), max_tokens=100)
    bench.steps(steps)
    bench.engine.abort("r0")
    bench.assert_drained()
    bench.step()
    assert not bench.engine.has_work()


def test_a_full_queue_answers_429_with_the_time_it_takes() -> None:
    bench = Bench(
        max_queued=3,
        switches=message(1, continuousBatching={"maxSequences": 1}),
        seconds_per_token=0.01,
        total_pages=400,
    )
    bench.add(prompt(100), max_tokens=50)
    bench.step()
    for salt in (2, 3, 4):
        bench.add(prompt(300, salt))
    with pytest.raises(AdmissionError, match="3 requests with 900 tokens wait already") as refused:
        bench.add(prompt(10))
    assert (refused.value.code, refused.value.status) == ("queue_full", 429)
    assert refused.value.retry_after_seconds == pytest.approx(9.0)
    bench.run()
    bench.assert_right()
