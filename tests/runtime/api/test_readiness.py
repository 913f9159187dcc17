"""When requests are taken, and what is said when they are not."""

from __future__ import annotations

import pytest

from firsttoken_runtime.api import service as module


async def test_well(server):
    assert (await server.http.get("/health")).json() == {"status": "ok"}
    assert (await server.http.get("/ready")).json() == {"ready": True, "reason": None}


async def test_while_loading_the_process_is_alive_but_takes_nothing(server):
    server.service.ready, loaded = None, server.service.ready
    assert (await server.http.get("/health")).status_code == 200
    ready = await server.http.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "loading the model")
    refused = await server.http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    put = await server.admin.put("/admin/v1/switches", json={"generation": 1, "switches": {}})
    assert put.status_code == 503
    state = (await server.admin.get("/admin/v1/state")).json()
    assert (state["ready"], state["generation"]) == (False, 0)
    server.service.ready = loaded


async def test_while_draining_new_requests_are_sent_elsewhere(server):
    server.service.draining = True
    assert (await server.http.get("/ready")).status_code == 503
    assert (await server.http.get("/health")).status_code == 200
    refused = await server.http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "draining"


@pytest.mark.parametrize(
    ("silent_seconds", "ready", "health"),
    [
        (module.UNREADY_AFTER_SECONDS - 5, 200, 200),
        (module.UNREADY_AFTER_SECONDS + 5, 503, 200),
        (module.DEAD_AFTER_SECONDS + 5, 503, 503),
    ],
)
async def test_an_engine_that_is_silent_is_noticed(server, monkeypatch, silent_seconds, ready, health):
    heard_at = server.service.engine.heard_at
    server.service.clock = lambda: heard_at + silent_seconds
    monkeypatch.setattr(server.service.engine, "data_received", lambda data: None)
    assert (await server.http.get("/ready")).status_code == ready
    assert (await server.http.get("/health")).status_code == health


async def test_waiting_requests_that_nobody_runs_are_noticed(server):
    service = server.service
    now = service.clock()
    service.clock = lambda: now
    service.on_heartbeat(service.engine_state, {"running": 0, "waiting": 5})
    assert service.not_ready() is None
    service.clock = lambda: now + module.STUCK_AFTER_SECONDS + 1
    service.engine.heard_at = service.clock()
    assert service.not_ready() == "the engine is stuck: 5 waiting, none running for 31 s"
    service.on_heartbeat(service.engine_state, {"running": 1, "waiting": 4})
    assert service.not_ready() is None


async def test_metrics_have_the_names_that_dashboards_read(server):
    await server.http.post("/v1/completions", json={"prompt": "x"})
    text = (await server.http.get("/metrics")).text
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="echo"} 1.0',
        'vllm:num_requests_running{model_name="echo"}',
        'vllm:prompt_tokens_total{model_name="echo"} 1.0',
        'vllm:generation_tokens_total{model_name="echo"} 14.0',
        'vllm:inter_token_latency_seconds_count{model_name="echo"} 13.0',
        'vllm:cache_config_info{block_size="16",model_name="echo",num_gpu_blocks="100"} 1.0',
        'firsttoken_ttft_segment_seconds_count{model_name="echo",segment="transport"} 1.0',
        'firsttoken_switch_state{model_name="echo",name="chunkedPrefill",state="on"} 1.0',
        'firsttoken_switch_state{model_name="echo",name="chunkedPrefill",state="killed"} 0.0',
        'firsttoken_switch_generation{model_name="echo"} 0.0',
        'firsttoken_pages{model_name="echo",state="free"} 100.0',
    ):
        assert line in text
