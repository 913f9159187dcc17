"""Several answers to a request: `n`, several prompts, and what of the prompt comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from functools import partial
from typing import Any

import openai
import pytest

from firsttoken_runtime.api.choices import choice_seed
from firsttoken_runtime.engine.grammar import Grammars

PROMPT = "Say hello"
USER = [{"role": "user", "content": "Hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": PROMPT, "max_tokens": 50, **fields}


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


async def test_n_answers_have_their_own_seeds_and_the_prompt_counts_once(server):
    answer = await server.openai.completions.create(**body(n=3, seed=7))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.text for choice in answer.choices} == {"Hello, world."}
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 3 * 14
    seeds = [request.sampling.seed for request in server.engine.added]
    assert seeds[0] == 7, "the first answer is that of a request without n"
    assert len(set(seeds)) == 3
    assert seeds == [choice_seed(7, answer) for answer in range(3)]


async def test_further_answers_begin_when_the_prompt_is_computed_and_are_not_refused_for_load(server):
    await server.http.post("/v1/completions", json=body(n=3))
    first, *others = server.engine.added
    assert not first.follows
    assert all(other.follows and other.arrival_ns > first.arrival_ns for other in others)


async def test_streamed_answers_are_told_apart_by_their_index(server):
    stream = await server.openai.chat.completions.create(
        model="echo", messages=USER, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = defaultdict(str)
    roles: dict[int, str] = {}
    ends = {}
    async for chunk in stream:
        for choice in chunk.choices:
            roles.setdefault(choice.index, choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == dict.fromkeys(range(3), "Hello, world.")
    assert roles == dict.fromkeys(range(3), "assistant")
    assert ends == dict.fromkeys(range(3), "stop")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("user: Hi\nassistant: "), 42)


async def test_several_prompts_come_back_in_order(server):
    answer = await server.openai.completions.create(**body(prompt=["a", [98, 99]], n=2, echo=True))
    assert [choice.text for choice in answer.choices] == [
        f"{prompt}Hello, world." for prompt in ("a", "a", "bc", "bc")
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 56)
    metrics = (await server.http.get("/metrics")).text
    assert 'firsttoken_ttft_seconds_count{model_name="echo"} 1.0' in metrics


async def test_a_prompt_gets_the_same_seed_alone_or_beside_others(server):
    await server.openai.completions.create(**body(prompt=["a", "b"], seed=5))
    assert [request.sampling.seed for request in server.engine.added] == [5, 5]


async def test_one_refused_prompt_refuses_the_request_and_stops_the_others(server, until):
    server.engine.limit = 0
    response = await server.http.post("/v1/completions", json=body(prompt=["a", [999], "c"]))
    assert response.status_code == 400
    assert "token 999" in response.json()["error"]["message"]
    assert server.engine.added, "the first prompt was with the engine"
    await until(lambda: {request.id for request in server.engine.added} <= set(server.engine.aborted))


async def test_a_caller_that_goes_stops_all_answers(server, until):
    server.engine.reply = b"x" * 5000
    asked = body(n=4, stream=True, max_tokens=900)
    async with server.http.stream("POST", "/v1/completions", json=asked) as response:
        async for _ in response.aiter_lines():
            if len(server.engine.added) == 4:
                break
    await until(lambda: len(server.engine.aborted) == 4)
    await until(lambda: server.service.running == 0)


async def test_echo_without_tokens_gives_the_prompt_and_its_log_probabilities(server):
    answer = await server.openai.completions.create(**body(echo=True, max_tokens=0, logprobs=1))
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 0)
    assert choice.logprobs.tokens == list(PROMPT)
    assert choice.logprobs.token_logprobs == [None] + [-1.0] * 8
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {" ": -0.25, "a": -1.0}
    assert choice.logprobs.text_offset == list(range(9))


async def test_echo_with_tokens_is_what_lm_eval_reads(server):
    asked = body(echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234)
    for stream in (False, True):
        response = await server.http.post("/v1/completions", json=asked | {"stream": stream})
        sent = events(response.text) if stream else [response.json()]
        told = [event["choices"][0] for event in sent if event["choices"]]
        assert "".join(choice["text"] for choice in told) == PROMPT + "H"
        logprobs = [choice["logprobs"] for choice in told if choice["logprobs"]]
        assert [value for part in logprobs for value in part["token_logprobs"]] == [None, *[-1.0] * 8, -0.5]
        assert [value for part in logprobs for value in part["text_offset"]] == list(range(10))


async def test_prompt_logprobs_as_vllm_has_them(server):
    response = await server.http.post("/v1/completions", json=body(prompt="abc", prompt_logprobs=1))
    told = response.json()["choices"][0]["prompt_logprobs"]
    assert told == [
        None,
        {
            "32": {"logprob": -0.25, "rank": 1, "decoded_token": " "},
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        },
        {
            "32": {"logprob": -0.25, "rank": 1, "decoded_token": " "},
            "99": {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
        },
    ]
    chat = await server.http.post(
        "/v1/chat/completions", json={"messages": USER, "prompt_logprobs": 0, "n": 2}
    )
    assert len(chat.json()["prompt_logprobs"]) == len("user: Hi\nassistant: ")
    assert [request.sampling.prompt_logprobs for request in server.engine.added] == [1, 0, None]


async def test_the_chosen_token_is_among_the_alternatives(server):
    answer = await server.openai.completions.create(**body(logprobs=0, max_tokens=1))
    assert answer.choices[0].logprobs.top_logprobs == [{"H": -0.5}]


@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_comes_with_every_event_if_asked_for(server, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    response = await server.http.post("/v1/completions", json=body(stream=True, stream_options=options))
    usages = [event["usage"] for event in events(response.text)]
    assert usages[-1]["completion_tokens"] == 14
    if continuous:
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[0] < 14
    else:
        assert set(map(str, usages[:-1])) == {"None"}


async def test_the_callers_request_id_is_in_the_answer_also_when_two_use_one(server, until):
    server.engine.limit = 0
    post = partial(server.http.post, "/v1/completions", json=body(), headers={"x-request-id": "mine"})
    asked = [asyncio.create_task(post()) for _ in range(2)]
    await until(lambda: len(server.engine.added) == 2)
    assert len({request.id for request in server.engine.added}) == 2
    server.engine.limit = None
    for task in asked:
        response = await task
        assert response.json()["id"] == "cmpl-mine"
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["choices"][0]["text"] == "Hello, world."


async def test_a_stop_string_can_be_shown(server):
    asked = body(stop=["lo, w"], extra_body={"include_stop_str_in_output": True})
    answer = await server.openai.completions.create(**asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello, w", "stop")


async def test_stop_strings_count_from_min_tokens_on(server):
    server.engine.reply = b"one. two. three."
    answer = await server.openai.completions.create(**body(stop="."))
    assert answer.choices[0].text == "one"
    later = await server.openai.completions.create(**body(stop=".", extra_body={"min_tokens": 6}))
    assert later.choices[0].text == "one. two"


async def test_a_message_can_be_continued(server):
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    asked = {"messages": messages, "continue_final_message": True}
    await server.http.post("/v1/chat/completions", json=asked)
    assert bytes(server.engine.added[0].prompt) == b"user: Hi\nassistant: Well, "


async def test_an_output_format_reaches_the_engine_compiled(server):
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_grammar": 'root ::= "x"'},
        {"guided_grammar": 'start: "x"'},
    ):
        response = await server.http.post("/v1/completions", json=body(**fields))
        assert response.status_code == 200, response.text
    assert all(json.loads(request.sampling.grammar)["format"] for request in server.engine.added)


async def test_a_caller_that_goes_while_its_grammar_is_compiled_is_forgotten(server, until, monkeypatch):
    release = threading.Event()
    real = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *given: (release.wait(10), real(*given))[1])
    impatient = server.openai.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        await impatient.completions.create(**body(extra_body={"guided_regex": "gone"}))
    await until(lambda: server.service.running == 0)
    release.set()
    for fields in ({}, {"guided_regex": "here"}):
        response = await server.http.post("/v1/completions", json=body(**fields))
        assert response.status_code == 200
    assert [bool(request.sampling.grammar) for request in server.engine.added] == [False, True]
    assert "here" in server.engine.added[1].sampling.grammar


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_in_the_answer(server, stream):
    server.engine.reply = b'On it. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    asked = {"model": "echo", "messages": USER, "tools": [TOOL]}
    if stream:
        content = name = arguments = ""
        async for chunk in await server.openai.chat.completions.create(**asked, stream=True):
            [choice] = chunk.choices
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                name = call.function.name or name
                arguments += call.function.arguments
    else:
        choice = (await server.openai.chat.completions.create(**asked)).choices[0]
        [call] = choice.message.tool_calls
        content, name, arguments = choice.message.content, call.function.name, call.function.arguments
    assert (content, name, arguments) == ("On it.", "f", '{"a": 1}')
    assert choice.finish_reason == "tool_calls"


async def test_tool_choice_none_neither_tells_nor_reads_tools(server):
    server.engine.reply = b'<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = await server.openai.chat.completions.create(
        model="echo", messages=USER, tools=[TOOL], tool_choice="none"
    )
    assert answer.choices[0].message.content == server.engine.reply.decode()
    assert bytes(server.engine.added[0].prompt) == b"user: Hi\nassistant: "


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_forced_call_has_a_grammar_and_auto_has_none(server, choice):
    for given in ("auto", choice):
        await server.openai.chat.completions.create(
            model="echo", messages=USER, tools=[TOOL], tool_choice=given
        )
    free, forced = (request.sampling.grammar for request in server.engine.added)
    assert free is None
    assert json.loads(forced)["format"]["at_least_one"] is True


async def test_tokenize_says_what_a_chat_with_tools_would_be(server):
    asked = {"messages": USER, "tools": [TOOL], "return_token_strs": True}
    tokenized = (await server.http.post("/tokenize", json=asked)).json()
    await server.http.post("/v1/chat/completions", json={"messages": USER, "tools": [TOOL]})
    assert tuple(tokenized["tokens"]) == server.engine.added[0].prompt
    assert "".join(tokenized["token_strs"]) == bytes(server.engine.added[0].prompt).decode()
