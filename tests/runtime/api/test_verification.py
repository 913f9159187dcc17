"""The operator's verification is a real generation that counts as nobody's TTFT; nobody else can hide so."""

from __future__ import annotations

import pytest

from firsttoken_api.verification import HEADER, verification_mark

MARK = verification_mark("open-sesame")


async def ttft_counts(server):
    """Requests in the state's window and in each histogram of requests."""
    state = (await server.admin.get("/admin/v1/state")).json()
    lines = (await server.http.get("/metrics")).text.splitlines()
    names = (
        "firsttoken_ttft_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
    )
    counts = [float(line.split()[-1]) for name in names for line in lines if line.startswith(f"{name}_count")]
    return [state["ttft"]["count"], *counts]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_verification_generates_and_is_in_no_histogram(server, stream):
    body = {"prompt": "Hello", "max_tokens": 1, "stream": stream}
    response = await server.http.post("/v1/completions", json=body, headers={HEADER: MARK})
    assert response.status_code == 200
    assert '"text":"H"' in response.text
    assert len(server.engine.added) == 1, "the engine really computed it"
    assert await ttft_counts(server) == [0, 0, 0, 0]
    assert (await server.admin.get("/admin/v1/state")).json()["prompt_tokens"]["p50"] is None


@pytest.mark.parametrize("mark", ["", "true", "open-sesame", verification_mark("wrong"), MARK.upper()])
async def test_without_the_admin_token_nobody_can_hide_a_request(server, mark):
    await server.http.post("/v1/completions", json={"prompt": "Hello"}, headers={HEADER: mark})
    assert await ttft_counts(server) == [1, 1, 1, 1]


async def test_the_mark_opens_no_admin_port(server):
    response = await server.admin.get("/admin/v1/state", headers={"authorization": f"Bearer {MARK}"})
    assert response.status_code == 401


async def test_without_a_token_every_request_counts(server, token_file):
    token_file.write_text("\n")
    mark = verification_mark("")
    await server.http.post("/v1/completions", json={"prompt": "Hello"}, headers={HEADER: mark})
    token_file.write_text("open-sesame")
    assert await ttft_counts(server) == [1, 1, 1, 1]
