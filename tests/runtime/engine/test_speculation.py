"""Speculative decoding changes when tokens come, and never which."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_model import VOCAB, Bench, expected, message, prompt

from firsttoken_runtime.engine.requests import Finish
from firsttoken_runtime.engine.speculation import StepCost, Track, allot

NGRAM = {"method": "ngram", "tokens": 4}
DRAFT = {"method": "draft", "tokens": 4}
METHODS = pytest.mark.parametrize("method", [NGRAM, DRAFT], ids=["ngram", "draft"])
SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 9, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.2, "seed": 1, "min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"logit_bias": {3: 1.5}, "temperature": 0.8, "seed": 2},
]


def made(method: dict[str, object] | bool = NGRAM, draft_errs: int = 4, **how) -> Bench:
    """An engine whose model repeats itself, and a draft that is wrong at one place in `draft_errs`."""
    how = {"total_pages": 400, "draft_pages": 400, "repeats": True, **how}
    switches = how.pop("switches", {})
    return Bench(draft_errs=draft_errs, switches=message(1, speculativeDecoding=method, **switches), **how)


def counts(bench: Bench) -> tuple[int, int]:
    stats = bench.engine.stats()
    return stats["spec_proposed_tokens"], stats["spec_accepted_tokens"]


@METHODS
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_answers_are_those_without_it_in_fewer_steps(method, sampling) -> None:
    steps, answers = {}, {}
    for switch in (method, False):
        bench = made(switch)
        for salt in range(3):
            bench.add(prompt(10 + salt, salt), max_tokens=60, **sampling)
        steps[bool(switch)] = bench.run()
        bench.assert_right()
        bench.assert_drained()
        answers[bool(switch)] = [bench.tokens(id) for id in bench.requests]
    assert answers[True] == answers[False]
    adjusted = {"repetition_penalty", "logit_bias"} & sampling.keys()
    assert steps[True] == steps[False] if adjusted else steps[True] < 0.75 * steps[False]


def test_a_draft_that_is_the_model_itself_is_always_right_greedy_and_drawn() -> None:
    bench = made(DRAFT, draft_errs=0)
    for sampling in SAMPLINGS[:4]:
        bench.add(prompt(9, 3), max_tokens=50, **sampling)
    steps = bench.run()
    bench.assert_right()
    proposed, accepted = counts(bench)
    assert proposed == accepted > 100
    assert steps <= 2 + 49 / 5 + 1


def test_several_tokens_come_with_one_step_each_with_its_place_and_log_probability() -> None:
    with_it, without = made(DRAFT, draft_errs=0), made(False)
    for bench in (with_it, without):
        bench.add(prompt(9), max_tokens=20, logprobs=2)
    with_it.step()
    with_it.step()
    events = with_it.step()
    assert [event.index for event in events] == list(range(6, 11))
    with_it.run()
    without.run()
    for ours, plain in zip(with_it.events["r0"], without.events["r0"], strict=True):
        assert (ours.token, ours.index, ours.finish) == (plain.token, plain.index, plain.finish)
        assert ours.logprob == pytest.approx(plain.logprob)
        assert ours.top == plain.top


@METHODS
def test_a_stop_token_among_accepted_ones_ends_the_answer_there(method) -> None:
    plain = made(False)
    plain.add(prompt(9), max_tokens=40)
    plain.run()
    tokens = plain.tokens("r0")
    for place in range(12, 20):
        bench = made(method, draft_errs=0)
        bench.add(prompt(9), max_tokens=40, stop_token_ids=(tokens[place],))
        bench.run()
        end = tokens.index(tokens[place])
        assert (bench.tokens("r0"), bench.finish("r0")) == (tokens[: end + 1], Finish.STOP)
        bench.assert_drained()


@METHODS
@pytest.mark.parametrize("most", range(1, 14))
def test_no_token_comes_beyond_max_tokens_and_none_is_proposed_that_could_not_be_used(method, most) -> None:
    bench = made(method, draft_errs=0)
    bench.add([5, 2, 7, 1, 4, 6] * 4, max_tokens=most)
    bench.run()
    assert (len(bench.tokens("r0")), bench.finish("r0")) == (most, Finish.LENGTH)
    assert max(chunk.end for chunks in bench.model.steps for chunk in chunks) == 24 + most - 1
    bench.assert_right()


def test_the_models_length_and_the_pool_bound_proposals_too() -> None:
    for pages, length in ((8, 1000), (400, 30)):
        bench = made(DRAFT, total_pages=pages, max_model_len=length, draft_errs=0)
        bench.add(prompt(9), max_tokens=1000)
        bench.run()
        bench.assert_right()
        assert len(bench.tokens("r0")) == min(pages * 4 + 1, length) - 9


@METHODS
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_toggled_and_changed_at_any_step_every_token_stays_the_same(method, data) -> None:
    bench = made(
        method,
        total_pages=data.draw(st.integers(16, 60)),
        draft_pages=data.draw(st.sampled_from([6, 400])),
        switches={"chunkedPrefill": {"chunkSize": 16}},
    )
    for salt in range(data.draw(st.integers(1, 5))):
        bench.add(
            prompt(data.draw(st.integers(1, 40)), salt % 2),
            max_tokens=data.draw(st.integers(1, 30)),
            **data.draw(st.sampled_from(SAMPLINGS)),
        )
    for generation in range(2, 40):
        if not bench.engine.has_work():
            break
        bench.steps(data.draw(st.integers(1, 4)))
        bench.check()
        choice = data.draw(
            st.sampled_from([True, False, NGRAM, DRAFT, {**NGRAM, "tokens": 16}, {**DRAFT, "tokens": 1}])
        )
        bench.engine.set_switches(message(generation, speculativeDecoding=choice))
    bench.run()
    bench.assert_right()
    bench.assert_drained()


@METHODS
@pytest.mark.parametrize("cache", [True, False])
def test_proposals_of_a_preempted_request_do_not_survive(method, cache) -> None:
    """A pool that two answers outgrow: who is preempted says the same when it comes back."""
    bench = made(method, total_pages=16, switches={"prefixCache": cache})
    for salt in (1, 2, 3):
        bench.add([3, salt, *([5, 2, 7, 1, 4, 6] * 2)], max_tokens=40, priority=salt)
    for _ in range(1000):
        if not bench.engine.has_work():
            break
        bench.step()
        bench.check()
    assert bench.engine.stats()["preemptions"] > 0
    assert counts(bench)[1] > 0
    bench.assert_right()
    bench.assert_drained()


@METHODS
def test_an_abort_in_mid_flight_gives_every_page_back(method) -> None:
    bench = made(method)
    for salt in (1, 2):
        bench.add(prompt(9, salt), max_tokens=60)
    bench.steps(6)
    assert bench.engine.abort("r0")
    bench.run()
    bench.assert_right("r1")
    bench.assert_drained()
    assert bench.engine._speculation.draft.pages_in_use == 0


@METHODS
def test_a_failing_step_takes_its_proposals_back(method) -> None:
    bench = made(method)
    bench.add(prompt(9), max_tokens=60, id="decoding")
    bench.steps(8)
    bench.add(prompt(20, 2), id="new")
    bench.failures.append(torch.OutOfMemoryError("no memory for the activations"))
    bench.step()
    bench.check()
    bench.run()
    bench.assert_right("decoding")
    bench.assert_drained()


@METHODS
def test_rejected_tokens_are_in_no_cached_prefix(method) -> None:
    """What comes after an answer finds the answer's own pages, whatever was proposed beside it."""
    bench = made(method, draft_errs=2)
    first = bench.add(prompt(13), max_tokens=60)
    bench.run()
    proposed, accepted = counts(bench)
    assert 0 < accepted < proposed
    tokens = [*prompt(13), *bench.tokens(first)]
    for length in range(14, len(tokens), 5):
        bench.add(tokens[:length], max_tokens=20)
        bench.run()
    bench.assert_right()
    assert bench.engine.stats()["prefix_cache_hits"] > 100


def test_nothing_is_proposed_in_a_step_that_prefills() -> None:
    bench = made(NGRAM, switches={"chunkedPrefill": {"chunkSize": 16}})
    bench.add([5, 2, 7, 1, 4, 6] * 4, max_tokens=300, id="decoding")
    bench.steps(6)
    assert any(len(chunk.token_ids) > 1 for chunk in bench.model.steps[-1])
    bench.add(prompt(160, 2), max_tokens=2, id="new")
    while "new" not in bench.first_at:
        bench.step()
        assert [len(c.token_ids) for c in bench.model.steps[-1] if c.logits and c.start > 160] in ([1], [])
        decoding = bench.model.steps[-1][0]
        assert len(decoding.token_ids) == 1
    bench.run()
    bench.assert_right()


def test_no_page_is_evicted_or_preempted_for_a_proposal_while_somebody_waits() -> None:
    bench = made(NGRAM, total_pages=12, switches={"continuousBatching": {"maxSequences": 1}})
    bench.add([5, 2, 7, 1, 4, 6] * 2, max_tokens=30, id="runs")
    bench.step()
    bench.add(prompt(9), id="waits")
    while bench.finish("runs") is None:
        held = len(bench.engine._running["runs"].pages)
        bench.step()
        if bench.finish("runs") is None:
            [chunk] = bench.model.steps[-1]
            assert chunk.end <= max(held, -(-(chunk.start + 1) // 4)) * 4
    bench.run()
    bench.assert_right()


def test_a_step_keeps_its_token_budget() -> None:
    bench = made(
        {**NGRAM, "tokens": 16}, switches={"continuousBatching": {"maxSequences": 4, "maxBatchTokens": 16}}
    )
    for salt in range(4):
        bench.add([5, 2, 7, 1, 4, 6] * 2 + [salt], max_tokens=60)
    bench.run()
    bench.assert_right()
    assert max(bench.computed_per_step()) <= 16
    assert counts(bench)[1] > 50


def test_static_batches_speculate_too() -> None:
    bench = made(NGRAM, switches={"continuousBatching": False})
    for salt in range(3):
        bench.add(prompt(10, salt), max_tokens=60)
    assert bench.run() < 45
    bench.assert_right()


def test_without_a_draft_model_the_switch_says_what_to_do() -> None:
    bench = made(DRAFT, draft_pages=0)
    [state] = [s for s in bench.engine.switch_states() if s["name"] == "speculativeDecoding"]
    assert (state["state"], state["reason"]) == (
        "inactive",
        "no draft model was loaded; serve with --draft-model",
    )
    bench.add(prompt(9), max_tokens=20)
    bench.run()
    assert counts(bench) == (0, 0)
    bench.engine.set_switches(message(2, speculativeDecoding=NGRAM))
    [state] = [s for s in bench.engine.switch_states() if s["name"] == "speculativeDecoding"]
    assert (state["state"], state["reason"]) == ("on", "")


def test_a_draft_model_that_fails_costs_no_request_and_is_left_alone_until_asked_for_again() -> None:
    bench = made(DRAFT)
    bench.draft_model.fail = lambda chunks: torch.OutOfMemoryError("no memory for the draft")
    bench.add(prompt(9), max_tokens=20)
    bench.run()
    bench.assert_right()
    [state] = [s for s in bench.engine.switch_states() if s["name"] == "speculativeDecoding"]
    assert state["state"] == "inactive"
    assert state["reason"].startswith("the draft model failed: OutOfMemoryError: no memory for the draft")
    assert len(bench.draft_model.steps) == 1
    bench.draft_model.fail = lambda chunks: None
    bench.engine.set_switches(message(2, speculativeDecoding=DRAFT))
    bench.add(prompt(9), max_tokens=20)
    bench.run()
    bench.assert_right()
    assert counts(bench)[1] > 0


def test_who_is_mostly_rejected_proposes_little() -> None:
    """A model that never repeats itself, and a draft that is wrong everywhere."""
    bench = Bench(
        total_pages=400, draft_pages=400, draft_errs=1, switches=message(1, speculativeDecoding=DRAFT)
    )
    bench.add(prompt(9), max_tokens=300)
    bench.run()
    bench.assert_right()
    proposed, accepted = counts(bench)
    assert accepted <= 3
    assert 14 <= proposed <= 90
    late = [len(chunk.token_ids) - 1 for chunks in bench.model.steps[100:] for chunk in chunks]
    assert 0 < sum(late) <= len(late) / 4, "tried again now and then"


def test_statistics_say_how_much_was_proposed_and_drawn() -> None:
    bench = made(DRAFT, draft_errs=0)
    assert "spec_acceptance_rate" not in bench.engine.stats()
    bench.add(prompt(9), max_tokens=11)
    bench.run()
    stats = bench.engine.stats()
    # the first token comes of the prompt; then 4 proposals and one more, twice
    assert (stats["spec_drafts"], stats["spec_proposed_tokens"], stats["spec_accepted_tokens"]) == (2, 8, 8)
    assert stats["spec_acceptance_rate"] == 1.0
    assert stats["generation_tokens"] == 11
    assert stats["prefill_tokens"] == 9


def test_drawn_answers_have_the_distribution_of_those_without_it() -> None:
    """Chi-square over many seeds: the fifth token, which a proposal has mostly been made for."""
    draws = 600
    found: dict[bool, dict[int, int]] = {}
    for on in (True, False):
        bench = made(DRAFT if on else False, total_pages=4000, draft_pages=4000, page_tokens=16, seed=11 + on)
        for number in range(draws):
            bench.add([1, 2, 3], max_tokens=5, id=f"r{number}", temperature=1.3)
        bench.run()
        if on:
            assert counts(bench)[1] > draws / 3
        tally = found[on] = {}
        for number in range(draws):
            token = bench.tokens(f"r{number}")[4]
            tally[token] = tally.get(token, 0) + 1
    common = [token for token in range(VOCAB) if sum(tally.get(token, 0) for tally in found.values()) >= 20]
    table = [[tally.get(token, 0) for token in common] for tally in found.values()]
    for row in table:
        row.append(draws - sum(row))
    columns = [a + b for a, b in zip(*table, strict=True)]
    statistic = sum(
        (row[place] - total / 2) ** 2 / (total / 2) for row in table for place, total in enumerate(columns)
    )
    freedom = len(columns) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@given(
    confidences=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=3),
    room=st.integers(0, 3),
    others=st.integers(0, 4),
    budget=st.integers(0, 8),
    base=st.floats(0.0, 1.0),
    row=st.floats(0.001, 1.0),
)
def test_no_other_allotment_gives_more_tokens_per_second(
    confidences, room, others, budget, base, row
) -> None:
    sequences = len(confidences) + others
    rooms = [room] * len(confidences)

    def rate(counts: tuple[int, ...] | list[int]) -> float:
        gain = sum(sum(c**k for k in range(1, n + 1)) for c, n in zip(confidences, counts, strict=True))
        return (sequences + gain) / (base + row * (sequences + sum(counts)))

    best = allot(confidences, rooms, sequences, budget, base, row)
    assert sum(best) <= budget
    for counts in itertools.product(range(room + 1), repeat=len(confidences)):
        if sum(counts) <= budget:
            assert rate(best) >= rate(counts) * (1 - 1e-9)


def test_where_rows_cost_nothing_every_likely_proposal_is_made() -> None:
    assert allot([0.9, 0.5, 0.05], [8, 8, 8], 3, 100, 0.0, 0.0) == [8, 3, 0]


def test_the_cost_of_a_row_is_learned_from_steps_of_different_size() -> None:
    cost = StepCost()
    assert cost.line(0.01) == (0.0, 0.0)
    cost.add(1, 0.03)
    assert cost.line(0.01) == pytest.approx((0.02, 0.01)), "the slope of prefill, for want of a better"
    for number in range(200):
        rows = 1 + number % 5
        cost.add(rows, 0.02 + 0.001 * rows)
    base, slope = cost.line(0.01)
    assert base == pytest.approx(0.02, rel=0.1)
    assert slope == pytest.approx(0.001, rel=1.1)


def test_confidence_follows_what_was_drawn_and_creeps_up_at_rest() -> None:
    track = Track()
    first = track.confidence
    track.judged(4, 4)
    high = track.confidence
    assert high > first
    for _ in range(20):
        track.judged(4, 0)
    low = track.confidence
    assert low < 0.05
    for _ in range(1000):
        track.rested()
    assert low < track.confidence <= first


def test_the_reference_itself_repeats_and_still_depends_on_the_whole_context() -> None:
    bench = made(False)
    ids = [bench.add([token, 2, 3, 4, 5, 6], max_tokens=40) for token in range(1, 30)]
    answers = {tuple(expected(bench.requests[id], 40, repeats=True)) for id in ids}
    assert len(answers) >= 25
