"""Prompt look-up: what followed the last time the sequence said what it is saying now.

Every run of NGRAM tokens is filed under a hash, the runs of one hash chained from the latest back:

    heads   [_HEADS]      hash of a run  -> position behind its latest occurrence
    chain   [positions]   that position  -> position behind the one before

A look-up walks the chain of the last run and compares tokens, so a collision costs time and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NGRAM = 3
_HEADS = 1 << 14
# Positions behind which nothing is looked up any more; up to twice as many are held, 4 bytes each.
_WINDOW = 1 << 14
_CANDIDATES = 16
_LONGEST_MATCH = 32
_NOWHERE = -1


class NgramIndex:
    """Where the runs of one growing sequence are. At most 200 KB, whatever its length."""

    def __init__(self) -> None:
        self._heads = array("i", [_NOWHERE]) * _HEADS
        self._chain = array("i")
        self._first: int | None = None  # the position that chain[0] is about

    def catch_up(self, tokens: Sequence[int], most: int) -> int:
        """File the runs that ended before the last token, `most` of them at most; returns how many.

        The run at the end is left out: a look-up is for an earlier one like it.
        """
        if self._first is None:
            self._first = max(NGRAM, len(tokens) - _WINDOW)
        heads, chain = self._heads, self._chain
        start = self._first + len(chain)
        end = min(len(tokens), start + most)
        for position in range(start, end):
            slot = hash(tuple(tokens[position - NGRAM : position])) & (_HEADS - 1)
            chain.append(heads[slot])
            heads[slot] = position
        if len(chain) >= 2 * _WINDOW:
            del chain[:_WINDOW]
            self._first += _WINDOW
        return max(end - start, 0)

    def continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the longest earlier run like the end; empty without one.

        Of runs equally long the latest counts. Where it reaches into the end itself, its period goes on.
        """
        if self._first is None or len(tokens) <= NGRAM:
            return []
        position = self._heads[hash(tuple(tokens[-NGRAM:])) & (_HEADS - 1)]
        best, longest = 0, NGRAM - 1
        for _ in range(_CANDIDATES):
            if position < self._first:
                break
            length = _common_end(tokens, position)
            if length > longest:
                best, longest = position, length
                if length == _LONGEST_MATCH:
                    break
            position = self._chain[position - self._first]
        if not best:
            return []
        found = list(tokens[best : best + most])
        period = len(tokens) - best
        while len(found) < most:
            found.append(found[len(found) - period])
        return found


def _common_end(tokens: Sequence[int], position: int) -> int:
    """Tokens before `position` that equal those at the end, counted up to the longest of interest."""
    end = len(tokens)
    length = 0
    while (
        length < _LONGEST_MATCH
        and length < position
        and tokens[position - 1 - length] == tokens[end - 1 - length]
    ):
        length += 1
    return length
