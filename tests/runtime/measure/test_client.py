"""One request, timed from outside, against a server whose every delay is known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from firsttoken_runtime.measure.client import (
    BenchError,
    Dialect,
    RequestError,
    Sample,
    complete,
    probe,
    server_timing,
)
from firsttoken_runtime.measure.server import TokenCounter, served_model
from firsttoken_runtime.measure.target import Address, connected

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def http(server: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=5) as client:
        yield client


async def send(http: httpx.AsyncClient, tokens: int = 4, **more: Any) -> Sample:
    return await complete(http, "words-1", "one two three", tokens, **more)


async def test_ttft_ends_at_the_first_text_not_at_the_first_event(
    server: Any, http: httpx.AsyncClient
) -> None:
    server.behaviour.first_seconds = 0.08
    server.behaviour.empty_chunks = 3
    sample = await send(http)
    assert 80 <= sample.ttft_ms < 400


async def test_tpot_is_the_time_after_the_first_token_by_the_tokens_after_it(
    server: Any, http: httpx.AsyncClient
) -> None:
    server.behaviour.first_seconds = 0.1
    server.behaviour.gap_seconds = 0.03
    sample = await send(http, 5)
    assert sample.tpot_ms == pytest.approx((sample.total_ms - sample.ttft_ms) / 4)
    assert 30 <= sample.tpot_ms < 90
    assert len(sample.gaps_ms) == 4
    assert sum(sample.gaps_ms) <= sample.total_ms - sample.ttft_ms + 1e-6


async def test_one_token_has_no_tpot(server: Any, http: httpx.AsyncClient) -> None:
    assert (await send(http, 1)).tpot_ms is None


async def test_tokens_are_the_servers_even_when_a_chunk_brings_several(
    server: Any, http: httpx.AsyncClient
) -> None:
    server.behaviour.tokens_per_chunk = 4
    server.behaviour.cached_tokens = 2
    sample = await send(http, 8)
    assert (sample.output_tokens, sample.chunks) == (8, 2)
    assert (sample.prompt_tokens, sample.cached_tokens) == (3, 2)
    assert sample.tpot_ms == pytest.approx((sample.total_ms - sample.ttft_ms) / 7)


async def test_the_servers_account_comes_along(server: Any, http: httpx.AsyncClient) -> None:
    server.behaviour.server_timing = 'queue;dur=1.5, prefill;desc="p";dur="20"'
    server.behaviour.timings = {"prefill_ms": 21.0, "ttft_ms": 23.0}
    assert (await send(http)).timings == {"queue_ms": 1.5, "prefill_ms": 21.0, "ttft_ms": 23.0}


async def test_chat_and_completions_ask_the_same(server: Any, http: httpx.AsyncClient) -> None:
    chat = await send(http, dialect=Dialect(chat=True))
    assert chat.text == (await send(http)).text == "word word word word "
    common = {"model": "words-1", "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
    for body in server.behaviour.bodies:
        assert common.items() <= body.items()
        assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ({"status": 429}, "HTTP 429", "no room"),
        ({"error_event": True}, "stream error", "out of memory"),
        ({"break_after": 2}, "disconnected", "broke"),
        ({"break_after": 0}, "disconnected", "broke"),
    ],
)
async def test_a_failure_has_a_kind_and_a_reason(
    server: Any, http: httpx.AsyncClient, behaviour: dict[str, Any], kind: str, words: str
) -> None:
    for name, value in behaviour.items():
        setattr(server.behaviour, name, value)
    with pytest.raises(RequestError, match=words) as caught:
        await send(http)
    assert caught.value.kind == kind


async def test_an_answer_that_takes_too_long_is_a_timeout(server: Any, http: httpx.AsyncClient) -> None:
    server.behaviour.first_seconds = 1.0
    with pytest.raises(RequestError, match=r"within 0\.1 s") as caught:
        await send(http, timeout_seconds=0.1)
    assert caught.value.kind == "timeout"


async def test_nobody_there_is_a_kind_of_its_own() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as client:
        with pytest.raises(RequestError) as caught:
            await send(client)
    assert caught.value.kind == "connect"


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ((), Dialect()),
        (("stream_options",), Dialect(stream_usage=False)),
        (("ignore_eos",), Dialect(ignore_eos=False)),
        (("ignore_eos", "stream_options"), Dialect(ignore_eos=False, stream_usage=False)),
    ],
)
async def test_fields_a_server_refuses_are_left_out(
    server: Any, http: httpx.AsyncClient, refused: tuple[str, ...], expected: Dialect
) -> None:
    server.behaviour.refused_fields = refused
    dialect, sample = await probe(http, "words-1", "one two", Dialect(), 5)
    assert dialect == expected
    assert sample.chunks == 8


async def test_a_server_that_refuses_everything_is_told_with_its_own_words(
    server: Any, http: httpx.AsyncClient
) -> None:
    server.behaviour.status = 404
    with pytest.raises(BenchError, match=r"words-1.*HTTP 404.*no room"):
        await probe(http, "words-1", "one two", Dialect(), 5)


@pytest.mark.parametrize("header", ["", "cache;desc=hit", "db;dur=fast", ";;,", "a"])
async def test_a_server_timing_without_durations_is_nothing(header: str) -> None:
    assert server_timing(header) == {}


async def test_the_model_is_checked_before_anything_is_sent(server: Any, http: httpx.AsyncClient) -> None:
    assert (await served_model(http)).name == "words-1"
    assert (await served_model(http, "words-1")).max_tokens == 4096
    with pytest.raises(BenchError, match=r"does not serve 'gpt-9'; it serves words-1"):
        await served_model(http, "gpt-9")


async def test_the_servers_tokenizer_counts_where_there_is_one(server: Any, http: httpx.AsyncClient) -> None:
    assert await TokenCounter(http, "words-1").count("a b c") == 3
    server.behaviour.tokenize = False
    assert await TokenCounter(http, "words-1").count("a b c") is None


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_url_may_end_as_openai_clients_want_it(server: Any, suffix: str) -> None:
    async with connected(Address(server.url + suffix), 0, "run") as target:
        assert target.model == "words-1"


@pytest.mark.parametrize(
    ("usage", "tokenize", "counted_by"),
    [(True, True, "usage"), (True, False, "usage"), (False, True, "/tokenize"), (False, False, "chunks")],
)
async def test_who_counts_tokens_is_known(server: Any, usage: bool, tokenize: bool, counted_by: str) -> None:
    server.behaviour.usage, server.behaviour.tokenize = usage, tokenize
    async with connected(Address(server.url), 0, "run") as target:
        assert target.counted_by == counted_by
        assert len((await target.prompts.of(77)).split()) == 77
        assert bool(target.notes) == (counted_by == "chunks")
