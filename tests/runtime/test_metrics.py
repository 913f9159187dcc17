"""/metrics: segments that explain the TTFT, and names that never come from callers."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from firsttoken_runtime.metrics import TTFT_BUCKETS, Metrics
from firsttoken_runtime.timing import Segments


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics, name, /, **labels):
    return samples(metrics)[(name, *sorted({"model_name": "m", **labels}.items()))]


def test_the_segment_sums_are_the_ttft_sum():
    metrics = Metrics("m")
    for scale in (1, 10, 100):
        metrics.first_token(Segments(scale * 10**6, scale * 5 * 10**6, scale * 10**5, scale * 10**4), 7)
    parts = [
        value(metrics, "firsttoken_ttft_segment_seconds_sum", segment=segment)
        for segment in ("queue", "prefill", "decode", "transport")
    ]
    total = value(metrics, "firsttoken_ttft_seconds_sum")
    assert abs(sum(parts) - total) < 1e-12
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 3
    assert value(metrics, "vllm:prompt_tokens_total") == 21


def test_every_segment_has_the_ttft_buckets():
    metrics = Metrics("m")
    metrics.first_token(Segments(1, 1, 1, 1), 1)
    for name in ("firsttoken_ttft_seconds", "vllm:request_queue_time_seconds"):
        bounds = {float(dict(key[1:])["le"]) for key in samples(metrics) if key[0] == f"{name}_bucket"}
        assert bounds == {*TTFT_BUCKETS, float("inf")}


def test_time_per_output_token_leaves_the_first_out():
    metrics = Metrics("m")
    second = 10**9
    metrics.finished(
        "length", 5, arrival_ns=0, prefill_start_ns=second, first_ns=2 * second, last_ns=4 * second
    )
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 0.5
    assert value(metrics, "vllm:request_inference_time_seconds_sum") == 3
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 4
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1


def test_engine_numbers_come_with_the_heartbeat():
    metrics = Metrics("m")
    state = {
        "generation": 4,
        "switches": [{"name": "prefixCache", "state": "killed"}],
        "pages": {"free": 1, "cached": 2, "locked": 3, "owned": 4, "total": 10},
    }
    metrics.engine(state, {"waiting": 2, "prefix_cache_hits": 64, "preemptions": 1})
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:prefix_cache_hits_total") == 64
    assert value(metrics, "firsttoken_switch_generation") == 4
    assert value(metrics, "firsttoken_pages", state="locked") == 3
    states = {
        state: value(metrics, "firsttoken_switch_state", name="prefixCache", state=state)
        for state in ("on", "off", "inactive", "rolledBack", "killed")
    }
    assert states == {"on": 0, "off": 0, "inactive": 0, "rolledBack": 0, "killed": 1}
