"""What a caller of the OpenAI routes gets: text, chunks, usage, timings, and the end of it when they go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from typing import Any

import httpx

SEGMENTS = ("queue_ms", "prefill_ms", "decode_ms", "transport_ms")


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "Say hello", "max_tokens": 50, **fields}


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def adds_up(timings: dict[str, float]) -> bool:
    return round(sum(timings[name] for name in SEGMENTS) * 1e6) == round(timings["ttft_ms"] * 1e6)


async def test_completion_with_the_openai_client(server):
    answer = await server.openai.completions.create(**body())
    assert answer.choices[0].text == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len("Say hello")
    assert answer.usage.completion_tokens == len("Hello, world.") + 1
    assert adds_up(answer.timings)
    assert answer.timings["transport_ms"] == 0


async def test_chat_stream_with_the_openai_client(server):
    server.engine.cached_tokens = 7
    stream = await server.openai.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello, world."
    assert chunks[-2].choices[0].finish_reason == "stop"
    last = chunks[-1]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == 7
    assert last.timings["cached_tokens"] == 7
    assert adds_up(last.timings)


async def test_the_chat_template_makes_the_prompt(server):
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    await server.openai.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}])
    assert bytes(server.engine.added[0].prompt) == b"user: Hi there\nassistant: "


async def test_last_event_before_done_carries_the_timings_and_the_header_agrees(server):
    response = await server.http.post("/v1/completions", json=body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    *_, last = events(response.text)
    assert last["choices"][0]["finish_reason"] == "stop"
    timings = last["timings"]
    assert adds_up(timings)
    header = {
        name: float(value)
        for name, value in re.findall(r"(\w+);dur=([0-9.]+)", response.headers["server-timing"])
    }
    parts = timings["parts"]
    assert list(header) == ["queue", "prefill", "decode", "total", *(name[:-3] for name in parts)][:-1]
    assert all(abs(header[name[:-3]] - parts[name]) < 1e-5 for name in parts if name != "write_ms")
    for name in ("queue", "prefill", "decode"):
        assert abs(header[name] - timings[f"{name}_ms"]) < 1e-5
    assert abs(header["total"] + timings["transport_ms"] - timings["ttft_ms"]) < 1e-4


async def test_the_first_token_does_not_wait_for_the_network(server):
    # Nagle's algorithm and a delayed acknowledgement together would add 40 ms that no server stamp sees.
    beyond = []
    for _ in range(9):
        began = time.perf_counter()
        async with server.http.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            lines = [(line, time.perf_counter()) async for line in response.aiter_lines() if line]
        timings = json.loads(lines[-2][0].removeprefix("data: "))["timings"]
        beyond.append((lines[0][1] - began) * 1000 - timings["ttft_ms"])
    assert 0 < sorted(beyond)[len(beyond) // 2] < 30


async def test_a_reply_of_one_token_has_a_ttft_too(server):
    response = await server.http.post("/v1/completions", json=body(stream=True, max_tokens=1))
    first, last = events(response.text)
    assert first["choices"][0]["text"] == "H"
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["ttft_ms"] > 0
    metrics = (await server.http.get("/metrics")).text
    assert 'firsttoken_ttft_seconds_count{model_name="echo"} 1.0' in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="echo"} 1.0' in metrics


async def test_an_empty_reply_is_answered_and_timed(server):
    server.engine.reply = b""
    response = await server.http.post("/v1/completions", json=body(stream=True))
    first, last = events(response.text)
    assert (first["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")
    assert adds_up(last["timings"])


async def test_a_character_is_never_split(server):
    server.engine.reply = "né 🌍!".encode()
    response = await server.http.post("/v1/completions", json=body(stream=True))
    texts = [event["choices"][0]["text"] for event in events(response.text)]
    assert "".join(texts) == "né 🌍!"
    assert not any("�" in text for text in texts)


async def test_a_stop_string_across_tokens_ends_the_text_before_it_and_stops_the_engine(server, until):
    response = await server.http.post("/v1/completions", json=body(stream=True, stop=["lo, w", "zzz"]))
    sent = events(response.text)
    assert "".join(event["choices"][0]["text"] for event in sent) == "Hel"
    assert sent[-1]["choices"][0]["finish_reason"] == "stop"
    await until(lambda: server.engine.aborted == [server.engine.added[0].id])


async def test_text_held_back_for_a_stop_string_comes_at_the_end(server):
    answer = await server.openai.completions.create(**body(stop=["d.!"]))
    assert answer.choices[0].text == "Hello, world."


async def test_sampling_parameters_reach_the_engine(server):
    asked = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 1, "frequency_penalty": -1}
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "repetition_penalty": 1.5, "stop_token_ids": [9]}
    await server.openai.completions.create(**body(**asked, logit_bias={"65": -100}, extra_body=extra))
    sampling = server.engine.added[0].sampling
    for name, value in (asked | extra).items():
        assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value)
    assert sampling.logit_bias == {65: -100.0}


async def test_what_is_left_out_has_openai_defaults(server):
    await server.http.post("/v1/completions", json={"prompt": [1, 2, 3]})
    await server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "top_p": None}
    )
    plain, chat = server.engine.added
    assert plain.prompt == (1, 2, 3)
    assert (plain.sampling.max_tokens, plain.sampling.temperature) == (16, 1.0)
    assert chat.sampling.max_tokens == 1000


async def test_max_tokens_beyond_the_context_are_cut_to_it(server):
    answer = await server.openai.completions.create(**body(prompt="a" * 990, max_tokens=5000))
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")


async def test_requests_without_a_seed_get_different_ones(server):
    for _ in range(2):
        await server.http.post("/v1/completions", json=body(max_tokens=1))
    first, second = (request.sampling.seed for request in server.engine.added)
    assert first is not None
    assert first != second


async def test_logprobs_of_chat_and_of_plain_completions(server):
    chat = await server.openai.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=2,
    )
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -9999.0]
    plain = await server.openai.completions.create(**body(logprobs=2, max_tokens=2))
    assert plain.choices[0].logprobs.tokens == ["H", "e"]
    assert plain.choices[0].logprobs.text_offset == [0, 1]


async def test_the_request_id_comes_back(server):
    given = await server.http.post("/v1/completions", json=body(), headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = await server.http.get("/nowhere", headers={"x-request-id": "no spaces please"})
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])


async def test_a_stream_that_is_closed_stops_the_engine(server, until):
    server.engine.reply = b"x" * 10_000
    async with server.http.stream(
        "POST", "/v1/completions", json=body(stream=True, max_tokens=900)
    ) as response:
        server.engine.limit = 5
        async for _ in response.aiter_lines():
            break
    await until(lambda: len(server.engine.aborted) == 1)
    await until(lambda: server.service.running == 0)


async def test_a_caller_that_goes_before_the_first_token_stops_the_engine(server, until):
    for stream in (True, False):
        server.engine.aborted.clear()
        server.engine.limit = 0
        with contextlib.suppress(httpx.ReadTimeout):
            await server.http.post("/v1/completions", json=body(stream=stream), timeout=0.2)
        await until(lambda: len(server.engine.aborted) == 1)
        await until(lambda: server.service.running == 0)


async def test_many_streams_at_once_each_get_their_own_text(server):
    async def one(count: int) -> str:
        answer = await server.http.post("/v1/completions", json=body(stream=True, max_tokens=count))
        return "".join(event["choices"][0]["text"] for event in events(answer.text))

    texts = await asyncio.gather(*(one(count) for count in range(1, 14)))
    assert texts == ["Hello, world."[:count] for count in range(1, 14)]


async def test_tokenize_and_detokenize(server):
    tokens = (await server.http.post("/tokenize", json={"prompt": "hé"})).json()
    assert tokens == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 1000}
    text = (await server.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "hé"}
    chat = await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
    assert bytes(chat.json()["tokens"]) == b"user: x\nassistant: "


async def test_the_bodies_are_described(server):
    described = (await server.http.get("/openapi.json")).json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert "messages" in described["components"]["schemas"]["ChatRequest"]["properties"]
    assert "$defs" not in json.dumps(described)


async def test_models(server):
    listed = [model.id async for model in server.openai.models.list()]
    assert listed == ["echo"]
    assert (await server.openai.models.retrieve("echo")).max_model_len == 1000
