"""The pool of KV pages: which are free, which belong to one sequence, which belong to the prefix tree.

free ──take──▶ owned (one sequence) ──give_to_tree──▶ in the tree (locked or cached: the tree knows)
  ▲               │                                        │
  └──put_back─────┴───────────────put_back─────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class PageError(Exception):
    """A page was used against the rules: a bug in the engine, never a user's mistake."""


class Holder(IntEnum):
    """Who has a page."""

    FREE = 0
    SEQUENCE = 1
    TREE = 2


class PagePool:
    """Pages 0 … total-1. Taking and putting back are O(1) per page; the last one put back is taken first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"the KV pool needs at least one page, not {total}")
        self.total = total
        self.owned = 0
        self.in_tree = 0
        self._free = list(range(total - 1, -1, -1))
        self._holder = bytearray(total)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def holder(self, page: int) -> Holder:
        return Holder(self._holder[page])

    def take(self, count: int) -> list[int]:
        """`count` free pages, now owned by a sequence. Raises PageError when there are not as many."""
        if count > len(self._free):
            raise PageError(f"{count} pages wanted, {len(self._free)} of {self.total} free")
        if count <= 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for page in taken:
            self._holder[page] = Holder.SEQUENCE
        self.owned += count
        return taken

    def give_to_tree(self, page: int) -> None:
        """A sequence's page becomes the prefix tree's. Raises PageError unless a sequence owns it."""
        self._expect(page, Holder.SEQUENCE)
        self._holder[page] = Holder.TREE
        self.owned -= 1
        self.in_tree += 1

    def put_back(self, pages: Iterable[int], holder: Holder) -> None:
        """Pages of `holder` become free. Raises PageError when one is not the holder's (double free)."""
        count = 0
        for page in pages:
            self._expect(page, holder)
            self._holder[page] = Holder.FREE
            self._free.append(page)
            count += 1
        if holder is Holder.SEQUENCE:
            self.owned -= count
        else:
            self.in_tree -= count

    def _expect(self, page: int, holder: Holder) -> None:
        actual = self._holder[page]
        if actual != holder or holder is Holder.FREE:
            raise PageError(f"page {page} is {Holder(actual).name.lower()}'s, not {holder.name.lower()}'s")
