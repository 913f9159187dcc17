"""Traces: one span per request under the GenAI names, sent to a real OTLP receiver, in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from firsttoken_api.verification import HEADER, verification_mark
from firsttoken_runtime.api.server import _tracing
from firsttoken_runtime.serve import ServeError
from firsttoken_runtime.timing import PARTS
from firsttoken_runtime.tracing import SpanRecord, Tracing, TracingError, _Reported, start_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A receiver of OTLP over HTTP, as small as one can be. `holding` lets exporters wait for an answer."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.paths: list[str] = []
        self.holding = threading.Event()
        self.holding.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.holding.wait(20)
                collector.payloads.append(data)
                collector.paths.append(self.path)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Any]:
        messages = [ExportTraceServiceRequest.FromString(payload) for payload in self.payloads]
        return [
            span
            for message in messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resources(self) -> list[dict[str, Any]]:
        messages = [ExportTraceServiceRequest.FromString(payload) for payload in self.payloads]
        return [attributes(entry.resource) for message in messages for entry in message.resource_spans]


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    thread = threading.Thread(target=running.server.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.holding.set()
    running.server.shutdown()
    running.server.server_close()
    thread.join()


@contextlib.contextmanager
def tracing(server: Any, url: str) -> Iterator[Tracing]:
    started = start_tracing(url, "1.2.3", {})
    assert started is not None
    server.service.records.tracing = started
    try:
        yield started
    finally:
        started.close()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "confidential", "max_tokens": 50, **fields}


async def sent(
    server: Any, collector: Collector, *, headers: Any = None, **fields: Any
) -> tuple[Any, dict[str, Any]]:
    """The request's span and those below it, after one request."""
    with tracing(server, collector.url):
        await server.http.post("/v1/completions", json=body(**fields), headers=headers)
    spans = collector.spans()
    (top,) = (span for span in spans if span.kind == span.SPAN_KIND_SERVER)
    return top, {span.name: span for span in spans if span is not top}


async def test_a_request_is_told_under_the_genai_names(server, collector):
    server.engine.cached_tokens = 7
    span, _ = await sent(server, collector, stream=True, temperature=0.5, seed=4, top_p=0.9)
    told = attributes(span)
    assert span.name == "text_completion echo"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "firsttoken",
        "gen_ai.request.model": "echo",
        "gen_ai.response.model": "echo",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 4,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len("confidential"),
        "gen_ai.usage.output_tokens": len("Hello, world.") + 1,
        "gen_ai.usage.cache_read.input_tokens": 7,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told["gen_ai.response.id"].startswith("cmpl-")
    assert told["gen_ai.response.time_to_first_chunk"] == told["firsttoken.ttft"] > 0
    assert "error.type" not in told
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 60
    assert collector.resources()[0]["service.name"] == "firsttoken"
    assert collector.resources()[0]["service.version"] == "1.2.3"
    assert set(collector.paths) == {"/v1/traces"}


async def test_the_segments_lie_end_to_end_below_it_and_their_parts_add_up(server, collector):
    span, below = await sent(server, collector, stream=True)
    assert list(below) == list(PARTS)
    at = span.start_time_unix_nano
    for segment, names in PARTS.items():
        child = below[segment]
        assert child.parent_span_id == span.span_id
        assert child.start_time_unix_nano == at
        at = child.end_time_unix_nano
        parts = attributes(child)
        assert set(parts) == {f"firsttoken.{segment}.{name}" for name in names}
        assert round(sum(parts.values()) * 1e9) == at - child.start_time_unix_nano
    assert round(attributes(span)["firsttoken.ttft"] * 1e9) == at - span.start_time_unix_nano
    assert at <= span.end_time_unix_nano


async def test_chat_is_told_as_chat(server, collector):
    with tracing(server, collector.url):
        await server.openai.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "confidential"}], n=2
        )
    (span,) = (span for span in collector.spans() if span.kind == span.SPAN_KIND_SERVER)
    assert span.name == "chat echo"
    assert attributes(span)["gen_ai.request.choice.count"] == 2
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["stop", "stop"]


async def test_an_incoming_trace_is_continued_and_its_sampling_kept(server, collector):
    span, _ = await sent(server, collector, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    with tracing(server, collector.url):
        unsampled = {"traceparent": f"00-{'1' * 32}-{PARENT}-00"}
        await server.http.post("/v1/completions", json=body(), headers=unsampled)
        await server.http.post("/v1/completions", json=body(), headers={"traceparent": "nonsense"})
    traces = {span.trace_id.hex() for span in collector.spans()}
    assert TRACE in traces
    assert "1" * 32 not in traces
    assert len(traces) == 2, "one with a header that cannot be read begins a trace of its own"


async def test_no_word_of_a_prompt_or_an_answer_leaves(server, collector):
    await sent(server, collector, stream=True, stop=["secret"], user="confidential-user")
    data = b"".join(collector.payloads)
    for word in (b"confidential", b"Hello", b"world", b"secret"):
        assert word not in data


async def test_failures_and_aborts_are_told_as_such(server, collector, until):
    with tracing(server, collector.url):
        server.engine.limit = 0
        asking = asyncio.create_task(server.http.post("/v1/completions", json=body()))
        await until(lambda: server.engine.added)
        asking.cancel()
        await until(lambda: server.engine.aborted)
        server.engine.limit = None
        server.engine.failure = RuntimeError("gone")
        await server.http.post("/v1/completions", json=body())
    told = [span for span in collector.spans() if span.kind == span.SPAN_KIND_SERVER]
    errors = {attributes(span)["error.type"]: span.status.code for span in told}
    assert errors == {"aborted": 0, "engine_stopped": 2}


async def test_a_verification_leaves_no_trace(server, collector):
    with tracing(server, collector.url):
        mark = {HEADER: verification_mark("open-sesame")}
        response = await server.http.post("/v1/completions", json=body(), headers=mark)
    assert response.status_code == 200
    assert collector.payloads == []


async def took(server: Any, requests: int) -> float:
    began = time.perf_counter()
    for _ in range(requests):
        assert (await server.http.post("/v1/completions", json=body())).status_code == 200
    return time.perf_counter() - began


async def test_a_collector_that_hangs_or_is_gone_slows_no_request_and_no_end(server, collector):
    without = await took(server, 40)
    collector.holding.clear()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for url in (collector.url, f"http://127.0.0.1:{unused.getsockname()[1]}"):
            with tracing(server, url):
                with_it = await took(server, 40)
                closing = time.perf_counter()
            assert time.perf_counter() - closing < 5
            assert with_it < 2 * without + 1
    server.service.records.tracing = None


def test_more_than_can_wait_is_dropped_and_counted(collector):
    started = start_tracing(collector.url, "1", {})
    assert started is not None
    record = SpanRecord("x", 1, 2, {})
    began = time.perf_counter()
    for _ in range(100_000):
        started.take(record)
    assert time.perf_counter() - began < 10
    assert started.dropped > 0
    started.close()


def test_it_is_off_unless_somebody_asks_for_it():
    assert start_tracing(None, "1", {}) is None
    assert start_tracing(None, "1", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    disabled = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert start_tracing("http://127.0.0.1:1", "1", disabled) is None


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://x", "http://", "grpc://127.0.0.1:4317"])
def test_an_endpoint_that_is_none_is_refused_in_words(url):
    with pytest.raises(TracingError, match="http://HOST:4318"):
        start_tracing(url, "1", {})


def test_serve_ends_with_one_line_when_the_endpoint_is_none():
    plan = SimpleNamespace(options=SimpleNamespace(otlp_endpoint="nowhere"), version="1")
    with pytest.raises(ServeError, match="--otlp-endpoint: 'nowhere' is no URL"):
        _tracing(plan)


def test_an_endpoint_from_the_environment_that_is_none_keeps_nobody_from_serving(caplog):
    assert start_tracing(None, "1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "nowhere"}) is None
    assert "no tracing to nowhere" in caplog.text


def test_a_collector_that_comes_and_goes_is_told_once_each_time(caplog):
    caplog.set_level("INFO", logger="firsttoken")
    results = iter((1, 1, 0, 0))
    exporter = SimpleNamespace(export=lambda spans: SimpleNamespace(value=next(results)))
    reported = _Reported(exporter)
    for _ in range(4):
        reported.export([])
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "tracing: the collector does not take spans",
        "tracing: the collector takes spans again",
    ]
