"""429 before the queue is without bound: how many may wait, and for how long."""

from __future__ import annotations

import random

import pytest
from page_model import Bench, message, prompt

from firsttoken_runtime.engine.prediction import Calibration, PrefillRate
from firsttoken_runtime.engine.requests import AdmissionError, Finish

RATE = 500  # prompt tokens a second


def bench(**batching: object) -> Bench:
    return Bench(
        total_pages=2000,
        page_tokens=16,
        seconds_per_token=1 / RATE,
        prefill_tokens_per_second=RATE,
        switches=message(1, prefixCache=False, continuousBatching=batching),
        max_queued=1000,
    )


def refused(on: Bench, tokens: int, salt: int = 99, **request: object) -> AdmissionError:
    with pytest.raises(AdmissionError) as caught:
        on.add(prompt(tokens, salt), **request)
    return caught.value


class TestMaxQueued:
    def test_auto_is_the_start_up_option(self) -> None:
        on = Bench(max_queued=2, switches=message(1, continuousBatching={"maxSequences": 1}))
        for salt in range(3):
            on.add(prompt(8, salt))
        assert refused(on, 8).code == "queue_full"

    @pytest.mark.parametrize("most", [0, 1, 5])
    def test_a_number_takes_its_place_and_can_be_changed_live(self, most: int) -> None:
        on = Bench(max_queued=1000, switches=message(1, continuousBatching={"maxSequences": 2}))
        on.engine.set_switches(message(2, continuousBatching={"maxSequences": 2, "maxQueued": most}))
        for salt in range(2 + most):
            on.add(prompt(8, salt))
        full = refused(on, 8)
        assert (full.code, full.status) == ("queue_full", 429)
        assert f"the limit is {most};" in str(full)
        on.engine.set_switches(message(3, continuousBatching={"maxSequences": 2, "maxQueued": most + 1}))
        on.add(prompt(8, 50))
        on.run()
        on.assert_right()

    def test_it_holds_with_the_optimization_off_too(self) -> None:
        off = message(1, continuousBatching={"enabled": False, "maxSequences": 1, "maxQueued": 0})
        on = Bench(switches=off)
        on.add(prompt(8))
        assert refused(on, 8).code == "queue_full"

    def test_refusals_are_counted(self) -> None:
        on = bench(maxSequences=1, maxQueued=0)
        on.add(prompt(8))
        refused(on, 8)
        refused(on, 8)
        assert on.engine.stats()["refused"] == {"queue_full": 2}


class TestPredictedTtft:
    def test_a_request_whose_first_token_would_come_too_late_is_refused_with_the_time_to_wait(self) -> None:
        on = bench()
        for salt in range(5):
            on.add(prompt(300, salt))  # 3 s of prefill
        late = refused(on, 310, ttft_limit_seconds=1.0)
        assert (late.code, late.status) == ("ttft_limit", 429)
        assert "the first token would come after 3.6" in str(late)
        assert "1500 prompt tokens are computed before" in str(late)
        assert late.retry_after_seconds == pytest.approx(2.6, abs=0.1)

    def test_what_the_scheduler_takes_later_does_not_count(self) -> None:
        """Short goes first: the long ones that wait do not hold it up. First come first served they do."""
        on = bench()
        for salt in range(5):
            on.add(prompt(300, salt))
        on.add(prompt(20, 60), ttft_limit_seconds=1.0)
        on.engine.set_switches(message(2, prefixCache=False, priorityScheduling=False))
        assert refused(on, 20, ttft_limit_seconds=1.0).code == "ttft_limit"

    def test_cached_tokens_do_not_count(self) -> None:
        on = bench()
        on.engine.set_switches(message(2))
        on.add(prompt(320, 7), max_tokens=1)
        on.run()
        on.add(prompt(2000, 8))
        on.step()
        on.add([*prompt(320, 7), 5], ttft_limit_seconds=1.0)

    def test_the_services_limit_is_live_and_off_at_first(self) -> None:
        on = bench()
        for salt in range(5):
            on.add(prompt(300, salt))
        on.add(prompt(310, 60))
        on.engine.set_switches(message(2, prefixCache=False, continuousBatching={"maxTtftSeconds": 2.0}))
        assert "the limit is 2 s" in str(refused(on, 310))
        # … and the lower of the two counts
        assert "the limit is 0.5 s" in str(refused(on, 310, ttft_limit_seconds=0.5))
        assert "the limit is 2 s" in str(refused(on, 310, ttft_limit_seconds=9.0))
        on.engine.set_switches(message(3, prefixCache=False, continuousBatching={"maxTtftSeconds": 0.0}))
        on.add(prompt(310, 61))

    def test_a_request_that_nothing_is_ahead_of_is_never_refused(self) -> None:
        """However slow the machine seemed: without it the speed would not be measured again."""
        on = bench(maxTtftSeconds=0.001)
        on.add(prompt(1500), ttft_limit_seconds=0.001)
        on.run()
        on.assert_right()

    def test_time_that_was_lost_before_the_engine_counts(self) -> None:
        on = bench()
        on.add(prompt(300))
        on.step()
        arrived = on.clock.now_ns
        on.clock.pass_seconds(5.0)
        assert refused(on, 400, ttft_limit_seconds=3.0, arrival_ns=arrived).code == "ttft_limit"

    def test_a_place_that_is_long_in_coming_counts(self) -> None:
        """Nothing is left to prefill; but the one place is taken by a long answer."""
        on = bench(maxSequences=1)
        on.add(prompt(20, 1), max_tokens=500)
        on.run()
        on.add(prompt(20, 2), max_tokens=500)
        on.steps(5)
        stay = on.engine.stats()["stay_seconds"]
        assert stay == pytest.approx(500 / RATE, rel=0.1)
        late = refused(on, 20, ttft_limit_seconds=0.5)
        assert late.retry_after_seconds == pytest.approx(max(stay - 0.5, 1.0), abs=0.2)

    @pytest.mark.parametrize("by_priority", [True, False])
    def test_predictions_are_about_right_and_say_how_right(self, by_priority: bool) -> None:
        dice = random.Random(3)
        on = bench()
        on.engine.set_switches(message(2, prefixCache=False, priorityScheduling=by_priority))
        for salt in range(60):
            on.add(prompt(dice.randrange(20, 400), salt), max_tokens=2)
            for _ in range(dice.randrange(3)):
                on.step()
        on.run()
        told = on.engine.stats()["predicted_ttft"]
        assert told["requests"] == 60
        assert told["measured_over_predicted"]["p50"] == pytest.approx(1.0, abs=0.5)
        if not by_priority:  # nobody passes, so there is nothing to be surprised by
            assert told["measured_over_predicted"]["p95"] < 1.3


def test_an_open_loop_at_three_times_capacity_keeps_ttft_within_the_limit_and_the_machine_busy() -> None:
    """vLLM#18826: the queue and TTFT grew without limit. Here: 429 with Retry-After beyond it."""
    limit, seconds, length = 2.0, 60.0, 100
    dice = random.Random(5)
    on = bench(maxTtftSeconds=limit)
    arrivals, at = [], 0.0
    while at < seconds:
        at += dice.expovariate(3 * RATE / length)
        arrivals.append(at)
    begin = on.clock.now_ns
    refusals, taken, number = [], {}, 0
    while arrivals or on.engine.has_work():
        now = (on.clock.now_ns - begin) / 1e9
        while arrivals and arrivals[0] <= now:
            arrived, number = arrivals.pop(0), number + 1
            try:
                id = on.add(
                    prompt(dice.randrange(length // 2, length * 3 // 2), number),
                    max_tokens=1,
                    arrival_ns=begin + int(arrived * 1e9),
                )
                taken[id] = arrived
            except AdmissionError as error:
                refusals.append(error)
        if not on.engine.has_work() and arrivals:
            on.clock.now_ns = begin + int(arrivals[0] * 1e9) + 1000
        on.step()
    ttfts = sorted((on.first_at[id] - begin) / 1e9 - arrived for id, arrived in taken.items())
    assert ttfts[len(ttfts) * 95 // 100] < 1.3 * limit
    assert ttfts[-1] < 12.0, "the longest wait bounds what the prediction got wrong"
    assert {error.code for error in refusals} == {"ttft_limit"}
    assert all(error.status == 429 and error.retry_after_seconds >= 1.0 for error in refusals)
    done = sum(len(on.requests[id].prompt) for id in taken)
    assert done > 0.9 * RATE * seconds, "refusing must not leave the machine idle"
    assert all(on.finish(id) == Finish.LENGTH for id in taken)


class TestMeasuring:
    def test_the_rate_follows_the_tokens_of_late(self) -> None:
        rate = PrefillRate(None)
        assert rate.tokens_per_second is None
        assert rate.seconds(100) is None
        for _ in range(100):
            rate.learn(512, 1.0)
        assert rate.tokens_per_second == pytest.approx(512)
        for _ in range(100):
            rate.learn(512, 2.0)
        assert rate.tokens_per_second == pytest.approx(256, rel=0.01)
        assert rate.seconds(512) == pytest.approx(2.0, rel=0.01)

    def test_predictions_are_corrected_by_how_the_last_ones_turned_out_within_reason(self) -> None:
        calibration = Calibration()
        assert calibration.factor == 1.0
        for _ in range(64):
            calibration.learn(1.0, 1.5)
        assert calibration.factor == 1.5
        for _ in range(64):
            calibration.learn(1.0, 100.0)
        assert calibration.factor == 4.0
        for _ in range(64):
            calibration.learn(1.0, 0.0)
        assert calibration.factor == 0.5
        assert calibration.to_json()["measured_over_predicted"]["p50"] == 0.0
