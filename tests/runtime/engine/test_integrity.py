"""The integrity check finds what is wrong, and says it in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from page_model import Bench, prompt


def busy_bench() -> Bench:
    """Two sequences that share a prefix, one that does not, one waiting, and something cached."""
    bench = Bench(total_pages=64, page_tokens=4)
    bench.add(prompt(20, 3), max_tokens=1)
    bench.run()
    for salt in (1, 2):
        bench.add(prompt(22, salt), max_tokens=20)
    bench.steps(2)
    bench.add(prompt(21, 1), max_tokens=20)
    bench.steps(2)
    bench.add(prompt(30, 4))
    bench.check()
    return bench


def running(bench: Bench, place: int):
    return list(bench.engine._running.values())[place]


def lose_a_page(bench: Bench) -> None:
    bench.engine._tables.pool._free.pop()


def free_a_page_twice(bench: Bench) -> None:
    free = bench.engine._tables.pool._free
    free.append(free[0])


def free_a_page_in_use(bench: Bench) -> None:
    bench.engine._tables.pool._free.append(running(bench, 0).pages[-1])


def take_anothers_page(bench: Bench) -> None:
    running(bench, 0).pages[-1] = running(bench, 1).pages[-1]


def point_at_another_page_of_the_tree(bench: Bench) -> None:
    running(bench, 0).pages[0] = running(bench, 1).pages[0]


def forget_a_lock(bench: Bench) -> None:
    running(bench, 0).handle.node.refs -= 1


def keep_a_lock(bench: Bench) -> None:
    tables, sequence = bench.engine._tables, running(bench, 0)
    tables.tree.match(sequence.namespace, sequence.tokens, 2)


def change_a_token(bench: Bench) -> None:
    running(bench, 0).tokens[1] += 1


def claim_tokens_that_were_not_computed(bench: Bench) -> None:
    running(bench, 0).computed += 1


def claim_another_tenants_pages(bench: Bench) -> None:
    sequence = running(bench, 0)
    sequence.namespace = sequence.namespace._replace(cache_salt="other")


def miscount_the_tree(bench: Bench) -> None:
    bench.engine._tables.tree.cached += 1


def exceed_the_cap(bench: Bench) -> None:
    bench.engine._tables.tree.cap_pages = 1


def give_pages_to_one_who_waits(bench: Bench) -> None:
    next(iter(bench.engine._waiting.values())).pages = [running(bench, 0).pages[0]]


def lose_an_evictable_leaf(bench: Bench) -> None:
    bench.engine._tables.tree._leaves.clear()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_a_page, "no place: lost"),
        (free_a_page_twice, "is in free and free"),
        (free_a_page_in_use, "is in free and sequence r1"),
        (take_anothers_page, "is in sequence r1 and sequence r2"),
        (point_at_another_page_of_the_tree, "page 0 of its table is"),
        (forget_a_lock, "0 users counted, 1 have it"),
        (keep_a_lock, "handles counted, 3 held"),
        (change_a_token, "holds other tokens than its own"),
        (claim_tokens_that_were_not_computed, "tokens computed of"),
        (claim_another_tenants_pages, "cache_salt='other'"),
        (miscount_the_tree, "cached pages counted"),
        (exceed_the_cap, "over the cap of 1"),
        (give_pages_to_one_who_waits, "sequence r4 waits with 1 pages"),
        (lose_an_evictable_leaf, "tree: evictable []"),
    ],
)
def test_damage_is_reported_in_words(damage: Callable[[Bench], None], words: str) -> None:
    bench = busy_bench()
    damage(bench)
    report = bench.engine.integrity()
    assert not report["ok"]
    assert any(words in problem for problem in report["problems"]), report["problems"]
