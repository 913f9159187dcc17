"""What /metrics says: `vllm:*` names, which dashboards and endpoint pickers read, and our own `firsttoken_*`.

Per-request values are observed here as they happen; the engine's own numbers come with its heartbeat and are
turned into families at the scrape. Every segment has the TTFT buckets: other buckets could not explain it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from firsttoken_api.switches import State
from firsttoken_runtime.timing import PARTS, SEGMENTS, Account

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
PAGE_STATES = ("free", "cached", "locked", "owned")


class Metrics:
    """All metrics of one server, under one model name."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._engine = EngineCollector(model_name)
        self.registry.register(self._engine)
        ttft = self._histogram("firsttoken_ttft_seconds", "Arrival to first token written.", TTFT_BUCKETS)
        vllm_ttft = self._histogram("vllm:time_to_first_token_seconds", "The same TTFT.", TTFT_BUCKETS)
        self._ttft = (ttft, vllm_ttft)
        self._segments = TtftHistogram(
            "firsttoken_ttft_segment_seconds",
            "One segment of TTFT; the four of a request add up to its TTFT.",
            model_name,
            {(name,): {"segment": name} for name in SEGMENTS},
        )
        self._parts = TtftHistogram(
            "firsttoken_ttft_part_seconds",
            "One part of a segment of TTFT; those of a segment add up to it.",
            model_name,
            {
                (segment, part): {"segment": segment, "part": part}
                for segment, parts in PARTS.items()
                for part in parts
            },
        )
        for histogram in (self._segments, self._parts):
            self.registry.register(histogram)
        self._ack = self._histogram(
            "firsttoken_first_token_ack_seconds",
            "First token sent to acknowledged by the caller's TCP stack; no part of TTFT.",
            TTFT_BUCKETS,
        )
        self._ack_unknown = self._counter(
            "firsttoken_first_token_ack_unknown", "First tokens of streams without a known acknowledgement."
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to prefill start.", TTFT_BUCKETS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Prefill start to end.", TTFT_BUCKETS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First to last token.", TTFT_BUCKETS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "Prefill start to last token.", TTFT_BUCKETS
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", TTFT_BUCKETS
        )
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", TOKEN_BUCKETS)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token after the first.",
            TOKEN_BUCKETS,
        )
        self._prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS
        )
        self._output_length = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", LENGTH_BUCKETS
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed or reused.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "firsttoken_requests_refused",
            "Requests answered with an error.",
            ["model_name", "code"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort"):
            self._success.labels(model_name, reason)
        self._aborted = Counter(
            "firsttoken_requests_aborted",
            "Requests whose caller went, by the segment of TTFT they were in, or `answer` after it.",
            ["model_name", "segment"],
            registry=self.registry,
        )
        for segment in (*SEGMENTS, "answer"):
            self._aborted.labels(model_name, segment)

    def first_token(self, account: Account, prompt_tokens: int) -> None:
        """A request got its first token."""
        segments = account.segments
        for part, ns in account.parts().items():
            self._parts.observe(part, ns / 1e9)
        for name, seconds in segments.seconds().items():
            self._segments.observe((name,), seconds)
        for histogram in self._ttft:
            histogram.observe(segments.ttft_ns / 1e9)
        self._queue.observe(segments.queue_ns / 1e9)
        self._prefill.observe(segments.prefill_ns / 1e9)
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)

    def token(self, gap_seconds: float | None) -> None:
        """A token arrived, `gap_seconds` after the one before it (None for the first)."""
        self._generation_tokens.inc()
        if gap_seconds is not None:
            self._gap.observe(gap_seconds)

    def finished(
        self,
        reason: str,
        output_tokens: int,
        arrival_ns: int,
        prefill_start_ns: int,
        first_ns: int,
        last_ns: int,
        choices: int = 1,
    ) -> None:
        """A request that had a first token ended; the stamps are nanoseconds on the monotonic clock.

        choices: answers it had at the same time; output_tokens are of all of them.
        """
        self._success.labels(self.model_name, reason).inc()
        self._output_length.observe(output_tokens)
        self._decode.observe((last_ns - first_ns) / 1e9)
        self._inference.observe((last_ns - prefill_start_ns) / 1e9)
        self._e2e.observe((last_ns - arrival_ns) / 1e9)
        if output_tokens > choices:
            self._per_token.observe((last_ns - first_ns) / 1e9 / (output_tokens / choices - 1))

    def aborted(self, segment: str) -> None:
        """A caller went, in this segment of TTFT, or in the `answer` after it."""
        self._success.labels(self.model_name, "abort").inc()
        self._aborted.labels(self.model_name, segment).inc()

    def acknowledged(self, seconds: float | None) -> None:
        """The first token of a stream was acknowledged so long after it was sent; None: that is not known."""
        if seconds is None:
            self._ack_unknown.inc()
        else:
            self._ack.observe(seconds)

    def refused(self, code: str) -> None:
        """A request was answered with an error; `code` is one of our own words, never the caller's."""
        self._refused.labels(self.model_name, code).inc()

    def engine(self, state: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        """The engine's last heartbeat."""
        self._engine.state, self._engine.stats = state, stats

    def cache_config(self, page_tokens: int, total_pages: int) -> None:
        """Fixed when the engine is ready; endpoint pickers read it."""
        self._engine.cache_config = (page_tokens, total_pages)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self.model_name)


class TtftHistogram(Collector):
    """Histograms with the TTFT buckets under one name, for the event loop: seventeen are observed per
    request, and the client library's own take ten times as long.

    series: the labels of each, by the key that `observe` is called with.
    """

    def __init__(
        self, name: str, text: str, model_name: str, series: Mapping[tuple[str, ...], Mapping[str, str]]
    ) -> None:
        self._name, self._text, self._model_name, self._series = name, text, model_name, series
        self._counts = {key: [0] * (len(TTFT_BUCKETS) + 1) for key in series}
        self._sums = dict.fromkeys(series, 0.0)

    def observe(self, key: tuple[str, ...], seconds: float) -> None:
        self._counts[key][bisect_left(TTFT_BUCKETS, seconds)] += 1
        self._sums[key] += seconds

    def collect(self) -> Iterator[Metric]:
        names = next(iter(self._series.values()))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name", *names])
        bounds = (*map(floatToGoString, TTFT_BUCKETS), "+Inf")
        for key, labels in self._series.items():
            buckets = list(zip(bounds, accumulate(self._counts[key]), strict=True))
            family.add_metric([self._model_name, *labels.values()], buckets, self._sums[key])
        yield family


# The engine's statistics that are exported as they are: key, metric, help.
_KV_GAUGES = (
    ("bytes_per_token", "firsttoken_kv_bytes_per_token", "Bytes of KV that one token takes."),
    ("pool_bytes", "firsttoken_kv_pool_bytes", "Bytes of all KV pages."),
    ("pages", "firsttoken_kv_pages", "KV pages of the pool."),
)
_GAUGES = (
    (
        "kv_slots_unfilled",
        "firsttoken_kv_slots_unfilled",
        "Tokens that fit in pages which running requests own, and are not there.",
    ),
    ("running", "vllm:num_requests_running", "Requests in the batch."),
    ("waiting", "vllm:num_requests_waiting", "Requests waiting for the batch."),
    ("integrity_problems", "firsttoken_integrity_problems", "Pages accounted wrongly at the last recount."),
    ("kv_usage", "vllm:kv_cache_usage_perc", "Part of the KV pool in use, 0 to 1."),
    (
        "spec_acceptance_rate",
        "vllm:spec_decode_draft_acceptance_rate",
        "Part of recently proposed tokens that were accepted.",
    ),
)
_COUNTERS = (
    ("prefix_cache_queries", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("preemptions", "vllm:num_preemptions", "Requests preempted."),
    ("evictions", "firsttoken_prefix_cache_evictions", "Pages evicted from the prefix cache."),
    ("steps", "firsttoken_engine_steps", "Engine steps."),
    ("spec_drafts", "vllm:spec_decode_num_drafts", "Times that tokens were proposed for a sequence."),
    ("spec_proposed_tokens", "vllm:spec_decode_num_draft_tokens", "Tokens proposed."),
    ("spec_accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "Proposed tokens accepted."),
)


class EngineCollector(Collector):
    """Turns the last heartbeat into metric families."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.state: Mapping[str, Any] = {}
        self.stats: Mapping[str, Any] = {}
        self.cache_config: tuple[int, int] | None = None

    def collect(self) -> Iterator[Metric]:
        label = ["model_name"]
        for key, name, text in _GAUGES:
            if key in self.stats:
                gauge = GaugeMetricFamily(name, text, labels=label)
                gauge.add_metric([self.model_name], float(self.stats[key]))
                yield gauge
        for key, name, text in _COUNTERS:
            if key in self.stats:
                counter = CounterMetricFamily(name, text, labels=label)
                counter.add_metric([self.model_name], float(self.stats[key]))
                yield counter
        yield from self._state_families()
        if self.cache_config is not None:
            block_size, blocks = self.cache_config
            # As many as there are now: quantized KV makes more of the same memory.
            blocks = self.state["pages"]["total"] if self.state else blocks
            labels = ["model_name", "block_size", "num_gpu_blocks"]
            info = GaugeMetricFamily("vllm:cache_config_info", "Shape of the KV pool.", labels=labels)
            info.add_metric([self.model_name, str(block_size), str(blocks)], 1)
            yield info

    def _state_families(self) -> Iterator[Metric]:
        if not self.state:
            return
        generation = GaugeMetricFamily(
            "firsttoken_switch_generation", "Generation of the switches in force.", labels=["model_name"]
        )
        generation.add_metric([self.model_name], float(self.state["generation"]))
        yield generation
        states = GaugeMetricFamily(
            "firsttoken_switch_state",
            "1 for the state a switch is in.",
            labels=["model_name", "name", "state"],
        )
        for switch in self.state["switches"]:
            for state in State:
                value = float(switch["state"] == state.value)
                states.add_metric([self.model_name, switch["name"], state.value], value)
        yield states
        pages = GaugeMetricFamily("firsttoken_pages", "KV pages by state.", labels=["model_name", "state"])
        for state_name in PAGE_STATES:
            pages.add_metric([self.model_name, state_name], float(self.state["pages"][state_name]))
        yield pages
        for key, name, text in _KV_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self.model_name], float(self.state["kv"][key]))
            yield gauge
        memory = GaugeMetricFamily(
            "firsttoken_memory_bytes",
            "Memory of the engine process by purpose; all but resident add up to it.",
            labels=["model_name", "part"],
        )
        for part, value in self.state["memory"].items():
            memory.add_metric([self.model_name, part.removesuffix("_bytes")], float(value))
        yield memory
