"""How long a caller gives its first token: the header that gateways send, and what is answered beyond it."""

from __future__ import annotations

import pytest

from firsttoken_runtime.engine.requests import AdmissionError


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "X-LLM-D-SLO-TTFT-MS"])
async def test_the_header_reaches_the_engine_in_seconds(server, header):
    answer = await server.http.post("/v1/completions", json={"prompt": "x"}, headers={header: "250.5"})
    assert answer.status_code == 200
    assert server.engine.added[-1].ttft_limit_seconds == 0.2505


async def test_without_the_header_there_is_no_limit(server):
    await server.http.post("/v1/completions", json={"prompt": "x"})
    assert server.engine.added[-1].ttft_limit_seconds is None


async def test_only_the_first_of_several_answers_can_be_refused(server):
    body = {"prompt": "x", "n": 3, "max_tokens": 2}
    answer = await server.http.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "1000"})
    assert answer.status_code == 200
    limits = [request.ttft_limit_seconds for request in server.engine.added[-3:]]
    assert sorted(limits, key=str) == [1.0, None, None]


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "inf", "1e999", ""])
async def test_what_is_no_time_is_refused_in_words(server, text):
    answer = await server.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-slo-ttft-ms": text})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-slo-ttft-ms"
    assert "write milliseconds" in error["message"]


async def test_a_limit_that_cannot_be_kept_is_429_with_the_time_to_wait(server):
    server.engine.refusal = AdmissionError("ttft_limit", "the first token would come after 3.60 s", 429, 2.6)
    answer = await server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "ttft_limit"
    assert answer.json()["error"]["type"] == "rate_limit_error"
