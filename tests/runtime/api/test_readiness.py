"""When requests are taken, and what is said when they are not."""

from __future__ import annotations

import asyncio
import json

import pytest

from firsttoken_runtime import ipc
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


@pytest.fixture
def clock(server, monkeypatch):
    """Stands still, and nothing is heard any more; moves by `clock.seconds`."""

    class Clock:
        seconds = 0.0

        def __call__(self) -> float:
            return server.service.engine.heard_at + self.seconds

    clock = Clock()
    server.service.clock = clock
    monkeypatch.setattr(server.service.engine, "data_received", lambda data: None)
    return clock


async def statuses(server) -> tuple[int, int]:
    return (await server.http.get("/ready")).status_code, (await server.http.get("/health")).status_code


@pytest.mark.parametrize(
    ("silent_seconds", "status"), [(module.SILENT_SECONDS - 0.5, 200), (module.SILENT_SECONDS + 0.5, 503)]
)
async def test_an_engine_process_without_a_sign_of_life_is_noticed_within_5_s(
    server, clock, silent_seconds, status
):
    clock.seconds = silent_seconds
    assert silent_seconds + module.WATCH_SECONDS < 5
    assert await statuses(server) == (status, status)
    if status == 503:
        assert "no sign of life for 4 s" in (await server.http.get("/ready")).json()["reason"]
        refused = await server.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unresponsive")
        assert refused.headers["retry-after"] == "5"


@pytest.mark.parametrize(
    ("step_seconds", "expected_seconds", "ready", "health"),
    [
        (5.5, None, 200, 200),
        (module.LONG_STEP_SECONDS - 1, 0.1, 200, 200),
        (module.LONG_STEP_SECONDS + 1, 0.1, 503, 200),
        (module.LONG_STEP_SECONDS + 1, 40.0, 200, 200),  # a long prompt, whole: it may take ten times 40 s
        (401.0, 40.0, 503, 200),
        (module.DEAD_STEP_SECONDS + 1, None, 503, 503),
        (1201.0, 40.0, 503, 503),
    ],
)
async def test_a_step_may_be_long_but_not_for_ever(
    server, clock, step_seconds, expected_seconds, ready, health
):
    engine = server.service.engine
    engine.pulse, engine.pulse_at = ipc.Pulse(step_seconds - 0.5, expected_seconds), engine.heard_at
    clock.seconds = 0.5
    assert await statuses(server) == (ready, health)
    if ready == 503:
        reason = (await server.http.get("/ready")).json()["reason"]
        assert reason.startswith(f"the engine has been in one step for {step_seconds:.0f} s")
        assert (await server.admin.get("/admin/v1/state")).json()["reason"] == reason


async def test_waiting_requests_that_nobody_runs_are_noticed(server, clock):
    service = server.service
    service.on_heartbeat(service.engine_state, {"running": 0, "waiting": 5})
    assert service.not_ready() is None
    service.engine.heard_at += module.STUCK_AFTER_SECONDS + 1
    assert service.not_ready() == "the engine is stuck: 5 waiting, none running for 31 s"
    service.on_heartbeat(service.engine_state, {"running": 1, "waiting": 4})
    assert service.not_ready() is None


async def test_a_stall_that_the_engine_reports_makes_it_unready_at_once(server, clock):
    service = server.service
    stalled = "1 waiting, 0 running, nothing computed for 100 steps; a needs 3 pages, 0 of 9 can be had"
    service.on_heartbeat(service.engine_state, {"running": 0, "waiting": 1, "stalled": stalled})
    assert service.not_ready() == f"the engine is stuck: {stalled}"
    assert service.not_alive() is None
    service.engine.heard_at += module.STUCK_AFTER_SECONDS + 1
    assert service.not_alive() is not None, "Kubernetes restarts it"


async def test_requests_of_a_silent_engine_end_with_an_error(server, monkeypatch, caplog, until):
    """One in the middle of its stream, one that waits for its first token."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", 0.4)
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.05)
    server.engine.limit = 3
    body = {"prompt": "x", "stream": True}
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "H"
        waits = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "y"}))
        await until(lambda: server.service.engine.active == 2)
        monkeypatch.setattr(server.service.engine, "data_received", lambda data: None)
        watch = asyncio.create_task(server.service.watch())
        async with asyncio.timeout(5):
            rest = [line async for line in lines if line]
            answer = await waits
        watch.cancel()
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unresponsive"
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unresponsive")
    assert "no sign of life" in caplog.text
    assert "giving up those that run (2)" in caplog.text
    assert server.service.engine.active == 0


async def test_the_pulse_goes_on_while_a_step_runs(server, until):
    """As long as it takes; so a long step is told from a process that is stopped."""
    server.engine.expected_seconds = 7.5
    server.engine.step_seconds = module.SILENT_SECONDS + 1
    answer = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}))
    await until(lambda: (server.service.step_seconds() or 0.0) > module.SILENT_SECONDS + 0.5)
    assert server.service.engine.pulse.expected_seconds == 7.5
    assert server.service.silent_seconds() < 2.0
    assert await statuses(server) == (200, 200)
    assert (await answer).status_code == 200
    await until(lambda: server.service.step_seconds() is None)


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
