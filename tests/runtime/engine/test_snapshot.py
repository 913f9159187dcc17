"""What a switch message means to a step, and what every switch answers."""

from __future__ import annotations

import pytest
from page_model import message

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.switches import SwitchMessage, parse_message
from firsttoken_runtime.engine.snapshot import (
    Load,
    Snapshot,
    automatic_max_sequences,
    automatic_prefill_tokens,
    read_snapshot,
)

POOL = 1 << 20


def read(switches: SwitchMessage, page_bytes: int | None = 1024, **capabilities: str | None) -> Snapshot:
    return read_snapshot(switches, 1000, 16, page_bytes, capabilities)


def states(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    return {state["name"]: (state["state"], state["reason"]) for state in snapshot.states}


def test_every_optimization_answers_in_catalogue_order() -> None:
    assert [state["name"] for state in read(message()).states] == [entry.name for entry in CATALOGUE]


def test_by_default_what_the_engine_has_is_on_and_the_rest_says_why_not() -> None:
    found = states(read(message(), fusedKernels="no CUDA device", cudaGraphs="no CUDA device"))
    on = {name for name, (state, _) in found.items() if state == "on"}
    assert on == {"continuousBatching", "prefixCache", "chunkedPrefill", "priorityScheduling"}
    assert found["fusedKernels"] == ("inactive", "no CUDA device")
    assert found["kvQuantization"] == ("off", "")


def test_what_is_asked_for_and_not_built_is_inactive_and_fails_nothing() -> None:
    asked = message(1, kvQuantization=True, tensorParallel={"degree": 4})
    found = states(read(asked))
    for name in ("kvQuantization", "tensorParallel"):
        assert found[name] == ("inactive", "not in this build")


def test_what_the_runner_can_do_is_on() -> None:
    assert states(read(message(), fusedKernels=None))["fusedKernels"] == ("on", "")


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("killed", "taken back by the kill switch"), ("rolledBack", "taken back by spec.rollback")],
)
def test_what_was_taken_back_says_by_whom(cause: str, reason: str) -> None:
    taken = parse_message({"generation": 1, "switches": {"prefixCache": {"enabled": True, "cause": cause}}})
    snapshot = read(taken)
    assert states(snapshot)["prefixCache"] == (cause, reason)
    assert not snapshot.cache_enabled


def test_static_batches_make_chunking_and_priority_inactive() -> None:
    snapshot = read(message(1, continuousBatching=False))
    found = states(snapshot)
    assert found["continuousBatching"] == ("off", "")
    assert found["chunkedPrefill"][0] == found["priorityScheduling"][0] == "inactive"
    assert "continuousBatching" in found["chunkedPrefill"][1]
    assert (snapshot.chunk_size, snapshot.by_priority) == (None, False)


@pytest.mark.parametrize(("cap", "pages"), [("50%", 500), ("100Ki", 100), ("1Gi", 1000), ("100%", 1000)])
def test_the_cache_cap_in_pages(cap: str, pages: int) -> None:
    assert read(message(1, prefixCache={"maxMemory": cap})).cache_pages == pages


def test_a_cap_in_bytes_needs_the_size_of_a_page() -> None:
    snapshot = read(message(1, prefixCache={"maxMemory": "1Mi"}), page_bytes=None)
    state, reason = states(snapshot)["prefixCache"]
    assert (state, snapshot.cache_enabled, snapshot.cache_pages) == ("inactive", False, 0)
    assert "write a per cent" in reason
    assert read(message(1, prefixCache={"maxMemory": "25%"}), page_bytes=None).cache_pages == 250


def test_parameters_are_read() -> None:
    snapshot = read(
        message(
            1,
            continuousBatching={"maxSequences": 7, "maxBatchTokens": 99},
            chunkedPrefill={"chunkSize": 64},
            priorityScheduling={"ageingTokensPerSecond": 5, "maxWaitSeconds": 2.5},
        )
    )
    settings = snapshot.for_step(Load())
    assert (settings.max_sequences, settings.max_batch_tokens, settings.chunk_size) == (7, 99, 64)
    assert (settings.ageing_tokens_per_second, settings.max_wait_ns) == (5.0, 2_500_000_000)


@pytest.mark.parametrize(("pages", "sequences"), [(1, 1), (8, 2), (100, 25), (100_000, 256)])
def test_automatic_sequences_follow_the_pool(pages: int, sequences: int) -> None:
    assert automatic_max_sequences(pages) == sequences


@pytest.mark.parametrize(
    ("chunk_size", "load", "tokens"),
    [
        (512, Load(), 512),  # nothing known: one chunk
        (512, Load(1000, 10, None), 7000),  # mean x sequences x 0.7
        (512, Load(1000, 10, 500), 128),  # 500 tokens/s: a quarter of a second, 128 at least
        (512, Load(1000, 10, 2000), 500),
        (512, Load(1000, 10, 1e6), 7000),
        (64, Load(10, 1, 1), 64),  # a chunk that is smaller still
        (None, Load(1000, 10, 500), 7000),  # without chunks the speed changes nothing
        (None, Load(100, 1, 500), 2048),
    ],
)
def test_automatic_step_budget(chunk_size: int | None, load: Load, tokens: int) -> None:
    assert automatic_prefill_tokens(chunk_size, load, POOL) == tokens


def test_the_step_budget_is_never_more_than_the_pool() -> None:
    assert automatic_prefill_tokens(512, Load(), 100) == 100
