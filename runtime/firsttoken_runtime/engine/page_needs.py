"""How many pages a sequence needs: the one place for this arithmetic.

Without windows: a page for every `page_tokens` tokens. Where every layer has a window, pages that none of
them sees any more are given back while the sequence goes on, and its need is bounded however long it gets:

    table   │ sinks │ given back  ·  ·  · │ window │ step │        held: sinks + window + step
            0     sinks                gone

The prefix tree locks pages from the first one on, without gaps. So a sequence's pages enter it only as far as
the window reaches at the very beginning (`shareable`), and while they are locked behind the window they count
too. The bound holds at every moment because a longer sequence computes at most `step` tokens at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firsttoken_runtime.model.windows import Window

if TYPE_CHECKING:
    from firsttoken_runtime.engine.sequence import Sequence

# Stands in a page table for a page that was given back.
GIVEN_BACK = -1
# Tokens that a sequence longer than its window may compute in one step: a window's length, or this.
_LEAST_STEP = 256
_NO_LIMIT = 1 << 62


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True)
class PageNeeds:
    """Needs in a pool of `total` pages. window: what no layer sees beyond; None when one sees everything.

    bounded: whether pages are given back: every layer has a window, and it fits in the pool.
    sinks: pages of the sinks, which stay. shareable: first pages of a sequence that may enter the tree.
    step: most tokens that a long sequence computes at a time.
    """

    page_tokens: int
    total: int
    window: Window | None = None
    bounded: bool = False
    sinks: int = 0
    shareable: int = _NO_LIMIT
    step: int = _NO_LIMIT

    @staticmethod
    def of(page_tokens: int, total: int, window: Window | None = None) -> PageNeeds:
        """Needs with this window. Of the pages left beside it half go to the step, then some to sharing."""
        if window is None or least_pages(page_tokens, window) > total:
            return PageNeeds(page_tokens, total, window)
        sinks = pages_for(window.sinks, page_tokens)
        room = total - least_pages(page_tokens, window)
        wanted = max(window.tokens, _LEAST_STEP)
        step = max(1, min(wanted, room // 2 * page_tokens))
        room = total - _touched(window.tokens - 1 + step, page_tokens)
        shareable = max(sinks, min((window.tokens - 1) // page_tokens, room))
        return PageNeeds(page_tokens, total, window, True, sinks, shareable, step)

    @property
    def longest(self) -> int:
        """Most tokens that one sequence can compute in this pool."""
        return _NO_LIMIT if self.bounded else self.total * self.page_tokens

    def needed(self, sequence: Sequence) -> int:
        """Most pages that it holds at a time, from now on until all its known tokens are computed.

        Shared pages count. Never grows while the same tokens are known.
        """
        table = pages_for(len(sequence.tokens), self.page_tokens)
        if not self.bounded or table <= self._most:
            return table - sequence.given_back
        if not sequence.given_back:
            return self._most
        return min(table - sequence.given_back, self.sinks + self._window_and_step)

    def missing(self, sequence: Sequence) -> int:
        """Pages that it does not hold yet of those needed."""
        return self.needed(sequence) - sequence.held

    def step_tokens(self, sequence: Sequence) -> int:
        """Most tokens that it may compute in one step, so that it needs no more pages than `needed`."""
        known = len(sequence.tokens)
        return self.step if self.bounded and pages_for(known, self.page_tokens) > self._most else known

    def gone(self, computed: int) -> int:
        """The page from which on pages are seen when so many tokens are computed; those before it, the sinks'
        apart, are seen by no query to come."""
        if not self.bounded or self.window is None:
            return 0
        return self.window.begin(computed) // self.page_tokens

    @property
    def _window_and_step(self) -> int:
        return _touched((self.window.tokens if self.window else 0) - 1 + self.step, self.page_tokens)

    @property
    def _most(self) -> int:
        """Pages of a long sequence at the worst moment: the shared ones are still locked."""
        return self.shareable + self._window_and_step


def least_pages(page_tokens: int, window: Window) -> int:
    """Pages without which a window cannot move on, a token at a time."""
    return pages_for(window.sinks, page_tokens) + _touched(window.tokens, page_tokens)


def _touched(tokens: int, page_tokens: int) -> int:
    """Most pages that so many neighbouring tokens lie on, wherever they begin."""
    return (tokens + page_tokens - 2) // page_tokens + 1
