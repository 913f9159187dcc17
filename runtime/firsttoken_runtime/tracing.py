"""Spans of requests, sent over OTLP/HTTP to whoever collects traces. On only when an endpoint is given.

One span per request under the names of the GenAI semantic conventions (`gen_ai.*`, as of semantic-
conventions-genai in 2026), and below it one span for each segment of TTFT with its parts in seconds. No word
of a prompt or an answer is in them. The event loop only puts a small record into a bounded queue: spans are
made and sent in threads of their own, and when the collector is slow or gone they are dropped, not waited
for.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Tracer

log = logging.getLogger("firsttoken")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MOST_WAITING = 2048
_BATCH = 128
_FAREWELL_SECONDS = 2.0
_TRACES_PATH = "/v1/traces"

Value = str | bool | int | float | tuple[str, ...]


class TracingError(Exception):
    """Tracing was asked for and is not possible; the text says what to do."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """One segment of TTFT. Times: nanoseconds since 1970."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One request as it will be told. Times: nanoseconds since 1970. error: None when it went well."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    segments: tuple[SegmentSpan, ...] = ()
    failed: bool = False
    parent: Mapping[str, str] = field(default_factory=dict)


class _Reported:
    """An exporter that says once when the collector stops taking spans, and once when it takes them again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failing = bool(result.value)
        if failing and not self._failing:
            log.warning("tracing: the collector does not take spans; they are dropped until it does")
        elif self._failing and not failing:
            log.info("tracing: the collector takes spans again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Tracing:
    """Takes records and never waits."""

    def __init__(
        self, exporter: SpanExporter, version: str, environment: Mapping[str, str] = os.environ
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        attributes = {"service.version": version, **({} if named else {"service.name": "firsttoken"})}
        # One line for each try would fill the log; `_Reported` says what matters.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # At exit the provider would wait for a dead collector: `close` ends it, in bounded time.
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(cast("SpanExporter", _Reported(exporter)), max_export_batch_size=_BATCH)
        )
        self._waiting: queue.Queue[SpanRecord | None] = queue.Queue(_MOST_WAITING)
        self.dropped = 0
        self._thread = threading.Thread(
            target=self._run,
            args=(self._provider.get_tracer("firsttoken", version),),
            name="spans",
            daemon=True,
        )
        self._thread.start()

    def take(self, record: SpanRecord) -> None:
        """Hand over a record; it is dropped when too many wait already."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("tracing: requests come faster than spans can be made; some are left out")

    def close(self) -> None:
        """Send what is there, for at most two seconds."""
        try:
            self._waiting.put(None, timeout=_FAREWELL_SECONDS / 2)
        except queue.Full:
            return
        self._thread.join(_FAREWELL_SECONDS)

    def _run(self, tracer: Tracer) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                _emit(tracer, record)
            except Exception:
                # A span less; without this the thread would end unseen, and with it all further ones.
                log.exception("tracing: a span could not be made")
        self._provider.shutdown()


def _emit(tracer: Tracer, record: SpanRecord) -> None:
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(dict(record.parent))
    span = tracer.start_span(
        record.name, parent, SpanKind.SERVER, dict(record.attributes), start_time=record.begin_ns
    )
    inside = set_span_in_context(span, parent)
    for segment in record.segments:
        child = tracer.start_span(
            segment.name, inside, SpanKind.INTERNAL, dict(segment.attributes), start_time=segment.begin_ns
        )
        child.end(segment.end_ns)
    if record.failed:
        span.set_status(StatusCode.ERROR)
    span.end(record.end_ns)


def start_tracing(
    endpoint: str | None, version: str, environment: Mapping[str, str] = os.environ
) -> Tracing | None:
    """Tracing to this endpoint, or to the one in the environment; None when there is neither.

    endpoint: base URL of an OTLP/HTTP receiver, or the whole one that ends in /v1/traces. Headers, timeouts,
    certificates and sampling come from the standard OTEL_* variables. Raises TracingError for an endpoint
    that is given as an option and cannot be used; one from the environment, which is often set for everybody,
    is only logged then.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    from_environment = next((value for name in ENDPOINT_VARIABLES if (value := environment.get(name))), None)
    if endpoint is None and from_environment is None:
        return None
    try:
        _check(endpoint or from_environment or "")
        return Tracing(_exporter(endpoint), version, environment)
    except TracingError as error:
        if endpoint is not None:
            raise
        log.warning("no tracing to %s: %s", from_environment, error)
    return None


def _check(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TracingError(f"{endpoint!r} is no URL; write http://HOST:4318")


def _exporter(endpoint: str | None) -> SpanExporter:
    """endpoint: None leaves it to the exporter, which reads the environment."""
    if endpoint is not None:
        endpoint = endpoint.rstrip("/")
        if not endpoint.endswith(_TRACES_PATH):
            endpoint += _TRACES_PATH
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise TracingError(
            f"the Python package {error.name!r} is not installed; run: pip install 'firsttoken[runtime]'"
        ) from None
    try:
        return OTLPSpanExporter(endpoint=endpoint)
    except Exception as error:
        raise TracingError(f"{type(error).__name__}: {error}") from None
