"""The page pool: every page has one holder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.engine.pages import Holder, PageError, PagePool


def test_a_new_pool_is_free() -> None:
    pool = PagePool(5)
    assert (pool.free, pool.owned, pool.in_tree) == (5, 0, 0)
    assert sorted(pool.free_pages) == [0, 1, 2, 3, 4]


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(PageError, match="2 pages wanted, 1 of 3 free"):
        pool.take(2)
    assert pool.free == 1


@pytest.mark.parametrize("count", [0, -2])
def test_taking_none_gives_none(count: int) -> None:
    assert PagePool(3).take(count) == []


def test_a_page_put_back_twice_is_an_error() -> None:
    pool = PagePool(3)
    pages = pool.take(1)
    pool.put_back(pages, Holder.SEQUENCE)
    with pytest.raises(PageError, match=r"is free's, not sequence's"):
        pool.put_back(pages, Holder.SEQUENCE)


def test_the_trees_page_cannot_be_put_back_by_a_sequence() -> None:
    pool = PagePool(3)
    [page] = pool.take(1)
    pool.give_to_tree(page)
    with pytest.raises(PageError, match="is tree's, not sequence's"):
        pool.put_back([page], Holder.SEQUENCE)
    with pytest.raises(PageError, match="is tree's, not sequence's"):
        pool.give_to_tree(page)


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="at least one page, not 0"):
        PagePool(0)


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(["take", "give", "back"]), st.integers(0, 12))))
def test_counts_agree_with_holders_after_anything(total: int, actions: list[tuple[str, int]]) -> None:
    pool = PagePool(total)
    owned: list[int] = []
    tree: list[int] = []
    for action, count in actions:
        if action == "take" and count <= pool.free:
            owned += pool.take(count)
        elif action == "give" and owned:
            tree.append(owned.pop(count % len(owned)))
            pool.give_to_tree(tree[-1])
        elif action == "back" and (owned or tree):
            holder = Holder.SEQUENCE if owned and (count % 2 or not tree) else Holder.TREE
            pool.put_back([(owned if holder is Holder.SEQUENCE else tree).pop()], holder)
    assert (pool.owned, pool.in_tree, pool.free) == (len(owned), len(tree), total - len(owned) - len(tree))
    assert sorted([*owned, *tree, *pool.free_pages]) == list(range(total))
    assert all(pool.holder(page) is Holder.SEQUENCE for page in owned)
    assert all(pool.holder(page) is Holder.TREE for page in tree)
    assert all(pool.holder(page) is Holder.FREE for page in pool.free_pages)
