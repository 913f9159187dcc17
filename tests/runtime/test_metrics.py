"""/metrics: segments that explain the TTFT, and names that never come from callers."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from firsttoken_runtime.metrics import TTFT_BUCKETS, Metrics
from firsttoken_runtime.timing import PARTS, Account


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics, name, /, **labels):
    return samples(metrics)[(name, *sorted({"model_name": "m", **labels}.items()))]


def test_the_segment_sums_are_the_ttft_sum():
    metrics = Metrics("m")
    for scale in (1, 10, 100):
        metrics.first_token(Account(tuple(scale * 10**4 * part for part in range(12))), 7)
    parts = [
        value(metrics, "firsttoken_ttft_segment_seconds_sum", segment=segment)
        for segment in ("queue", "prefill", "decode", "transport")
    ]
    total = value(metrics, "firsttoken_ttft_seconds_sum")
    assert abs(sum(parts) - total) < 1e-12
    for segment, names in PARTS.items():
        found = value(metrics, "firsttoken_ttft_segment_seconds_sum", segment=segment)
        finer = [
            value(metrics, "firsttoken_ttft_part_seconds_sum", segment=segment, part=name) for name in names
        ]
        assert abs(sum(finer) - found) < 1e-12
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 3
    assert value(metrics, "vllm:prompt_tokens_total") == 21


def test_every_segment_and_part_has_the_ttft_buckets():
    metrics = Metrics("m")
    metrics.first_token(Account((1,) * 12), 1)
    for name in (
        "firsttoken_ttft_seconds",
        "firsttoken_ttft_segment_seconds",
        "firsttoken_ttft_part_seconds",
        "firsttoken_first_token_ack_seconds",
        "vllm:request_queue_time_seconds",
    ):
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


def test_time_per_output_token_is_that_of_one_answer_when_several_come_at_once():
    metrics = Metrics("m")
    metrics.finished("stop", 15, 0, 0, first_ns=0, last_ns=4 * 10**9, choices=3)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 1
    metrics.finished("stop", 3, 0, 0, first_ns=0, last_ns=0, choices=3)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 1


def test_acknowledgements_that_are_not_known_are_counted_not_guessed():
    metrics = Metrics("m")
    metrics.acknowledged(0.25)
    metrics.acknowledged(None)
    assert value(metrics, "firsttoken_first_token_ack_seconds_sum") == 0.25
    assert value(metrics, "firsttoken_first_token_ack_seconds_count") == 1
    assert value(metrics, "firsttoken_first_token_ack_unknown_total") == 1


def test_a_caller_who_goes_is_counted_where_it_went():
    metrics = Metrics("m")
    metrics.aborted("prefill")
    assert value(metrics, "firsttoken_requests_aborted_total", segment="prefill") == 1
    assert value(metrics, "firsttoken_requests_aborted_total", segment="answer") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_engine_numbers_come_with_the_heartbeat():
    metrics = Metrics("m")
    state = {
        "generation": 4,
        "switches": [{"name": "prefixCache", "state": "killed"}],
        "pages": {"free": 1, "cached": 2, "locked": 3, "owned": 4, "total": 10},
        "kv": {"precision": "int8", "bytes_per_token": 72, "pages": 10, "tokens": 160, "pool_bytes": 11520},
        "memory": {"weights_bytes": 500, "kv_bytes": 300, "other_bytes": 200, "resident_bytes": 1000},
    }
    metrics.engine(state, {"waiting": 2, "prefix_cache_hits": 64, "preemptions": 1})
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:prefix_cache_hits_total") == 64
    assert value(metrics, "firsttoken_switch_generation") == 4
    assert value(metrics, "firsttoken_pages", state="locked") == 3
    assert value(metrics, "firsttoken_kv_bytes_per_token") == 72
    assert value(metrics, "firsttoken_kv_pool_bytes") == 11520
    assert value(metrics, "firsttoken_memory_bytes", part="weights") == 500
    states = {
        state: value(metrics, "firsttoken_switch_state", name="prefixCache", state=state)
        for state in ("on", "off", "inactive", "rolledBack", "killed")
    }
    assert states == {"on": 0, "off": 0, "inactive": 0, "rolledBack": 0, "killed": 1}


def test_speculation_has_the_names_that_dashboards_read():
    metrics = Metrics("m")
    metrics.engine({}, {"spec_drafts": 3, "spec_proposed_tokens": 12, "spec_accepted_tokens": 9})
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 3
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 12
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 9
    assert "acceptance_rate" not in metrics.render().decode(), "nothing was proposed lately"
    metrics.engine({}, {"spec_acceptance_rate": 0.75})
    assert value(metrics, "vllm:spec_decode_draft_acceptance_rate") == 0.75
