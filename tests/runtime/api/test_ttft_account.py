"""TTFT through a real server and a real engine: the parts add up for every request, however it goes."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from firsttoken_api.verification import HEADER, verification_mark
from firsttoken_runtime.api.connection import Connection
from firsttoken_runtime.engine.engine import Engine, EngineSettings
from firsttoken_runtime.model.runner import Chunk
from firsttoken_runtime.switches import default_message
from firsttoken_runtime.timing import PARTS

VOCAB = 257
TOKEN_SECONDS = 0.0005
MODEL_PAGES, PAGE_TOKENS = 64, 16


class SlowRunner:
    """Says `x` for ever; a prompt token takes half a millisecond."""

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        time.sleep(TOKEN_SECONDS * sum(len(chunk.token_ids) for chunk in chunks))
        logits = torch.zeros(sum(chunk.logits for chunk in chunks), VOCAB)
        logits[:, ord("x")] = 50.0
        return logits

    def capabilities(self) -> dict[str, str | None]:
        return {}

    def set_fused_kernels(self, allowed: bool) -> None:
        pass


class RealEngine(Engine):
    """The engine itself, behind the names by which the fixture knows it."""

    limit = None

    def __init__(self) -> None:
        self.message = default_message()
        settings = EngineSettings(MODEL_PAGES, PAGE_TOKENS, 1000, (), vocab_size=VOCAB)
        super().__init__(SlowRunner(), settings, self.message)


@pytest.fixture
def scripted() -> RealEngine:
    return RealEngine()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "Say hello", "max_tokens": 3, "temperature": 0, **fields}


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


async def timings(server, **fields: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return events(response.text)[-1]["timings"] if fields.get("stream") else response.json()["timings"]


def check(account: dict[str, Any]) -> None:
    """Segments are the sums of their parts, and TTFT that of the segments, to the nanosecond."""
    total = 0
    for segment, names in PARTS.items():
        parts = [round(account["parts"][f"{name}_ms"] * 1e6) for name in names]
        assert min(parts) >= 0
        assert sum(parts) == round(account[f"{segment}_ms"] * 1e6)
        total += sum(parts)
    ttft_ms = account["ttft_ms"]
    if ttft_ms is None:
        ttft_ms = account["without_first_token_ms"]
    assert total == round(ttft_ms * 1e6)


async def finished(server, **query: Any) -> list[dict[str, Any]]:
    response = await server.admin.get("/admin/v1/requests", params=query)
    assert response.status_code == 200, response.text
    return response.json()["finished"]


def figure(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


WAYS = {
    "whole": {},
    "stream": {"stream": True},
    "one token": {"max_tokens": 1},
    "one token, stream": {"max_tokens": 1, "stream": True},
    "three answers": {"n": 3},
    "three answers, stream": {"n": 3, "stream": True},
    "two prompts": {"prompt": ["Say hello", "Say nothing at all"]},
    "chunked": {"prompt": "x" * 700, "stream": True},
    "no token shown": {"max_tokens": 0, "echo": True},
}


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS.keys())
async def test_the_parts_of_every_answer_add_up(server, fields):
    told = await timings(server, **fields)
    check(told)
    (entry,) = await finished(server)
    check(entry)
    assert entry["state"] == "finished"
    assert entry["ttft_ms"] == told["ttft_ms"]
    assert entry["parts"] == told["parts"]
    assert told["prefill_ms"] >= TOKEN_SECONDS * 1e3 * len("Say hello") * 0.9


async def test_a_prompt_in_several_chunks_has_a_ttft_that_the_caller_sees_too(server):
    began = time.perf_counter()
    told = await timings(server, prompt="x" * 700, stream=True, max_tokens=1)
    client_ms = (time.perf_counter() - began) * 1e3
    assert told["chunks"] >= 2
    assert 700 * TOKEN_SECONDS * 1e3 <= told["ttft_ms"] <= client_ms


async def test_as_many_ttfts_as_answered_requests(server):
    ways = [{**fields, "max_tokens": 1} for fields in WAYS.values() if "max_tokens" not in fields]
    await asyncio.gather(*(timings(server, **fields) for fields in (*ways, *ways)))
    metrics = (await server.http.get("/metrics")).text
    answered = figure(metrics, "vllm:request_success_total")
    assert answered == 2 * len(ways)
    for name in ("firsttoken_ttft_seconds", "vllm:time_to_first_token_seconds"):
        assert figure(metrics, f"{name}_count") == answered
    assert figure(metrics, 'firsttoken_ttft_part_seconds_count{model_name="echo",part="compute"') == answered
    parts = figure(metrics, "firsttoken_ttft_part_seconds_sum")
    segments = figure(metrics, "firsttoken_ttft_segment_seconds_sum")
    assert parts == pytest.approx(segments) == pytest.approx(figure(metrics, "firsttoken_ttft_seconds_sum"))


async def test_the_servers_ttft_is_the_callers_but_for_the_way(server):
    """Sums over many, against what the same client sees of a route that does nothing."""
    rounds, client, told, idle = 30, 0.0, 0.0, 0.0
    for number in range(rounds):
        began = time.perf_counter()
        await server.http.get("/version")
        idle += time.perf_counter() - began
        began = time.perf_counter()
        prompt = f"{number} " + "x" * 60
        async with server.http.stream(
            "POST", "/v1/completions", json=body(prompt=prompt, stream=True)
        ) as response:
            lines = [(line, time.perf_counter()) async for line in response.aiter_lines() if line]
        ttft = json.loads(lines[-2][0].removeprefix("data: "))["timings"]["ttft_ms"] / 1e3
        assert ttft <= lines[0][1] - began, "the server cannot have sent it after the caller had it"
        client += lines[0][1] - began
        told += ttft
    assert told >= rounds * 60 * TOKEN_SECONDS
    assert client - told < 3 * idle + 0.1 * client


async def test_who_waits_for_others_sees_it_in_the_queue_or_as_blocked(server):
    long, *shorts = await asyncio.gather(
        timings(server, prompt="y" * 700, stream=True, max_tokens=1),
        *(timings(server, prompt=f"{n}" * 30, stream=True, max_tokens=1) for n in range(4)),
    )
    for told in (long, *shorts):
        check(told)
        own_ms = told["prompt_tokens"] * TOKEN_SECONDS * 1e3
        assert 0.9 * own_ms <= told["parts"]["compute_ms"]
    assert long["parts"]["blocked_ms"] + long["parts"]["wait_ms"] > 0.5 * 4 * 30 * TOKEN_SECONDS * 1e3


@pytest.mark.parametrize("cut", [30, -50], ids=["in the head", "in the body"])
async def test_a_slow_upload_shows_in_receive_and_nowhere_else(server, cut):
    data = json.dumps(body(stream=True)).encode()
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    whole = head + data
    writer.write(whole[:cut])
    await asyncio.sleep(0.3)
    writer.write(whole[cut:])
    await reader.readuntil(b"[DONE]")
    writer.close()
    (entry,) = await finished(server)
    check(entry)
    assert entry["parts"]["receive_ms"] > 290
    assert entry["ttft_ms"] - entry["parts"]["receive_ms"] < 250


async def test_a_slow_reader_shows_in_transport_and_holds_up_nobody_else(server):
    """The answer before fills the connection and is not read; the next one's first token cannot be sent."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        host, port = server.url.removeprefix("http://").split(":")
        await loop.sock_connect(slow, (host, int(port)))

        async def send(**fields: Any) -> None:
            data = json.dumps(body(stream=True, **fields)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(slow, head.encode() + data)

        await send(max_tokens=40)
        await eventually(server, lambda told: told["finished"])
        await send(max_tokens=2)
        await asyncio.sleep(0.2)
        others = await asyncio.gather(*(timings(server, prompt=f"{n}", stream=True) for n in range(4)))
        held_ms = 500
        await asyncio.sleep(held_ms / 1e3)
        running = (await server.admin.get("/admin/v1/requests")).json()["running"]
        assert [entry["segment"] for entry in running] == ["transport"]
        text = b""
        async with asyncio.timeout(10):
            while text.count(b"[DONE]") < 2:
                text += await loop.sock_recv(slow, 1 << 16)
    entries = await finished(server, order="newest")
    last = next(entry for entry in entries if entry["completion_tokens"] == 2)
    check(last)
    assert last["transport_ms"] >= held_ms
    assert last["ttft_ms"] - last["transport_ms"] < 250
    assert all(told["transport_ms"] < 250 for told in others)


async def listed(server, **query: Any) -> dict[str, Any]:
    return (await server.admin.get("/admin/v1/requests", params=query)).json()


async def eventually(server, true: Callable[[dict[str, Any]], Any], **query: Any) -> dict[str, Any]:
    """The list of requests, as soon as something is true of it."""
    async with asyncio.timeout(10):
        while not true(found := await listed(server, **query)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def switch(server, **switches: Any) -> None:
    """Small chunks, so that the engine can answer in between."""
    chunks = {"enabled": True, "chunkSize": 64}
    message = {"generation": 1, "switches": {"chunkedPrefill": chunks, **switches}}
    assert (await server.admin.put("/admin/v1/switches", json=message)).status_code == 200


async def give_up(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_request_given_up_in_prefill_tells_what_was_computed_for_it(server):
    await switch(server)
    asking = asyncio.create_task(timings(server, prompt="a" * 900))
    await eventually(server, lambda told: any(one["state"] == "prefill" for one in told["requests"]))
    await give_up(asking)
    told = await eventually(server, lambda told: told["finished"] and told["finished"][0]["chunks"])
    (entry,) = told["finished"]
    check(entry)
    assert (entry["state"], entry["segment"], entry["ttft_ms"]) == ("aborted", "prefill", None)
    assert 0.9 * TOKEN_SECONDS * 1e3 * 64 < entry["parts"]["compute_ms"] <= entry["total_ms"]
    assert (entry["decode_ms"], entry["transport_ms"]) == (0, 0)
    metrics = (await server.http.get("/metrics")).text
    assert figure(metrics, 'firsttoken_requests_aborted_total{model_name="echo",segment="prefill"}') == 1
    assert figure(metrics, "firsttoken_ttft_seconds_count") == 0


async def test_a_request_given_up_in_the_queue_tells_how_long_it_waited(server):
    await switch(server, continuousBatching={"enabled": True, "maxSequences": 1})
    before = asyncio.create_task(timings(server, prompt="b" * 900))
    await eventually(server, lambda told: any(one["state"] == "prefill" for one in told["requests"]))
    asking = asyncio.create_task(timings(server, prompt="a" * 20))
    await eventually(server, lambda told: any(one["state"] == "waiting" for one in told["requests"]))
    await asyncio.sleep(0.1)
    await give_up(asking)
    check(await before)
    told = await eventually(server, lambda told: len(told["finished"]) == 2)
    (entry,) = (one for one in told["finished"] if one["state"] == "aborted")
    check(entry)
    assert entry["segment"] == "queue"
    assert entry["parts"]["wait_ms"] > 90
    assert (entry["prefill_ms"], entry["chunks"], entry["completion_tokens"]) == (0, 0, 0)


async def test_a_request_given_up_after_its_first_token_keeps_its_ttft(server):
    async with server.http.stream(
        "POST", "/v1/completions", json=body(stream=True, max_tokens=900)
    ) as response:
        await anext(response.aiter_lines())
    told = await eventually(server, lambda told: told["finished"])
    (entry,) = told["finished"]
    check(entry)
    assert (entry["state"], entry["segment"]) == ("aborted", None)
    assert entry["ttft_ms"] > 0
    assert 1 <= entry["completion_tokens"] < 900


async def test_what_is_refused_is_in_no_list_of_requests(server):
    response = await server.http.post("/v1/completions", json=body(prompt="a" * 5000))
    assert response.status_code == 400
    assert await listed(server) == {"requests": [], "running": [], "finished": []}


async def test_the_slowest_or_the_newest_come_first_and_no_more_than_asked_for(server):
    for length in (10, 300, 20):
        await timings(server, prompt="a" * length, max_tokens=1)
    slowest = [one["prompt_tokens"] for one in await finished(server)]
    assert slowest[0] == 300
    newest = [one["prompt_tokens"] for one in await finished(server, order="newest", limit=2)]
    assert newest == [20, 300]
    assert await finished(server, limit=0) == []


@pytest.mark.parametrize("query", ["order=fastest", "limit=-1", "limit=1001", "limit=²", "limit=", "top=3"])
async def test_a_query_that_means_nothing_is_refused(server, query):
    response = await server.admin.get(f"/admin/v1/requests?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_the_list_has_no_word_of_a_prompt_or_an_answer_and_keeps_a_bounded_number(server):
    for _ in range(3):
        await timings(server, prompt="confidential", stop=["secret"], stream=True)
    text = (await server.admin.get("/admin/v1/requests")).text
    assert "confidential" not in text
    assert "secret" not in text
    assert "xx" not in text
    assert server.service.records.ledger._ended.maxlen == 1000
    assert server.service.records.ledger._running == {}
    assert {entry.connection._transport for entry in server.service.records.ledger._ended} == {None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_verification_is_in_no_list_and_no_figure(server, stream):
    mark = {HEADER: verification_mark("open-sesame")}
    response = await server.http.post("/v1/completions", json=body(stream=stream), headers=mark)
    assert response.status_code == 200
    assert await listed(server) == {"requests": [], "running": [], "finished": []}
    state = (await server.admin.get("/admin/v1/state")).json()
    assert state["prompt_lengths"]["count"] == 0
    metrics = (await server.http.get("/metrics")).text
    for name in (
        "firsttoken_ttft_part_seconds_count",
        "firsttoken_first_token_ack_seconds_count",
        "firsttoken_first_token_ack_unknown_total",
        "vllm:request_success_total",
    ):
        assert figure(metrics, name) == 0


async def test_the_state_has_prompt_lengths_and_the_cost_of_prefill(server):
    for number in range(10):
        await timings(server, prompt=f"{number}" * (30 if number % 2 else 200), max_tokens=1)
    state = (await server.admin.get("/admin/v1/state")).json()
    assert state["prompt_lengths"]["prompt_tokens"] == {"32": 5, "256": 5}
    assert state["prompt_lengths"]["computed_tokens"] == {"32": 5, "256": 5}
    cost = state["prefill_cost"]
    assert cost["steps"] >= 10
    assert cost["tokens_per_second"]["256"] == pytest.approx(1 / TOKEN_SECONDS, rel=0.4)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of acknowledgements")
async def test_the_callers_tcp_stack_acknowledges_the_first_token(server):
    told = await timings(server, stream=True, max_tokens=200)
    assert 0 <= told["ack_ms"] < told["total_ms"]
    assert "ack_unknown" not in told
    await timings(server, stream=True, max_tokens=1)
    one = await eventually(server, lambda told: told["finished"][0]["ack_ms"] is not None, order="newest")
    assert one["finished"][0]["completion_tokens"] == 1
    whole = await timings(server)
    assert (whole["ack_ms"], whole["ack_unknown"]) == (None, "not streamed: no first token on the wire")
    metrics = (await server.http.get("/metrics")).text
    assert figure(metrics, "firsttoken_first_token_ack_seconds_count") == 2


async def test_an_acknowledgement_that_nobody_can_know_is_said_to_be_unknown():
    told: list[tuple[int | None, str]] = []
    Connection(None).watch_acknowledgement(lambda at_ns, why: told.append((at_ns, why)))
    assert told[0][0] is None
    assert told[0][1]
    assert await Connection(None).sent()
