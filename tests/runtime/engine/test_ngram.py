"""Prompt look-up finds what a plain search finds, in bounded memory and a little at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.engine import ngram
from firsttoken_runtime.engine.ngram import NGRAM, NgramIndex

tokens_of_few_kinds = st.lists(st.integers(0, 3), max_size=120)


def plain_search(tokens: list[int], most: int, candidates: int = 16, longest: int = 32) -> list[int]:
    """The same by comparing every position."""
    end = len(tokens)
    same = [p for p in range(end - 1, NGRAM - 1, -1) if tokens[p - NGRAM : p] == tokens[end - NGRAM : end]]
    best, length = 0, 0
    for position in same[:candidates]:
        common = 0
        while common < min(position, longest) and tokens[position - 1 - common] == tokens[end - 1 - common]:
            common += 1
        if common > length:
            best, length = position, common
    if not best:
        return []
    going_on = list(tokens)
    for place in range(most):
        going_on.append(going_on[best + place])
    return going_on[end:]


@given(tokens_of_few_kinds, st.integers(1, 9), st.integers(1, 40))
def test_it_finds_the_longest_and_latest_run_whatever_the_pace_of_filing(tokens, most, pace) -> None:
    index = NgramIndex()
    for end in range(1, len(tokens) + 1, 7):
        index.catch_up(tokens[:end], pace)
    while index.catch_up(tokens, pace):
        pass
    expected = plain_search(tokens, most) if len(tokens) > NGRAM else []
    assert index.continuation(tokens, most) == expected


def test_a_longer_match_wins_over_a_later_one() -> None:
    tokens = [9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3]
    index = NgramIndex()
    index.catch_up(tokens, 1000)
    assert index.continuation(tokens, 1) == [50]
    assert index.continuation([*tokens[:10], 7, 1, 2, 3], 1) == [60]


def test_a_loop_goes_on_as_a_loop() -> None:
    tokens = [5, 6, 7, 5, 6, 7, 5]
    index = NgramIndex()
    index.catch_up(tokens, 1000)
    assert index.continuation(tokens, 7) == [6, 7, 5, 6, 7, 5, 6]


def test_nothing_comes_of_too_little() -> None:
    index = NgramIndex()
    assert index.continuation([1, 2, 3, 4], 4) == [], "nothing was filed"
    for length in range(NGRAM + 2):
        index.catch_up([1] * length, 100)
        assert len(index.continuation([1] * length, 4)) == (4 if length > NGRAM else 0)


def test_filing_takes_no_more_than_it_is_allowed_and_ends_before_the_last_token() -> None:
    tokens = list(range(100))
    index = NgramIndex()
    filed = [index.catch_up(tokens, 40) for _ in range(4)]
    assert filed == [40, 40, 100 - NGRAM - 80, 0]


def test_a_long_sequence_keeps_only_its_recent_runs(monkeypatch) -> None:
    monkeypatch.setattr(ngram, "_WINDOW", 64)
    index = NgramIndex()
    tokens = [1001, 1002, 1003, 1004]
    tokens += [(i * i) % 997 for i in range(1000)]
    for end in range(4, len(tokens) + 1):
        index.catch_up(tokens[:end], 1000)
        assert len(index._chain) <= 128
    assert index.continuation([*tokens, 1001, 1002, 1003], 1) == [], "far behind"
    recent = [*tokens, *tokens[-30:-27]]
    assert index.continuation(recent, 2) == tokens[-27:-25]


def test_a_long_prompt_is_filed_from_its_recent_part(monkeypatch) -> None:
    monkeypatch.setattr(ngram, "_WINDOW", 64)
    index = NgramIndex()
    assert index.catch_up(list(range(1000)), 10_000) == 64
