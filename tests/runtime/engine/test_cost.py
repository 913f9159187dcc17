"""What a step costs, counted in calls and comparisons: flat in what is cached, logarithmic to evict."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from page_model import Bench, message, prompt

from firsttoken_runtime.engine.pages import PagePool
from firsttoken_runtime.engine.prefix import Namespace, PrefixTree

SIZE = 16


def fill(tree: PrefixTree, pool: PagePool, prefixes: int) -> None:
    """One cached page each, no two alike."""
    for number in range(prefixes):
        handle, _ = tree.match(Namespace(""), (), 0)
        key = (number // 90 + 1, number % 90 + 1, *[7] * (SIZE - 2))
        handle, _ = tree.extend(handle, iter([key]), pool.take(1))
        tree.release(handle)
    assert tree.cached == prefixes


def calls(work: Callable[[], Any]) -> int:
    """Python and C calls made by the engine's own code while `work` runs."""
    count = 0

    def on_event(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event in ("call", "c_call") and "firsttoken_runtime/engine" in frame.f_code.co_filename:
            count += 1

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def serve_some(cached: int, spare: int) -> int:
    """Calls to serve four prompts and answers beside so many cached prefixes, `spare` pages being free."""
    bench = Bench(
        total_pages=cached + spare,
        page_tokens=SIZE,
        max_model_len=600,
        switches=message(1, prefixCache={"maxMemory": "100%"}),
        prefill_tokens_per_second=10_000,
    )
    tables = bench.engine._tables
    fill(tables.tree, tables.pool, cached)
    for salt in range(4):
        bench.add(prompt(100, salt), max_tokens=8)
    found = calls(bench.run)
    bench.assert_right()
    return found


@pytest.mark.parametrize("spare", [64, 4], ids=["free pages", "every page by eviction"])
def test_a_step_costs_the_same_beside_10_and_10_000_cached_prefixes(spare: int) -> None:
    few, many = serve_some(60, spare), serve_some(10_000, spare)
    assert many == pytest.approx(few, rel=0.02)


class Counted(int):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) < int(other)  # type: ignore[call-overload]

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == int(other)  # type: ignore[call-overload]

    def __add__(self, other: int) -> Counted:
        return Counted(int(self) + other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("cached", [100, 1_000, 10_000])
def test_evicting_a_page_takes_some_multiple_of_log_n_comparisons(cached: int) -> None:
    pool = PagePool(cached)
    tree = PrefixTree(pool, SIZE, cached)
    tree._tick = Counted(0)
    fill(tree, pool, cached)
    evicted = cached // 2
    Counted.comparisons = 0
    assert tree.evict(evicted) == evicted
    assert Counted.comparisons / evicted < 6 * math.log2(cached)
