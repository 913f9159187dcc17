"""Picking tokens: greedy is exact, draws follow the distribution and depend on seed and position alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.engine.requests import SamplingParams
from firsttoken_runtime.engine.sampling import Row, TokenCounts, sample, uniform


def draw(logits: list[float], prompt: tuple[int, ...] = (), **params: object) -> int | None:
    settings = SamplingParams(max_tokens=1, **{"seed": 1, **params})
    counts = TokenCounts(settings, prompt) if TokenCounts.needed(settings) else None
    return sample(torch.tensor([logits]), [Row(settings, settings.seed or 0, 0, counts)])[0].token


def frequencies(logits: list[float], draws: int = 4000, **params: object) -> dict[int, float]:
    settings = SamplingParams(max_tokens=1, **params)
    rows = [Row(settings, 5, position) for position in range(draws)]
    picked = Counter(s.token for s in sample(torch.tensor(logits).expand(draws, -1), rows))
    return {token: count / draws for token, count in picked.items() if token is not None}


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    assert draw([1.0, 3.0, 3.0, 2.0], temperature=0.0) == 1


def test_draws_follow_the_softmax() -> None:
    found = frequencies([math.log(0.5), math.log(0.3), math.log(0.2)])
    assert found == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=0.03)


def test_temperature_sharpens() -> None:
    found = frequencies([math.log(0.5), math.log(0.3), math.log(0.2)], temperature=0.5)
    assert found == pytest.approx({0: 25 / 38, 1: 9 / 38, 2: 4 / 38}, abs=0.03)


def test_a_temperature_close_to_zero_is_greedy() -> None:
    assert frequencies([1.0, 2.0, 1.5], draws=50, temperature=1e-9) == {1: 1.0}


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"top_k": 2}, {0: 0.5 / 0.8, 1: 0.3 / 0.8}),
        ({"top_p": 0.5}, {0: 1.0}),
        ({"top_p": 0.51}, {0: 0.5 / 0.8, 1: 0.3 / 0.8}),
        ({"min_p": 0.5}, {0: 0.5 / 0.8, 1: 0.3 / 0.8}),
        ({"top_k": 2, "top_p": 0.6}, {0: 1.0}),  # of what top-k left: 0.5 / 0.8 reaches 0.6
        ({"top_k": 100}, {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
    ],
)
def test_truncation_leaves_the_right_tokens(params: dict[str, float], left: dict[int, float]) -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert frequencies(logits, **params) == pytest.approx(left, abs=0.03)


@given(
    st.integers(2, 6000),
    st.floats(0.05, 0.99),
    st.integers(0, 6000),
    st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    st.integers(0, 99),
)
def test_truncation_agrees_with_the_definition_on_any_size(
    vocab: int, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    settings = SamplingParams(max_tokens=1, top_p=top_p, top_k=top_k, min_p=min_p)
    token = sample(logits.unsqueeze(0), [Row(settings, seed, 3)])[0].token
    weights, order = (logits - logits.max()).exp().double().sort(descending=True, stable=True)
    kept = weights[: top_k or vocab]
    before = kept.cumsum(0) - kept
    mask = (before < top_p * kept.sum()) & (kept >= min_p)
    mask[0] = True
    kept = kept * mask
    mark = uniform(seed, 3) * kept.sum()
    place = int(torch.searchsorted(kept.cumsum(0), mark, right=True))
    near = {int(order[max(min(place + shift, vocab - 1), 0)]) for shift in (-1, 0, 1)}  # rounding at a border
    assert token in near


def test_a_draw_does_not_depend_on_who_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 500, generator=generator)
    rows = [
        Row(SamplingParams(max_tokens=1, temperature=0.9, **extra), seed, seed + 10)
        for seed, extra in enumerate([{}, {"top_p": 0.7}, {"top_k": 400}, {"min_p": 0.02}, {}, {"top_k": 3}])
    ]
    together = [s.token for s in sample(logits, rows)]
    alone = [sample(logits[i : i + 1], [row])[0].token for i, row in enumerate(rows)]
    reordered = [s.token for s in sample(logits.flip(0), rows[::-1])][::-1]
    assert together == alone == reordered


def test_equal_logits_are_told_apart_by_token_id_whoever_else_is_in_the_batch() -> None:
    """16 bit logits are full of ties; a neighbour with a large top_k widens the sort for all."""
    logits = (2 * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))).round().div(2)
    neighbour = Row(SamplingParams(max_tokens=1, top_k=3000), 1, 1)
    for position in range(8):
        row = Row(SamplingParams(max_tokens=1, top_p=0.05), 1, position)
        [alone], [beside, _] = sample(logits, [row]), sample(logits.repeat(2, 1), [row, neighbour])
        assert alone == beside


def test_top_k_among_equals_keeps_the_lowest_ids() -> None:
    found = frequencies([0.0] * 5000, draws=60, top_k=3)
    assert set(found) == {0, 1, 2}


def test_top_p_of_what_top_k_left_when_equals_go_on_beyond_the_first_sort() -> None:
    """One likely token and thousands of equals: top-k of 300 holds it and 299 of them."""
    logits = [math.log(300.0)] + [0.0] * 5999
    # The first token has 300 of 599 of what top-k leaves, more than half; of everything only 5 %.
    assert frequencies(logits, draws=60, top_k=300, top_p=0.5) == {0: 1.0}


def test_uniform_numbers_depend_on_seed_and_position_and_are_spread() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(140 < tenths[tenth] < 260 for tenth in range(10))
    assert uniform(-5, 3) == uniform(-5, 3)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    assert frequencies([-math.inf, 0.0, -math.inf], draws=500) == {1: 1.0}


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [-math.inf, -math.inf], [1.0, math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_give_no_token_and_spoil_no_other_row(logits, temperature: float) -> None:
    settings = SamplingParams(max_tokens=1, temperature=temperature)
    good, bad = Row(SamplingParams(max_tokens=1, temperature=0.0), 0, 0), Row(settings, 0, 0)
    assert [s.token for s in sample(torch.tensor([[0.0, 1.0], logits]), [good, bad])] == [1, None]


def test_repetition_penalty_counts_the_prompt_and_moves_both_signs_away() -> None:
    assert draw([2.0, 1.5], prompt=(0,), temperature=0.0, repetition_penalty=1.5) == 1
    assert draw([-1.0, -1.2], prompt=(0,), temperature=0.0, repetition_penalty=1.5) == 1


def test_presence_and_frequency_count_the_output_only() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.4)
    counts = TokenCounts(params, (0, 0, 0))
    logits = torch.tensor([[2.0, 1.0, 0.9]])
    picked = []
    for position in range(5):
        [result] = sample(logits, [Row(params, 0, position, counts)])
        assert result.token is not None
        counts.add(result.token)
        picked.append(result.token)
    # after 0 once: 1.1; twice: 0.7; after 1 once: 0.1; after 2 once: 0.0
    assert picked == [0, 0, 1, 2, 0]
    assert torch.equal(logits, torch.tensor([[2.0, 1.0, 0.9]])), "the caller's logits are not changed"


def test_counts_keep_growing_with_new_tokens() -> None:
    params = SamplingParams(max_tokens=999, temperature=0.0, presence_penalty=1000.0)
    counts = TokenCounts(params, ())
    logits = torch.arange(300, 0, -1.0).unsqueeze(0)
    picked = []
    for position in range(300):
        token = sample(logits, [Row(params, 0, position, counts)])[0].token
        assert token is not None
        counts.add(token)
        picked.append(token)
    assert picked == list(range(300))


def test_logit_bias_is_added() -> None:
    assert draw([1.0, 2.0], temperature=0.0, logit_bias={0: 1.5}) == 0


def test_log_probabilities_are_the_models_own() -> None:
    settings = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=2, logit_bias={2: 100.0}, repetition_penalty=1.2
    )
    counts = TokenCounts(settings, (0,))
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    [result] = sample(torch.tensor([logits]), [Row(settings, 0, 0, counts)])
    assert result.token == 2
    assert result.logprob == pytest.approx(math.log(0.2))
    assert result.top == ((0, pytest.approx(math.log(0.5))), (1, pytest.approx(math.log(0.3))))


def test_zero_alternatives_report_the_chosen_tokens_log_probability_alone() -> None:
    settings = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    [result] = sample(torch.tensor([[0.0, 0.0]]), [Row(settings, 0, 0)])
    assert (result.logprob, result.top) == (pytest.approx(math.log(0.5)), ())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 or more, not 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more, not -1.0"),
        ({"temperature": math.nan}, "temperature must be 0 or more, not nan"),
        ({"top_p": 0.0}, "top_p must be above 0, at most 1, not 0.0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be a finite number"),
        ({"logprobs": -1}, "logprobs must be 0 or more"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be finite"),
    ],
)
def test_values_that_make_no_sense_are_refused_in_words(params: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**{"max_tokens": 1, **params})
