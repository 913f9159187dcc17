"""Talking to a pod over HTTP, against a small pod in this process."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from firsttoken_api.switches import SwitchMessage, resolve
from firsttoken_api.verification import verification_mark
from firsttoken_operator import runtime_client
from firsttoken_operator.runtime_client import HttpRuntimeClient, PodAddress, PodError, PodErrorKind

MESSAGE = SwitchMessage(3, resolve({}, {}, frozenset()))
STATE = {"generation": 3, "switches": [{"name": "prefixCache", "state": "on", "reason": None}], "ready": True}


class Pod:
    """What the pod was asked, and what it answers to everything."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None, object]] = []
        self.headers: dict[str, str] = {}
        self.answer: tuple[int, str] = (200, "{}")
        self.in_pieces = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.headers = dict(request.headers)
        self.asked.append((request.method, request.path, request.headers.get("Authorization"), body))
        status, text = self.answer
        if self.in_pieces:
            response = web.StreamResponse(status=status)
            await response.prepare(request)
            for start in range(0, len(text), 20):
                await response.write(text[start : start + 20].encode())
                await asyncio.sleep(0.001)
            return response
        return web.Response(status=status, text=text)


@pytest.fixture
async def pod():
    found = Pod()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    found.address = PodAddress("127.0.0.1", port, port)
    yield found
    await runner.cleanup()


@pytest.fixture
async def client():
    found = HttpRuntimeClient()
    yield found
    await found.aclose()


async def test_a_push_carries_the_token_and_the_message_and_reads_the_state(pod, client):
    pod.answer = (200, json.dumps(STATE))
    state = await client.put_switches(pod.address, "secret", MESSAGE)
    assert (state.generation, state.states()["prefixCache"].state) == (3, "on")
    assert pod.asked == [("PUT", "/admin/v1/switches", "Bearer secret", MESSAGE.to_json())]


async def test_an_answer_that_arrives_in_pieces_is_read_to_its_end(pod, client):
    pod.answer, pod.in_pieces = (200, json.dumps(STATE)), True
    assert (await client.state(pod.address, "secret")).generation == 3


async def test_an_endless_answer_is_cut(pod, client, monkeypatch):
    monkeypatch.setattr(runtime_client, "ANSWER_BYTES", 50)
    pod.answer, pod.in_pieces = (200, json.dumps(STATE)), True
    with pytest.raises(PodError, match="not a state"):
        await client.state(pod.address, "secret")


async def test_a_verification_is_one_real_token_marked_and_without_the_token(pod, client):
    pod.answer = (200, '{"choices": [{"text": " there"}]}')
    await client.generate_one(pod.address, "secret", "smollm")
    ((method, path, authorization, body),) = pod.asked
    assert (method, path, authorization) == ("POST", "/v1/completions", None)
    assert pod.headers["x-firsttoken-verification"] == verification_mark("secret")
    assert "secret" not in str(pod.headers)
    assert body["max_tokens"] == 1
    assert body["model"] == "smollm"


@pytest.mark.parametrize(
    ("status", "text", "kind", "words"),
    [
        (401, "{}", PodErrorKind.UNAUTHORIZED, "admin token"),
        (409, '{"generation": 9, "error": {"message": "older than 9"}}', PodErrorKind.AHEAD, "older than 9"),
        (500, "boom", PodErrorKind.REFUSED, "HTTP 500"),
        (503, '{"error": {"message": "loading"}}', PodErrorKind.UNREACHABLE, "loading"),
        (400, '{"error": {"message": "bad switch"}}', PodErrorKind.REFUSED, "bad switch"),
        (200, "not json", PodErrorKind.REFUSED, "not a state"),
        (200, '{"generation": "x"}', PodErrorKind.REFUSED, "not a state"),
    ],
)
async def test_a_pod_that_says_no_is_quoted(pod, client, status, text, kind, words):
    pod.answer = (status, text)
    with pytest.raises(PodError, match=words) as caught:
        await client.put_switches(pod.address, "secret", MESSAGE)
    assert caught.value.kind is kind
    assert caught.value.generation == (9 if status == 409 else None)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"choices": []}', '{"choices": [{}]}', '{"choices": {"0": 1}}']
)
async def test_an_answer_without_a_completion_is_no_generation(pod, client, text):
    pod.answer = (200, text)
    with pytest.raises(PodError):
        await client.generate_one(pod.address, "secret", "smollm")


async def test_nobody_there_is_unreachable(client):
    with pytest.raises(PodError, match="connection failed") as caught:
        await client.state(PodAddress("127.0.0.1", 1, 1), "secret")
    assert caught.value.kind is PodErrorKind.UNREACHABLE


def test_an_ipv6_pod_is_addressed_in_brackets():
    assert PodAddress("fd00::1", 8000, 8001).url(8001, "/x") == "http://[fd00::1]:8001/x"
