"""The prefix tree: what is found, who locks it, what goes first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from firsttoken_runtime.engine.pages import PagePool
from firsttoken_runtime.engine.prefix import Namespace, PrefixHandle, PrefixTree
from firsttoken_runtime.model.windows import Window

ONE = Namespace("model")
SIZE = 2


class Tree:
    """A tree of pages of two tokens, and pages to put in."""

    def __init__(self, total: int = 32, cap: int = 32) -> None:
        self.pool = PagePool(total)
        self.tree = PrefixTree(self.pool, SIZE, cap)

    def insert(self, tokens: Sequence[int], namespace: Namespace = ONE) -> tuple[PrefixHandle, list[int]]:
        """What a sequence with these computed tokens does; the handle is still locked."""
        handle, pages = self.tree.match(namespace, tokens, len(tokens) // SIZE)
        own = self.pool.take(len(tokens) // SIZE - len(pages))
        keys = (tuple(tokens[i : i + SIZE]) for i in range(len(pages) * SIZE, len(tokens) - SIZE + 1, SIZE))
        handle, accepted = self.tree.extend(handle, keys, own)
        return handle, pages + accepted

    def cache(self, tokens: Sequence[int], namespace: Namespace = ONE) -> list[int]:
        """Insert and unlock."""
        handle, pages = self.insert(tokens, namespace)
        self.tree.release(handle)
        return pages

    def found(self, tokens: Sequence[int], namespace: Namespace = ONE) -> int:
        return self.tree.probe(namespace, tokens, len(tokens) // SIZE).pages


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    tree = Tree()
    pages = tree.cache([1, 2, 3, 4, 5, 6])
    handle, found = tree.tree.match(ONE, [1, 2, 3, 4, 9, 9], 3)
    assert (found, handle.pages) == (pages[:2], 2)
    assert tree.found([1, 2, 3]) == 1
    assert tree.found([9, 2, 3, 4]) == 0


def test_no_more_pages_are_matched_than_asked_for() -> None:
    tree = Tree()
    tree.cache([1, 2, 3, 4])
    assert tree.tree.match(ONE, [1, 2, 3, 4], 1)[0].pages == 1


def test_equal_pages_after_different_prefixes_are_different() -> None:
    tree = Tree()
    first = tree.cache([1, 1, 7, 7])
    second = tree.cache([2, 2, 7, 7])
    assert first[1] != second[1]


def test_crafted_hash_collisions_are_not_found() -> None:
    # Given two pages of equal hash …
    page, twin = (5, 0), (5, (1 << 61) - 1)
    assert hash(page) == hash(twin)
    assert page != twin
    # … a look-up compares the tokens.
    tree = Tree()
    tree.cache(page)
    assert tree.found(twin) == 0
    assert tree.cache(twin) != tree.cache(page)


@pytest.mark.parametrize(
    "other",
    [
        Namespace("other model"),
        Namespace("model", kv_precision="fp8"),
        Namespace("model", window=Window(64)),
        Namespace("model", cache_salt="tenant"),
    ],
)
def test_nothing_is_shared_between_namespaces(other: Namespace) -> None:
    tree = Tree()
    tree.cache([1, 2, 3, 4])
    assert tree.found([1, 2, 3, 4], other) == 0
    tree.cache([1, 2], other)
    assert tree.found([1, 2, 3, 4]) == 2


def test_what_is_locked_is_not_evicted() -> None:
    tree = Tree()
    handle, _ = tree.insert([1, 2, 3, 4])
    tree.cache([1, 2, 8, 8])
    assert (tree.tree.locked, tree.tree.cached) == (2, 1)
    assert tree.tree.evict(9) == 1
    assert tree.found([1, 2, 3, 4]) == 2
    tree.tree.release(handle)
    assert tree.tree.evict(9) == 2
    assert tree.pool.free == 32


def test_a_page_is_locked_until_its_last_user_leaves() -> None:
    tree = Tree()
    first, _ = tree.insert([1, 2])
    second, _ = tree.tree.match(ONE, [1, 2], 1)
    tree.tree.release(first)
    assert (tree.tree.locked, tree.tree.evict(1)) == (1, 0)
    tree.tree.release(second)
    assert (tree.tree.locked, tree.tree.evict(1)) == (0, 1)


def test_least_recently_used_leaves_go_first_and_parents_after_their_children() -> None:
    tree = Tree()
    tree.cache([1, 1, 2, 2])
    tree.cache([3, 3])
    tree.cache([4, 4])
    tree.tree.release(tree.tree.match(ONE, [3, 3], 1)[0])  # used again
    gone = []
    left = {(1, 1), (1, 1, 2, 2), (3, 3), (4, 4)}
    while left:
        tree.tree.evict(1)
        found = {tokens for tokens in left if tree.found(tokens) * 2 == len(tokens)}
        gone += left - found
        left = found
    assert gone == [(1, 1, 2, 2), (1, 1), (4, 4), (3, 3)]


def test_a_page_computed_twice_is_kept_once_and_ours_becomes_free() -> None:
    # Given two sequences that started on the same prompt before either had computed it
    tree = Tree()
    first, _ = tree.tree.match(ONE, [1, 2], 1)
    second, _ = tree.tree.match(ONE, [1, 2], 1)
    [ours], [theirs] = tree.pool.take(1), tree.pool.take(1)
    first, kept = tree.tree.extend(first, iter([(1, 2)]), [ours])
    second, swapped = tree.tree.extend(second, iter([(1, 2)]), [theirs])
    assert kept == swapped == [ours]
    assert theirs in tree.pool.free_pages
    assert tree.tree.locked == 1
    tree.tree.release(first)
    assert tree.tree.locked == 1


def test_the_cap_holds_at_insertion_by_evicting_what_was_used_least_recently() -> None:
    tree = Tree(cap=2)
    tree.cache([1, 1])
    tree.cache([2, 2])
    tree.cache([3, 3])
    assert [tree.found([n, n]) for n in (1, 2, 3)] == [0, 1, 1]
    assert tree.tree.evictions == 1


def test_at_the_cap_with_everything_locked_a_sequence_keeps_its_own_pages() -> None:
    tree = Tree(cap=1)
    handle, pages = tree.insert([1, 1, 2, 2])
    assert (handle.pages, len(pages)) == (1, 1)
    assert tree.pool.owned == 1


def test_a_smaller_cap_takes_cached_pages_at_once_and_locked_ones_as_they_unlock() -> None:
    tree = Tree()
    handle, _ = tree.insert([1, 1, 2, 2])
    tree.cache([3, 3])
    tree.tree.set_cap(1)
    assert (tree.tree.locked, tree.tree.cached) == (2, 0)
    tree.tree.release(handle)
    assert tree.tree.pages == 1
    assert tree.found([1, 1, 2, 2]) == 1


def test_after_a_flush_nothing_is_found_and_used_pages_go_when_they_unlock() -> None:
    tree = Tree()
    handle, _ = tree.insert([1, 1, 2, 2])
    tree.cache([1, 1, 3, 3])
    tree.tree.flush()
    assert tree.found([1, 1]) == 0
    assert (tree.tree.locked, tree.tree.cached, tree.pool.free) == (2, 0, 30)
    tree.tree.release(handle)
    assert tree.pool.free == 32


def test_a_sequence_from_before_a_flush_inserts_nothing_after_it() -> None:
    tree = Tree()
    handle, _ = tree.insert([1, 1])
    tree.tree.flush()
    page = tree.pool.take(1)
    assert tree.tree.extend(handle, iter([(2, 2)]), page) == (handle, [])
    assert tree.pool.owned == 1


def test_switched_off_it_finds_and_keeps_nothing() -> None:
    tree = Tree()
    tree.cache([1, 1])
    tree.tree.set_enabled(False)
    assert tree.pool.free == 32
    handle, pages = tree.tree.match(ONE, [1, 1], 1)
    own = tree.pool.take(1)
    assert (pages, tree.tree.extend(handle, iter([(1, 1)]), own)) == ([], (handle, []))
    # … and a sequence from that time adds nothing when it is on again
    tree.tree.set_enabled(True)
    assert tree.tree.extend(handle, iter([(1, 1)]), own)[1] == []
    tree.tree.release(handle)
    assert tree.cache([1, 1])
    assert tree.found([1, 1]) == 1


def test_namespaces_without_pages_and_users_are_forgotten() -> None:
    tree = Tree(total=200, cap=200)
    for tenant in range(100):
        tree.cache([1, 2], Namespace("model", cache_salt=str(tenant)))
    tree.tree.evict(100)
    assert tree.tree.roots() == []


def test_pages_that_would_be_unused_are_counted_over_several_handles() -> None:
    tree = Tree()
    first, _ = tree.insert([1, 1, 2, 2])
    second, _ = tree.insert([1, 1, 3, 3])
    assert tree.tree.releasable([first]) == 1
    assert tree.tree.releasable([first, second]) == 3


def test_many_uses_of_the_same_pages_do_not_let_the_order_grow() -> None:
    tree = Tree()
    for _ in range(2000):
        tree.cache([1, 1])
    assert len(tree.tree._leaves) < 100
    assert tree.tree.evict(1) == 1
