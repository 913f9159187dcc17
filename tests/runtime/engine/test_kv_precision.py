"""Changing the precision of KV while requests run: everything is computed again, and nothing else is lost."""

from __future__ import annotations

import pytest
from page_model import Bench, message, prompt

from firsttoken_api.switches import parse_message
from firsttoken_runtime.engine.requests import AdmissionError, Finish
from firsttoken_runtime.model.kv_pool import KvPrecision

INT4 = {"kvQuantization": {"precision": "int4"}}


def switch(bench: Bench, generation: int, **switches: object) -> dict[str, str]:
    """Switch, check the accounting, and return what kvQuantization answers."""
    assert bench.engine.set_switches(message(generation, **switches))
    bench.check()
    return answer(bench)


def answer(bench: Bench) -> dict[str, str]:
    return next(state for state in bench.engine.switch_states() if state["name"] == "kvQuantization")


def busy_bench() -> Bench:
    """One sequence in prefill, two that decode, one that waits, and prefixes in the cache."""
    bench = Bench(total_pages=48, page_tokens=4)
    bench.engine.set_switches(
        message(2, continuousBatching={"maxSequences": 3}, chunkedPrefill={"chunkSize": 16})
    )
    bench.add(prompt(20, 5), max_tokens=1)
    bench.run()
    for salt in (1, 2):
        bench.add(prompt(22, salt), max_tokens=12)
    bench.steps(4)
    bench.add(prompt(60, 3), max_tokens=6)
    bench.step()
    bench.add(prompt(30, 4), max_tokens=6)
    states = [entry["state"] for entry in bench.engine.requests()]
    assert states == ["decode", "decode", "prefill", "waiting"]
    return bench


def test_lower_precision_makes_more_pages_of_the_same_memory() -> None:
    bench = Bench(total_pages=48, page_tokens=4)
    found = {}
    for generation, precision in enumerate(("fp8", "int8", "int4"), 2):
        assert switch(bench, generation, kvQuantization={"precision": precision})["state"] == "on"
        found[precision] = bench.engine.kv()
        assert found[precision]["pages"] == bench.engine.pages()["total"] == len(bench.model.slots)
        assert found[precision]["pool_bytes"] <= 48 * 1024
    # 2 layers of one head of 16: 256 bytes in float32; 16 + 2 bytes or 8 + 4 per key and value when quantized
    assert [found[p]["bytes_per_token"] for p in ("fp8", "int8", "int4")] == [72, 72, 48]
    assert [found[p]["pages"] for p in ("fp8", "int8", "int4")] == [170, 170, 256]
    assert switch(bench, 5, kvQuantization=False)["state"] == "off"
    assert bench.engine.kv() == {
        "precision": "model",
        "bytes_per_token": 256,
        "pages": 48,
        "tokens": 192,
        "pool_bytes": 48 * 1024,
    }


def test_what_runs_is_computed_again_first_and_what_waits_stays() -> None:
    bench = busy_bench()
    before = {id: list(bench.tokens(id)) for id in bench.requests}
    switch(bench, 3, continuousBatching={"maxSequences": 3}, **INT4)
    assert [entry["state"] for entry in bench.engine.requests()] == ["waiting"] * 4
    assert bench.engine.pages() == {"free": 256, "cached": 0, "locked": 0, "owned": 0, "total": 256}
    bench.step()
    assert [entry["id"] for entry in bench.engine.requests() if entry["state"] == "waiting"] == ["r4"]
    bench.run()
    bench.assert_right()
    bench.assert_drained()
    for id, tokens in before.items():
        assert bench.tokens(id)[: len(tokens)] == tokens


@pytest.mark.parametrize("batching", [True, False])
def test_a_toggle_at_every_step_fails_nothing(batching: bool) -> None:
    bench = Bench(total_pages=48, page_tokens=4)
    for salt in range(6):
        bench.add(prompt(10 + 7 * salt, salt), max_tokens=8, priority=salt % 2)
    precisions = [{"precision": p} for p in ("int8", "int4", "fp8")]
    generation = 1
    while bench.engine.has_work():
        generation += 1
        changed = [False, *precisions][generation % 4]
        # Every change costs what runs its pages: it gets on in the steps between.
        switch(bench, generation, continuousBatching=batching, kvQuantization=changed)
        bench.steps(6)
    bench.assert_right()
    bench.assert_drained()
    assert bench.engine.stats()["kv_changes"] == len(bench.model.kv_tables) == generation - 1


@pytest.mark.parametrize("cause", ["killed", "rolledBack"])
def test_taken_back_it_goes_the_same_way(cause: str) -> None:
    bench = busy_bench()
    switch(bench, 3, **INT4)
    bench.steps(3)
    taken = {"enabled": False, "cause": cause, "precision": "int4"}
    assert bench.engine.set_switches(parse_message({"generation": 4, "switches": {"kvQuantization": taken}}))
    assert answer(bench)["state"] == cause
    assert bench.engine.kv()["precision"] == "model"
    assert bench.engine.pages()["total"] == 48
    bench.run()
    bench.assert_right()
    bench.assert_drained()


def test_no_switch_makes_an_admitted_request_impossible() -> None:
    """With four times the pages the limits are still those of the model's precision."""
    bench = Bench(total_pages=8, page_tokens=4, switches=message(1, **INT4))
    assert bench.engine.pages()["total"] > 32
    with pytest.raises(AdmissionError, match="the pool has 8 of 4 tokens"):
        bench.add(prompt(33))
    bench.add(prompt(30), max_tokens=50)
    bench.steps(2)
    switch(bench, 2, kvQuantization=False)
    bench.run()
    assert bench.finish("r0") == Finish.LENGTH
    assert len(bench.tokens("r0")) == 3  # cut to the smaller pool when it came
    bench.assert_drained()


def test_nothing_of_another_precision_is_a_hit() -> None:
    bench = Bench(total_pages=48, page_tokens=4)
    first = bench.add(prompt(20), max_tokens=1)
    bench.run()
    switch(bench, 2, **INT4)
    second = bench.add(prompt(20), max_tokens=1)
    bench.run()
    third = bench.add(prompt(20), max_tokens=1)
    bench.run()
    switch(bench, 3, kvQuantization=False)
    fourth = bench.add(prompt(20), max_tokens=1)
    bench.run()
    assert [bench.cached(id) for id in (first, second, third, fourth)] == [0, 0, 16, 0]
    assert {root.namespace.kv_precision for root in bench.engine._tables.tree.roots()} == {"model"}


def test_the_same_precision_again_changes_nothing() -> None:
    bench = busy_bench()
    switch(bench, 3, **INT4)
    bench.steps(3)
    running = bench.engine.requests()
    switch(bench, 4, prefixCache={"maxMemory": "40%"}, **INT4)
    assert bench.engine.requests() == running
    assert len(bench.model.kv_tables) == 1


def test_exceptions_for_layers() -> None:
    bench = Bench(total_pages=48, page_tokens=4)
    layers = [{"layer": 1, "precision": "model"}]
    assert switch(bench, 2, kvQuantization={"precision": "int8", "layers": layers})["state"] == "on"
    assert bench.model.kv_tables == [(KvPrecision.INT8, KvPrecision.MODEL)]
    assert bench.engine.kv()["precision"] == "int8; layer 1 model"
    assert bench.engine.kv()["bytes_per_token"] == 36 + 128


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([{"layer": 2, "precision": "int8"}], "layers: there is no layer 2; this model has layers 0 to 1"),
        (
            [{"layer": 0, "precision": "int8"}, {"layer": 0, "precision": "model"}],
            "layers: layer 0 is listed twice",
        ),
    ],
)
def test_a_table_that_does_not_fit_the_model_is_inactive_and_says_why(layers: list, reason: str) -> None:
    bench = busy_bench()
    found = switch(bench, 3, kvQuantization={"precision": "fp8", "layers": layers})
    assert (found["state"], found["reason"]) == ("inactive", reason)
    assert bench.model.kv_tables == []
    bench.run()
    bench.assert_right()


def test_slots_that_pages_waste_are_counted() -> None:
    bench = Bench(total_pages=48, page_tokens=4, switches=message(1, prefixCache=False))
    bench.add(prompt(9), max_tokens=8)
    bench.add(prompt(12), max_tokens=8)
    bench.step()
    assert bench.engine.stats()["kv_slots_unfilled"] == 3
    bench.step()
    assert bench.engine.stats()["kv_slots_unfilled"] == 2 + 3
    bench.run()
    assert bench.engine.stats()["kv_slots_unfilled"] == 0
