"""Page tables: every sequence's pages, kept in step with the pool and the prefix tree.

Order within one step, which the engine keeps: release what is preempted, lock what is admitted, then grow; so
a page that an admission counted on cannot be evicted for another one's growth.
"""

from __future__ import annotations

from collections import abc

from firsttoken_runtime.engine.page_needs import GIVEN_BACK, PageNeeds, pages_for
from firsttoken_runtime.engine.pages import Holder, PagePool
from firsttoken_runtime.engine.prefix import Hit, PrefixTree
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.model.windows import Window


class PageTables:
    """The pool, the tree, and what the scheduler may ask about them (`scheduler.PageView`)."""

    def __init__(
        self,
        total_pages: int,
        page_tokens: int,
        cache_pages: int,
        cache_enabled: bool,
        window: Window | None = None,
    ) -> None:
        """window: what no layer sees beyond."""
        self.page_tokens = page_tokens
        self.needs = PageNeeds.of(page_tokens, total_pages, window)
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
        owned = sum(s.held - s.handle.pages for s in sequences if s.handle is not None)
        return owned + self.tree.releasable(handles)

    def shared_pages(self, sequence: Sequence, other: Sequence) -> int:
        """Full pages at the beginning of both prompts that the prefix cache would share between them.

        Cheap where the first page that `sequence` did not find differs already.
        """
        if sequence.namespace != other.namespace:
            return 0
        size = self.page_tokens
        ours, theirs = sequence.request.prompt, other.request.prompt
        first = sequence.hit.pages * size
        if ours[first : first + size] != theirs[first : first + size]:
            return 0
        if sequence.shared[0] != other.number:
            sequence.shared = (other.number, common_prefix(ours, theirs))
        return min(sequence.shared[1] // size, self._most_hits(sequence))

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
        missing = pages_for(sequence.computed + tokens, self.page_tokens) - len(pages)
        if missing <= 0:
            return
        pool = self.pool
        if pool.free < missing:
            self.tree.evict(missing - pool.free)
        pages += pool.take(missing)

    def shrink(self, sequence: Sequence) -> None:
        """Give back pages beyond its known tokens: they were for proposals that were not drawn."""
        pages = sequence.pages
        needed = pages_for(len(sequence.tokens), self.page_tokens)
        if len(pages) > needed:
            self.pool.put_back(pages[needed:], Holder.SEQUENCE)
            del pages[needed:]

    def commit(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` more are computed; pages that became full enter the tree, shared from now on, and those
        that no query sees any more are given back."""
        full_before = sequence.computed // self.page_tokens
        sequence.computed += tokens
        if sequence.computed // self.page_tokens > full_before:
            self._share(sequence)
        if self.needs.bounded:
            self._give_back(sequence)

    def _share(self, sequence: Sequence) -> None:
        handle = sequence.handle
        if handle is None or handle.root.detached or sequence.given_back:
            return
        first, full = handle.pages, min(sequence.computed // self.page_tokens, self.needs.shareable)
        if full > first:
            keys = sequence.page_keys(first, self.page_tokens)
            sequence.handle, ours = self.tree.extend(handle, keys, sequence.pages[first:full])
            sequence.pages[first : first + len(ours)] = ours

    def _give_back(self, sequence: Sequence) -> None:
        handle, sinks, gone = sequence.handle, self.needs.sinks, self.needs.gone(sequence.computed)
        first = sinks + sequence.given_back
        # The tree locks its first pages all together: they stay until the last of them is not seen any more.
        if handle is None or gone <= first or handle.pages > gone:
            return
        if handle.pages > sinks:
            sequence.handle = self.tree.shorten(handle, sinks)
        self.pool.put_back(sequence.pages[max(first, handle.pages) : gone], Holder.SEQUENCE)
        sequence.pages[first:gone] = [GIVEN_BACK] * (gone - first)
        sequence.given_back = gone - sinks

    def release(self, sequence: Sequence) -> None:
        """Give everything back: finished, aborted, failed or preempted. What is in the tree stays cached."""
        handle = sequence.handle
        if handle is None:
            return
        owned = (page for page in sequence.pages[handle.pages :] if page != GIVEN_BACK)
        self.pool.put_back(owned, Holder.SEQUENCE)
        self.tree.release(handle)
        sequence.handle, sequence.pages, sequence.computed, sequence.given_back = None, [], 0, 0

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
        # written to must not be shared. Prompt tokens that are scored are computed too, once.
        most = len(sequence.tokens) - 1
        if sequence.request.sampling.prompt_logprobs is not None:
            most = min(most, sequence.scored)
        return min(most // self.page_tokens, self.needs.shareable)


def common_prefix(ours: abc.Sequence[int], theirs: abc.Sequence[int]) -> int:
    """Tokens at the beginning that are the same; by halves, as slices compare much faster than items."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
