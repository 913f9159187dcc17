"""Stop strings: the same text comes out wherever the pieces are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.api.stop_strings import StopStrings

text = st.text(alphabet="ab", max_size=30)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(strings, pieces):
    """What is shown, and whether a stop string was met."""
    stop, shown = StopStrings(strings), ""
    for piece in pieces:
        more, met = stop.push(piece)
        shown += more
        if met:
            return shown, True
    return shown + stop.flush(), False


def expected(strings, whole):
    """The definition: cut at the stop string that is complete first; of those, at the longest."""
    for end in range(1, len(whole) + 1):
        starts = [end - len(string) for string in strings if whole[:end].endswith(string)]
        if starts:
            return whole[: min(starts)], True
    return whole, False


@given(stops, st.lists(text, max_size=6))
def test_any_cut_gives_what_the_definition_says(strings, pieces):
    assert run(strings, pieces) == expected(strings, "".join(pieces))


@given(stops, text)
def test_character_by_character(strings, whole):
    assert run(strings, list(whole)) == expected(strings, whole)


@given(st.lists(text, max_size=6))
def test_without_stop_strings_every_piece_passes_at_once(pieces):
    stop = StopStrings(())
    assert [stop.push(piece) for piece in pieces] == [(piece, False) for piece in pieces]


@pytest.mark.parametrize(
    ("piece", "shown"),
    [("Hello", "Hello"), ("Hello\n", "Hello"), ("Hello\n\n", "Hello"), ("Hello\n\nyou", "Hello\n\nyou")],
)
def test_only_what_may_become_a_stop_string_is_held_back(piece, shown):
    assert StopStrings(["\n\n\n"]).push(piece) == (shown, False)
