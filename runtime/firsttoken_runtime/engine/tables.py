"""Page tables: every sequence's pages, kept in step with the pool and the prefix tree.

Order within one step, which the engine keeps: release what is preempted, lock what is admitted, then grow; so
a page that an admission counted on cannot be evicted for another one's growth.
"""

from __future__ import annotations

from collections import abc

from firsttoken_runtime.engine.pages import Holder, PagePool
from firsttoken_runtime.engine.prefix import Hit, PrefixTree
from firsttoken_runtime.engine.sequence import Sequence


class PageTables:
    """The pool, the tree, and what the scheduler may ask about them (`scheduler.PageView`)."""

    def __init__(self, total_pages: int, page_tokens: int, cache_pages: int, cache_enabled: bool) -> None:
        self.page_tokens = page_tokens
        self.pool = PagePool(total_pages)
        self.tree = PrefixTree(self.pool, page_tokens, cache_pages, cache_enabled)

    # What the scheduler reads

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones, and cached ones, which are evicted for the purpose."""
        return self.pool.free + self.tree.cached

    def probe(self, sequence: Sequence) -> Hit:
        """What the prefix cache has for a waiting sequence; remembered until the tree changes."""
        # Locks change `unlocked` but not the version, so only finding nothing is remembered.
        if sequence.hit_version != self.tree.version or sequence.hit.pages:
            sequence.hit = self.tree.probe(sequence.namespace, sequence.tokens, self._most_hits(sequence))
            sequence.hit_version = self.tree.version
        return sequence.hit

    def releasable(self, sequences: abc.Sequence[Sequence]) -> int:
        """Pages that preempting exactly these sequences would make available."""
        handles = [sequence.handle for sequence in sequences if sequence.handle is not None]
        owned = sum(len(s.pages) - s.handle.pages for s in sequences if s.handle is not None)
        return owned + self.tree.releasable(handles)

    # What the engine does

    def admit(self, sequence: Sequence) -> int:
        """Lock the cached prefix of a sequence that starts to run; returns its tokens, computed already."""
        handle, pages = self.tree.match(sequence.namespace, sequence.tokens, self._most_hits(sequence))
        sequence.handle, sequence.pages = handle, pages
        sequence.computed = len(pages) * self.page_tokens
        return sequence.computed

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Own pages for `tokens` more computed tokens. Raises PageError when the pool cannot give them."""
        pages = sequence.pages
        missing = -(-(sequence.computed + tokens) // self.page_tokens) - len(pages)
        if missing <= 0:
            return
        pool = self.pool
        if pool.free < missing:
            self.tree.evict(missing - pool.free)
        pages += pool.take(missing)

    def commit(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` more are computed; pages that became full enter the tree, shared from now on."""
        sequence.computed += tokens
        handle = sequence.handle
        if handle is None or handle.root.detached:
            return
        first, full = handle.pages, sequence.computed // self.page_tokens
        if full > first and full > (sequence.computed - tokens) // self.page_tokens:
            keys = sequence.page_keys(first, self.page_tokens)
            sequence.handle, ours = self.tree.extend(handle, keys, sequence.pages[first:full])
            sequence.pages[first : first + len(ours)] = ours

    def release(self, sequence: Sequence) -> None:
        """Give everything back: finished, aborted, failed or preempted. What is in the tree stays cached."""
        handle = sequence.handle
        if handle is None:
            return
        self.pool.put_back(sequence.pages[handle.pages :], Holder.SEQUENCE)
        self.tree.release(handle)
        sequence.handle, sequence.pages, sequence.computed = None, [], 0

    def counts(self) -> dict[str, int]:
        """Pages by state; the four add up to `total`."""
        pool, tree = self.pool, self.tree
        return {
            "free": pool.free,
            "cached": tree.cached,
            "locked": tree.locked,
            "owned": pool.owned,
            "total": pool.total,
        }

    def _most_hits(self, sequence: Sequence) -> int:
        # One token at least is computed, also on a full hit: its logits are needed, and the page it is
        # written to must not be shared.
        return (len(sequence.tokens) - 1) // self.page_tokens
