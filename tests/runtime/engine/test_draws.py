"""Draws without sorting the vocabulary are the draws with it, whatever the weights look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken_runtime.engine.draws import draw_plain, draw_truncated
from firsttoken_runtime.engine.requests import SamplingParams
from firsttoken_runtime.engine.sampling import Row, _draw_sorted, uniform

VOCAB = 1000
SHAPES = {
    "flat": lambda dice: dice.normal(size=VOCAB),
    "steep": lambda dice: dice.normal(size=VOCAB) * 8,
    "equal": lambda dice: np.zeros(VOCAB),
    "few values": lambda dice: dice.integers(0, 5, size=VOCAB).astype(float),
    "one of many": lambda dice: np.where(np.arange(VOCAB) == 700, 0.0, -200.0),
    "hardly any mass": lambda dice: dice.normal(size=VOCAB) * 60,
}


def weights(shape: str, seed: int) -> np.ndarray:
    logits = SHAPES[shape](np.random.default_rng(seed)).astype(np.float32)
    return np.exp(logits - logits.max())[None]


cuts = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 2, 7, 100, VOCAB - 1, VOCAB, 5 * VOCAB]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([1e-6, 0.01, 0.3, 1.0]),
    },
)


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 99), cuts, st.integers(0, 1 << 40))
@settings(max_examples=300, deadline=None)
def test_truncated_draws_are_those_of_the_sorted_vocabulary(shape, weight_seed, cut, seed) -> None:
    row = Row(SamplingParams(temperature=1.0, **cut), seed, 3)
    found = weights(shape, weight_seed)
    [drawn] = draw_truncated(found, [row.params], [uniform(seed, 3)])
    assert found[0, drawn] > 0
    assert [drawn] == _draw_sorted(torch.from_numpy(found), [row])


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 99), st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_plain_draws_are_those_of_the_whole_running_sum(shape, weight_seed, number) -> None:
    found = weights(shape, weight_seed)
    sums = found[0].astype(np.float64).cumsum()
    [drawn] = draw_plain(found, [number])
    assert found[0, drawn] > 0
    assert drawn == sums.searchsorted(number * sums[-1], side="right")


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_first_and_the_last_number_draw_a_token_that_has_a_weight(shape: str, number: float) -> None:
    found = weights(shape, 1)
    assert found[0, draw_plain(found, [number])[0]] > 0
    for cut in ({"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.001}):
        assert found[0, draw_truncated(found, [SamplingParams(**cut)], [number])[0]] > 0
