"""Bad input is answered in words, in the OpenAI shape, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from firsttoken_runtime.engine.requests import AdmissionError

OK = {"model": "echo", "prompt": "x"}
USER = [{"role": "user", "content": "x"}]
CHAT = {"model": "echo", "messages": USER}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8 (byte 12)"),
        (b'{"prompt": "\\ud800"}', ""),
        (b"[" * 20_000, "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', ""),
    ],
)
async def test_a_body_that_is_not_a_json_object(server, body, words):
    response = await server.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert words in error_of(response)["message"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": None}, "prompt", "string or a list of token ids"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": ["a", [1, "b"]]}, "prompt", "list of such prompts"),
        ({"prompt": ["a"] * 1025}, "prompt", "1025 prompts, and at most 1024"),
        ({"prompt": 5}, "prompt", "string or a list of token ids"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "no tokens"),
        ({"prompt": [1, "a"]}, "prompt", "string or a list of token ids"),
        ({"prompt": [True]}, "prompt", "string or a list of token ids"),
        ({"prompt": [1, 257]}, None, "the prompt has token 257; this model has tokens 0 to 256"),
        ({"prompt": [-1]}, None, "token -1"),
        ({"prompt": [2**64]}, "prompt", "string or a list of token ids"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids.0", "less than or equal to"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 64, "prompt": ["a"] * 17}, "n", "makes 1088 answers, and at most 1024"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "more than the 5 that max_tokens allows"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "valid integer"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave out stream"),
        ({"response_format": {"type": "yaml"}}, "response_format", "type must be text, json_object"),
        ({"response_format": "json"}, "response_format", "type must be text, json_object"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs", "xml is not known"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs", "json and regex"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": 5}, "guided_json", "must be a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "list of strings"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "list of strings"),
        ({"guided_regex": ["a"]}, "guided_regex", "must be a string"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar", "guided_regex already"),
        ({"guided_regex": "a" * 65_480}, "guided_regex", "at most 65536"),
        ({"guided_regex": "("}, "response_format", "not taken: Regex parsing error at position 2"),
        ({"guided_grammar": "root ::= x"}, "response_format", 'Rule "x" is not defined'),
        ({"stop": [1]}, "stop", "list of strings"),
        ({"stop": ""}, "stop", "1 to 1024 characters"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"A": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {"9999": 1}}, None, "logit_bias has token 9999"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"echo": "yes"}, "echo", "valid boolean"),
        ({"suffix": "x"}, "suffix", "not in this build"),
        ({"best_of": 2}, "best_of", "every answer is returned"),
        ({"prompt": "x" * 1000}, "prompt", "the prompt has 1000 tokens"),
    ],
)
async def test_a_wrong_field_is_named(server, change, param, words):
    response = await server.http.post("/v1/completions", json=OK | change)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert server.engine.added == []


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid array"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "text parts only, no image_url parts",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "begin with the assistant"),
        ({"echo": True}, "echo", "not in this build"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "search"}]}, "tools.0.type", "should be 'function'"),
        ({"tools": [tool("no spaces please")]}, "tools.0.function.name", "should match pattern"),
        ({"tools": [tool("f", parameters="{}")]}, "tools.0.function.parameters", "should be an object"),
        ({"tools": [tool("f")] * 257}, "tools", "at most 256 items"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "some"}, "tool_choice", 'must be "none", "auto", "required" or'),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice", "no tool has the name 'g'"),
        (
            {"tools": [tool("f", parameters={"type": "wish"})], "tool_choice": "required"},
            "response_format",
            'Unsupported type "wish"',
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "must be JSON text",
        ),
        ({"continue_final_message": True}, "continue_final_message", "must be an assistant's"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wish"}}}},
            "response_format",
            'Unsupported type "wish"',
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"top_logprobs": 99, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "must not set self"),
    ],
)
async def test_a_wrong_chat_field_is_named(server, change, param, words):
    response = await server.http.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "no_such_field": [1]},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"temperature": None, "stop": None, "logit_bias": None, "stream_options": None, "n": 1},
    ],
)
async def test_fields_that_change_nothing_are_ignored(server, harmless):
    response = await server.http.post("/v1/chat/completions", json=CHAT | harmless)
    assert response.status_code == 200


async def test_an_unknown_model_is_404_with_the_served_name(server):
    with pytest.raises(openai.NotFoundError) as caught:
        await server.openai.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "'echo'" in caught.value.message
    assert (await server.http.get("/v1/models/gpt-9")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 1200}),
        ("/v1/completions", {"prompt": [120] * 1200}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1182}]}),
    ],
)
async def test_a_prompt_that_is_too_long_does_not_go_to_the_engine(server, path, body):
    server.engine.refusal = AdmissionError("asked", "the engine was asked", 400)
    response = await server.http.post(path, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["message"] == (
        "the prompt has 1200 tokens, and with one token to generate 1201; this server takes 1000 in all; "
        "shorten it by 201 tokens"
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_a_huge_body_is_413_whether_announced_or_not(server):
    limit = server.service.max_body_bytes

    async def chunks():
        for _ in range(limit // 1000 + 2):
            yield b"x" * 1000

    for content in (b"x" * (limit + 1), chunks()):
        response = await server.http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert str(limit) in error_of(response)["message"]


async def test_unknown_route_and_wrong_method(server):
    missing = await server.http.get("/v2/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = await server.http.get("/v1/completions")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert "POST" in error_of(wrong)["message"]


async def test_a_full_queue_is_429_with_retry_after(server):
    server.engine.refusal = AdmissionError("queue_full", "1024 requests wait already", 429, 2.2)
    for stream in (True, False):
        response = await server.http.post("/v1/completions", json=OK | {"stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert error_of(response)["type"] == "rate_limit_error"
    server.engine.refusal = None
    assert (await server.http.post("/v1/completions", json=OK)).status_code == 200


async def test_an_engine_that_fails_before_the_first_token_is_503(server, until):
    server.engine.failure = RuntimeError("the GPU fell off")
    response = await server.http.post("/v1/completions", json=OK | {"stream": True})
    assert response.status_code == 503
    assert "the GPU fell off" in error_of(response)["message"]
    again = await server.http.post("/v1/completions", json=OK)
    assert (again.status_code, error_of(again)["code"]) == (503, "engine_stopped")
    assert (await server.http.get("/health")).status_code == 503


async def test_an_engine_that_fails_mid_stream_ends_the_stream_with_an_error_event(server):
    server.engine.reply = b"x" * 500
    server.engine.limit = 3
    lines = []
    async with server.http.stream("POST", "/v1/completions", json=OK | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line and not lines:
                server.engine.failure = RuntimeError("the GPU fell off")
                server.engine.limit = None
            lines.append(line)
    sent = [line for line in lines if line]
    assert "the GPU fell off" in json.loads(sent[-1].removeprefix("data: "))["error"]["message"]
    assert "data: [DONE]" not in sent


async def test_the_openai_client_raises_on_an_error_event(server):
    server.engine.limit = 3
    stream = await server.openai.completions.create(**OK, stream=True)
    await anext(stream)
    server.engine.failure = RuntimeError("the GPU fell off")
    server.engine.limit = None
    with pytest.raises(openai.APIError, match="the GPU fell off"):
        [chunk async for chunk in stream]


async def test_refusals_are_counted_by_code(server):
    await server.http.post("/v1/completions", json=OK | {"max_tokens": -1})
    metrics = (await server.http.get("/metrics")).text
    assert 'firsttoken_requests_refused_total{code="invalid_value",model_name="echo"} 1.0' in metrics
