"""The admin port: only with the token; switches go in force or are refused in words."""

from __future__ import annotations

import json

import pytest

CHUNKED_OFF = {"generation": 3, "switches": {"chunkedPrefill": {"enabled": False}}}


def states(body):
    return {item["name"]: item["state"] for item in body["switches"]}


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "open-sesame"}, {"x-firsttoken-token": "x"}],
)
async def test_without_the_token_nothing_is_told_and_nothing_changes(server, headers):
    del server.admin.headers["authorization"]
    put = await server.admin.put("/admin/v1/switches", json=CHUNKED_OFF, headers=headers)
    got = await server.admin.get("/admin/v1/state", headers=headers)
    none = await server.admin.get("/admin/v1/nothing", headers=headers)
    assert [put.status_code, got.status_code, none.status_code] == [401, 401, 401]
    assert put.json()["error"]["code"] == "unauthorized"
    assert server.engine.message.generation == 0


async def test_the_token_may_come_in_the_header_that_pod_proxies_pass_on(server):
    del server.admin.headers["authorization"]
    response = await server.admin.get("/admin/v1/state", headers={"x-firsttoken-token": "open-sesame"})
    assert response.status_code == 200


async def test_a_rotated_token_counts_at_once(server, token_file):
    token_file.write_text("new")
    assert (await server.admin.get("/admin/v1/state")).status_code == 401
    server.admin.headers["authorization"] = "Bearer new"
    assert (await server.admin.get("/admin/v1/state")).status_code == 200


async def test_an_empty_or_missing_token_file_allows_nobody(server, token_file):
    token_file.write_text("\n")
    server.admin.headers["authorization"] = "Bearer"
    assert (await server.admin.get("/admin/v1/state")).status_code == 401
    token_file.unlink()
    assert (await server.admin.get("/admin/v1/state")).status_code == 401


async def test_the_state(server):
    await server.http.post("/v1/completions", json={"prompt": "hello"})
    body = (await server.admin.get("/admin/v1/state")).json()
    assert body["generation"] == 0
    assert body["pages"] == {"free": 100, "cached": 0, "locked": 0, "owned": 0, "total": 100}
    assert (body["model"], body["ready"], body["draining"]) == ("echo", True, False)
    assert body["requests"] == {"running": 0, "waiting": 0}
    assert body["ttft"]["count"] == 1
    assert sum(body["ttft"]["segments_ms"].values()) == pytest.approx(body["ttft"]["p50_ms"])
    assert body["prompt_tokens"] == {"p50": 5, "p95": 5, "p99": 5}
    assert states(body)["chunkedPrefill"] == "on"


async def test_put_answers_with_the_state_in_force(server):
    response = await server.admin.put("/admin/v1/switches", json=CHUNKED_OFF)
    assert response.status_code == 200
    assert response.json()["generation"] == 3
    assert states(response.json())["chunkedPrefill"] == "off"
    assert server.engine.message.generation == 3


async def test_the_same_again_is_fine_an_older_or_contradicting_one_is_409(server):
    await server.admin.put("/admin/v1/switches", json=CHUNKED_OFF)
    same = await server.admin.put("/admin/v1/switches", json=CHUNKED_OFF)
    assert (same.status_code, same.json()["generation"]) == (200, 3)
    for other in ({"generation": 2, "switches": {}}, {"generation": 3, "switches": {}}):
        refused = await server.admin.put("/admin/v1/switches", json=other)
        assert (refused.status_code, refused.json()["generation"]) == (409, 3)
        assert "4 or higher" in refused.json()["error"]["message"]
    assert states((await server.admin.get("/admin/v1/state")).json())["chunkedPrefill"] == "off"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"generation": 1, "switches": {"turbo": {"enabled": "yes"}}}', "turbo: enabled"),
        (b'{"generation": 1, "switches": {"turbo": {}, "chunkedPrefill": 1}}', "chunkedPrefill: expected"),
        (b'{"generation": 1, "switches": {"turbo": {}}, "force": true}', "unknown field 'force'"),
        (b'{"generation": 1, "switches": {"chunkedPrefill": {"chunkSize": 1}}}', "chunkSize"),
        (b'{"generation": -1, "switches": {}}', "generation"),
        (b'{"generation": 1000000000000000000000, "switches": {}}', "generation must be"),
    ],
)
async def test_bad_switches_are_refused_in_words(server, content, words):
    response = await server.admin.put("/admin/v1/switches", content=content)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert server.engine.message.generation == 0


async def test_a_kill_of_a_newer_operator_is_in_force_and_what_is_new_in_it_is_named(server, caplog):
    switches = {
        "turbo": {"enabled": True, "stages": 10**30},
        "chunkedPrefill": {"enabled": True, "overlap": "\ud800"},
        "prefixCache": {"enabled": True, "cause": "killed"},
    }
    content = json.dumps({"generation": 1, "switches": switches})
    response = await server.admin.put("/admin/v1/switches", content=content)
    assert response.status_code == 200
    assert not server.engine.message.switches["prefixCache"].enabled
    found = {item["name"]: item for item in response.json()["switches"]}
    assert (found["turbo"]["state"], found["turbo"]["reason"]) == ("inactive", "not in this build")
    assert found["chunkedPrefill"]["reason"] == "ignored, not in this build: overlap"
    assert (await server.admin.get("/admin/v1/state")).json()["switches"] == response.json()["switches"]
    assert "generation 1: not in this build: turbo, chunkedPrefill.overlap" in caplog.text
    metrics = (await server.http.get("/metrics")).text
    assert 'firsttoken_switch_state{model_name="echo",name="turbo",state="inactive"} 1.0' in metrics
    again = await server.admin.put("/admin/v1/switches", content=content)
    assert again.status_code == 200, "the same is no change"


async def test_requests_integrity_flush_and_profile(server, until):
    assert (await server.admin.get("/admin/v1/requests")).json() == {
        "requests": [],
        "running": [],
        "finished": [],
    }
    assert (await server.admin.get("/admin/v1/integrity")).json()["ok"] is True
    assert (await server.admin.post("/admin/v1/prefix-cache/flush")).json()["pages"]["total"] == 100
    profile = await server.admin.post("/admin/v1/profile")
    assert (profile.status_code, profile.json()["error"]["code"]) == (501, "not_in_this_build")


async def test_an_engine_that_is_gone_is_told(server, until):
    server.engine.failure = RuntimeError("gone")
    await server.http.post("/v1/completions", json={"prompt": "x"})
    state = (await server.admin.get("/admin/v1/state")).json()
    assert (state["ready"], state["reason"]) == (False, "the engine stopped: the engine failed: gone")
    assert (await server.admin.put("/admin/v1/switches", json=CHUNKED_OFF)).status_code == 503


async def test_the_openai_port_has_no_admin_routes(server):
    response = await server.http.get("/admin/v1/state", headers={"authorization": "Bearer open-sesame"})
    assert response.status_code == 404
