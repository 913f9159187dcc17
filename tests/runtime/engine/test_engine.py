"""The engine step: stamps, ends, failures, and switches that change under running requests."""

from __future__ import annotations

import pytest
import torch
from page_model import VOCAB, Bench, expected, message, prompt

from firsttoken_api.optimizations import NAMES
from firsttoken_runtime.engine.engine import FAILED_STEPS_IN_A_ROW, EngineFailure
from firsttoken_runtime.engine.requests import NO_TOKEN, AdmissionError, Finish

ENGINE_SWITCHES = ("continuousBatching", "prefixCache", "chunkedPrefill", "priorityScheduling")
EVERYTHING_OFF = dict.fromkeys(ENGINE_SWITCHES, False)


def test_the_first_token_carries_the_stamps_of_its_segments() -> None:
    switches = message(1, chunkedPrefill={"chunkSize": 16})
    bench = Bench(page_tokens=4, seconds_per_token=0.01, switches=switches)
    bench.clock.pass_seconds(1)
    arrival = bench.clock.now_ns
    bench.add(prompt(40), max_tokens=2)
    bench.clock.pass_seconds(0.5)  # in the queue
    bench.run()
    first, second = bench.events["r0"]
    assert first.prefill_start_ns == arrival + 500_000_000
    assert first.prefill_end_ns == arrival + 500_000_000 + 40 * 10_000_000
    assert first.sampled_ns >= first.prefill_end_ns
    assert (second.prefill_start_ns, second.cached_tokens) == (None, None)


def test_prefill_start_stays_the_first_one_when_preempted_before_the_first_token() -> None:
    bench = Bench(
        total_pages=400,
        page_tokens=4,
        seconds_per_token=0.01,
        switches=message(1, continuousBatching={"maxSequences": 1}, chunkedPrefill={"chunkSize": 16}),
    )
    bench.add(prompt(60, 1), id="low", priority=1)
    begin = bench.clock.now_ns
    bench.step()
    bench.add(prompt(10, 2), id="urgent", priority=0)
    bench.run()
    assert bench.engine.stats()["preemptions"] == 1
    assert bench.events["low"][0].prefill_start_ns == begin
    bench.assert_right()


def test_eos_and_stop_tokens_end_with_stop_and_ignore_eos_ignores_only_eos() -> None:
    bench = Bench()
    bench.add(prompt(9), max_tokens=40)
    bench.run()
    tokens = bench.tokens("r0")
    stop = tokens[5]
    cut = tokens[: tokens.index(stop) + 1]
    bench.add(prompt(9), max_tokens=40, stop_token_ids=(stop,))
    bench.run()
    assert (bench.tokens("r1"), bench.finish("r1")) == (cut, Finish.STOP)
    as_eos = Bench(eos_token_ids=(stop,))
    as_eos.add(prompt(9), max_tokens=40, ignore_eos=False)
    as_eos.add(prompt(9), max_tokens=40, ignore_eos=True)
    as_eos.run()
    assert (as_eos.tokens("r0"), as_eos.finish("r0")) == (cut, Finish.STOP)
    assert (as_eos.tokens("r1"), as_eos.finish("r1")) == (tokens, Finish.LENGTH)


@pytest.mark.parametrize(("pages", "length", "generated"), [(64, 20, 11), (4, 100, 8)])
def test_max_tokens_is_cut_to_the_models_length_or_the_pool(pages: int, length: int, generated: int) -> None:
    bench = Bench(total_pages=pages, page_tokens=4, max_model_len=length)
    bench.add(prompt(9), max_tokens=1000)
    bench.run()
    assert (len(bench.tokens("r0")), bench.finish("r0")) == (generated, Finish.LENGTH)
    bench.assert_right()


@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        ((), "empty_prompt", "no tokens"),
        (tuple(prompt(30)), "prompt_too_long", "with one token to generate 31; this server takes 20 in all"),
        ((5, VOCAB), "token_out_of_range", f"token {VOCAB}; this model has tokens 0 to {VOCAB - 1}"),
        ((-1,), "token_out_of_range", "token -1"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(tokens, code: str, words: str) -> None:
    bench = Bench(max_model_len=20)
    with pytest.raises(AdmissionError, match=words) as refused:
        bench.add(tokens)
    assert (refused.value.code, refused.value.status) == (code, 400)
    assert not bench.engine.has_work()


def test_a_bias_on_an_unknown_token_is_refused() -> None:
    with pytest.raises(AdmissionError, match=f"logit_bias has token {VOCAB + 3}"):
        Bench().add([1, 2], logit_bias={VOCAB + 3: 1.0})


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add([1, 2], id="same")
    with pytest.raises(AdmissionError, match="'same' is in use"):
        bench.add([1, 2], id="same")


def test_draining_takes_no_more_and_finishes_what_is_here() -> None:
    bench = Bench()
    bench.add(prompt(9))
    bench.engine.drain()
    with pytest.raises(AdmissionError) as refused:
        bench.add(prompt(9))
    assert refused.value.status == 503
    bench.run()
    bench.assert_right()


def test_aborting_somebody_who_is_not_here_says_so() -> None:
    assert not Bench().engine.abort("nobody")


def test_an_abort_tells_its_last_event_with_the_next_step() -> None:
    bench = Bench()
    bench.add(prompt(9), max_tokens=9)
    bench.steps(3)
    assert bench.engine.abort("r0")
    assert bench.engine.has_work()
    [event] = bench.step()
    assert (event.token, event.index, event.finish) == (NO_TOKEN, 3, Finish.ABORT)
    assert not bench.engine.has_work()


def test_out_of_memory_in_a_prefill_ends_that_request_and_costs_nobody_else_a_token() -> None:
    bench = Bench(page_tokens=4)
    bench.add(prompt(9, 1), max_tokens=20, id="decoding")
    bench.steps(3)
    bench.add(prompt(90, 2), id="too much")
    bench.failures.append(torch.OutOfMemoryError("no memory for the activations"))
    bench.step()
    assert (bench.finish("too much"), bench.tokens("too much")) == (Finish.ERROR, [])
    bench.check()
    bench.run()
    bench.assert_right("decoding")
    bench.assert_drained()
    assert bench.add(prompt(90, 2)), "its pages were not kept"
    bench.run()
    assert bench.cached("r2") == 0


def test_a_failing_step_without_prefill_ends_all_of_it() -> None:
    bench = Bench()
    for salt in (1, 2):
        bench.add(prompt(9, salt), max_tokens=20)
    bench.steps(3)
    bench.failures.append(RuntimeError("the device is gone"))
    assert {event.finish for event in bench.step()} == {Finish.ERROR}
    bench.assert_drained()


def test_a_runner_that_always_fails_ends_the_engine() -> None:
    bench = Bench()
    for _ in range(FAILED_STEPS_IN_A_ROW - 1):
        bench.add(prompt(9))
        bench.failures.append(RuntimeError("the device is gone"))
        bench.step()
    bench.add(prompt(9))
    bench.failures.append(RuntimeError("the device is gone"))
    with pytest.raises(EngineFailure, match="3 steps in a row, last with RuntimeError: the device is gone"):
        bench.engine.step()


def test_failures_with_good_steps_between_do_not_end_the_engine() -> None:
    bench = Bench()
    for _ in range(2 * FAILED_STEPS_IN_A_ROW):
        bench.add(prompt(9))
        bench.failures.append(RuntimeError("a bad moment"))
        bench.step()
        good = bench.add(prompt(9))
        bench.run()
        bench.assert_right(good)


def test_out_of_memory_does_not_end_the_engine_however_often() -> None:
    bench = Bench()
    for _ in range(2 * FAILED_STEPS_IN_A_ROW):
        bench.add(prompt(9))
        bench.failures.append(torch.OutOfMemoryError("no memory"))
        bench.step()
    bench.add(prompt(9), id="after")
    bench.run()
    bench.assert_right("after")


def test_logits_without_a_number_end_only_their_request() -> None:
    bench = Bench()
    run = bench.model.run

    def broken(chunks):
        logits = run(chunks)
        logits[0] = float("nan")
        return logits

    bench.add(prompt(9, 1))
    bench.add(prompt(9, 2))
    bench.model.run = broken
    bench.step()
    bench.model.run = run
    bench.run()
    assert bench.finish("r0") == Finish.ERROR
    bench.assert_right("r1")
    bench.assert_drained()


@pytest.mark.parametrize("turned", [*EVERYTHING_OFF, "everything"])
@pytest.mark.parametrize("steps_before", [1, 2, 5])
def test_any_switch_turned_in_mid_flight_changes_no_token(turned: str, steps_before: int) -> None:
    bench = Bench(total_pages=48, page_tokens=4, switches=message(1, chunkedPrefill={"chunkSize": 16}))
    for salt in (1, 1, 2, 3):
        bench.add(prompt(41, salt), max_tokens=12)
    bench.steps(steps_before)
    off = EVERYTHING_OFF if turned == "everything" else {turned: False}
    assert bench.engine.set_switches(message(2, **off))
    for salt in (1, 2):
        bench.add(prompt(41, salt), max_tokens=12)
    bench.steps(3)
    bench.check()
    assert bench.engine.set_switches(message(3))
    bench.add(prompt(41, 1), max_tokens=12)
    bench.run()
    bench.assert_right()
    bench.assert_drained()


def test_answers_are_the_same_with_everything_on_and_everything_off_alone_and_mixed() -> None:
    requests = [(prompt(length, salt), length % 3) for salt, length in enumerate([1, 7, 16, 33, 64, 100, 64])]
    samplings = [{}, {"temperature": 0.9, "seed": 11}, {"temperature": 0.7, "seed": 5, "top_p": 0.8}]
    answers = []
    for switches in (message(1), message(1, **EVERYTHING_OFF)):
        for together in (True, False):
            bench = Bench(switches=switches)
            for tokens, kind in requests:
                bench.add(tokens, max_tokens=15, **samplings[kind])
                if not together:
                    bench.run()
            bench.run()
            bench.assert_right()
            answers.append([bench.tokens(id) for id in bench.requests])
    assert all(answer == answers[0] for answer in answers)


def test_the_prefix_cache_switched_off_is_empty_at_once_but_for_pages_in_use() -> None:
    bench = Bench(page_tokens=4)
    bench.add(prompt(40, 1))
    bench.run()
    bench.add(prompt(40, 2), max_tokens=9)
    bench.steps(2)
    assert bench.engine.set_switches(message(2, prefixCache=False))
    pages = bench.engine.pages()
    assert (pages["cached"], pages["locked"]) == (0, 10)
    bench.run()
    assert bench.engine.pages()["free"] == bench.engine.pages()["total"]
    bench.add(prompt(40, 2))
    bench.run()
    assert bench.cached("r2") == 0
    bench.assert_right()


def test_a_smaller_cache_cap_shrinks_the_cache_at_once() -> None:
    bench = Bench(total_pages=64, page_tokens=4)
    bench.add(prompt(120))
    bench.run()
    assert bench.engine.pages()["cached"] == 30
    bench.engine.set_switches(message(2, prefixCache={"maxMemory": "10Ki"}))  # pages of 1 KiB
    assert bench.engine.pages()["cached"] == 10
    bench.check()


def test_pages_are_evicted_when_running_sequences_need_them() -> None:
    bench = Bench(total_pages=32, page_tokens=4, switches=message(1, prefixCache={"maxMemory": "100%"}))
    for salt in range(1, 5):
        bench.add(prompt(100, salt))
        bench.run()
    bench.assert_right()
    assert bench.engine.stats()["evictions"] > 0
    assert bench.engine.stats()["preemptions"] == 0


def test_a_flush_is_taken_under_running_requests() -> None:
    bench = Bench(page_tokens=4)
    bench.add(prompt(40), max_tokens=9)
    bench.steps(3)
    bench.engine.flush_prefix_cache()
    bench.check()
    bench.add(prompt(40))
    bench.run()
    bench.assert_right()
    assert bench.cached("r1") == 0
    bench.assert_drained()


def test_static_batches_run_to_their_end_before_the_next_is_formed() -> None:
    bench = Bench(switches=message(1, continuousBatching=False))
    bench.add(prompt(9, 1), max_tokens=2)
    bench.add(prompt(9, 2), max_tokens=8)
    bench.step()
    bench.add(prompt(9, 3), max_tokens=2)
    bench.run()
    assert bench.finished_at.keys() == {"r0", "r1", "r2"}
    sizes = [len(chunks) for chunks in bench.model.steps]
    assert sizes == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    bench.assert_right()


def test_older_switches_are_refused_and_the_same_ones_are_no_change() -> None:
    bench = Bench(switches=message(5))
    assert bench.engine.set_switches(message(5))
    assert not bench.engine.set_switches(message(5, prefixCache=False))
    assert not bench.engine.set_switches(message(4))
    assert bench.engine.set_switches(message(6, prefixCache=False))
    assert [state["name"] for state in bench.engine.switch_states()] == list(NAMES)


def test_the_runner_is_told_whether_fused_kernels_are_on() -> None:
    bench = Bench()
    assert bench.model.fused is False, "this runner has none"
    bench.model.reasons["fusedKernels"] = None
    bench.engine.set_switches(message(2))
    assert bench.model.fused is True
    bench.engine.set_switches(message(3, fusedKernels=False))
    assert bench.model.fused is False


def test_requests_show_where_everybody_is() -> None:
    bench = Bench(
        page_tokens=4,
        switches=message(1, continuousBatching={"maxSequences": 2}, chunkedPrefill={"chunkSize": 16}),
    )
    bench.add(prompt(5, 1), max_tokens=20, id="short")
    bench.add(prompt(90, 2), id="long")
    bench.add(prompt(95, 3), id="later")
    bench.clock.pass_seconds(0.25)
    bench.step()
    shown = {entry["id"]: entry for entry in bench.engine.requests()}
    assert [shown[id]["state"] for id in ("short", "long", "later")] == ["decode", "prefill", "waiting"]
    assert (shown["short"]["output_tokens"], shown["long"]["computed_tokens"]) == (1, 16)
    assert shown["later"]["waited_ms"] == 250.0


def test_unseeded_draws_differ_and_an_engine_seed_repeats_them() -> None:
    def draws(seed: int | None) -> list[list[int]]:
        bench = Bench(seed=seed)
        for _ in range(2):
            bench.add(prompt(9), max_tokens=12, temperature=1.5)
        bench.run()
        return [bench.tokens(id) for id in bench.requests]

    assert draws(1) == draws(1)
    assert draws(1)[0] != draws(1)[1]
    assert draws(None) != draws(None)


def test_log_probabilities_travel_with_the_token() -> None:
    bench = Bench()
    bench.add(prompt(9), max_tokens=1, logprobs=3)
    [event] = bench.step()
    assert event.top[0] == (event.token, event.logprob)
    assert len(event.top) == 3


def test_statistics_count_what_happened() -> None:
    bench = Bench(total_pages=64, page_tokens=4, seconds_per_token=0.01)
    bench.add(prompt(40))
    bench.run()
    bench.add(prompt(40))
    bench.step()
    stats = bench.engine.stats()
    assert (stats["running"], stats["waiting"]) == (1, 0)
    assert stats["kv_usage"] == pytest.approx(10 / 64)
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (80, 36)
    assert stats["prefill_tokens"] == 44
    assert stats["generation_tokens"] == 5
    assert stats["finished"] == {"length": 1}
    assert stats["prompt_tokens"] == {"mean": 40.0, "p50": 40, "p95": 40, "p99": 40}
    assert stats["prompt_tokens_histogram"] == {"64": 2}
    assert stats["prefill_tokens_per_second"] == pytest.approx(100, rel=0.05)


def test_the_reference_itself_depends_on_every_token_of_the_context() -> None:
    """The page model would be no test if it answered alike for different contexts."""
    bench = Bench()
    answers = set()
    for place in range(20):
        tokens = prompt(20)
        tokens[place] = 1 + tokens[place] % (VOCAB - 1)
        id = bench.add(tokens, max_tokens=6)
        answers.add(tuple(expected(bench.requests[id], 6)))
    assert len(answers) == 20
