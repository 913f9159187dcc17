"""The cost of prefill as a function of length, from steps whose true cost is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken_runtime.engine.prefill_cost import PrefillCosts, pairs


def learnt(base, per_token, per_pair, per_decode, noise=0.0, steps=400, seed=1):
    draw, costs = random.Random(seed), PrefillCosts()
    for _ in range(steps):
        tokens, start, decodes = (
            draw.choice((16, 64, 128, 256)),
            draw.choice((0, 0, 500, 1800)),
            draw.randrange(9),
        )
        attended = pairs(start, tokens)
        seconds = base + per_token * tokens + per_pair * attended + per_decode * decodes
        costs.stepped(seconds * draw.uniform(1 - noise, 1 + noise), tokens, attended, decodes, start + tokens)
    return costs


def test_pairs_are_counted_one_by_one():
    for start, tokens in ((0, 1), (0, 5), (7, 4)):
        assert pairs(start, tokens) == sum(position + 1 for position in range(start, start + tokens))


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7), st.floats(0, 1e-3))
def test_the_true_cost_is_found(base, per_token, per_pair, per_decode):
    cost = learnt(base, per_token, per_pair, per_decode).cost()
    for length in (100, 1000, 2000):
        true = base + per_token * length + per_pair * length * (length + 1) / 2
        assert cost.seconds(length) == pytest.approx(true, rel=0.02)
    assert min(cost.base, cost.per_token, cost.per_pair, cost.per_decode) >= 0


def test_noise_of_ten_per_cent_moves_the_prediction_by_little():
    cost = learnt(0.01, 2e-4, 3e-8, 1e-3, noise=0.1).cost()
    assert cost.seconds(1000) == pytest.approx(0.01 + 0.2 + 3e-8 * 500_500, rel=0.05)
    assert 0.03 < cost.relative_error < 0.08


def test_tokens_per_second_fall_with_length_because_attention_is_quadratic():
    told = learnt(0.0, 1e-4, 1e-7, 0.0).to_json(chunk_size=256, max_model_len=4096)
    rates = list(told["tokens_per_second"].values())
    assert list(told["tokens_per_second"]) == ["128", "256", "512", "1024", "2048", "4096"]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 2
    assert told["longest_tokens"] == 2056


def test_small_chunks_pay_the_base_more_often():
    cost = learnt(0.02, 1e-4, 0.0, 0.0).cost()
    assert cost.seconds(1024, chunk_size=128) == pytest.approx(8 * 0.02 + 0.1024, rel=0.02)
    assert cost.seconds(1024) == pytest.approx(0.02 + 0.1024, rel=0.02)


def test_steps_of_one_size_say_what_such_a_step_costs():
    costs = PrefillCosts()
    for _ in range(50):
        costs.stepped(0.05, 128, pairs(0, 128), 0, 128)
    assert costs.cost().seconds(128) == pytest.approx(0.05, rel=0.01)


def test_nothing_is_said_before_there_is_something_to_say():
    costs = PrefillCosts()
    assert costs.to_json(None, 4096) is None
    for _ in range(7):
        costs.stepped(0.05, 128, pairs(0, 128), 0, 128)
    assert costs.cost() is None


def test_it_follows_a_machine_that_gets_slower():
    costs = learnt(0.01, 1e-4, 0.0, 0.0)
    for _ in range(5000):
        costs.stepped(2 * (0.01 + 1e-4 * 128), 128, pairs(0, 128), 0, 128)
    assert costs.cost().seconds(128) == pytest.approx(2 * (0.01 + 1e-4 * 128), rel=0.05)
