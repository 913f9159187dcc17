"""An OpenAI-compatible server whose every answer and delay a test decides. A token is a word."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

MODEL = "words-1"


@dataclass
class Behaviour:
    """What the server does; `bodies` and `arrivals` (monotonic seconds) are what it saw of completions."""

    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    usage: bool = True
    tokenize: bool = True
    cached_tokens: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    server_timing: str = ""
    refused_fields: tuple[str, ...] = ()
    status: int = 200
    fail_every: int = 0  # every n-th completion is HTTP 503
    fail_after: int | None = None  # all later ones are, too
    tokens_per_chunk: int = 1
    empty_chunks: int = 0  # events without text before the first token
    break_after: int | None = None  # chunks, then the connection is cut
    error_event: bool = False
    key: str | None = None
    max_model_len: int | None = 4096
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fails(self, number: int) -> bool:
        late = self.fail_after is not None and number > self.fail_after
        return late or bool(self.fail_every and number % self.fail_every == 0)

    @property
    def prompts(self) -> list[str]:
        return [
            body["prompt"] if "prompt" in body else body["messages"][0]["content"] for body in self.bodies
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    behaviour: Behaviour

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._refused_key():
            return
        entry = {"id": MODEL, "max_model_len": self.behaviour.max_model_len}
        self._json(200, {"data": [entry]} if self.path == "/v1/models" else {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._refused_key():
            return
        if self.path == "/tokenize":
            known = self.behaviour.tokenize
            self._json(200 if known else 404, {"count": len(body["prompt"].split())} if known else {})
            return
        self._complete(body)

    def _refused_key(self) -> bool:
        wanted = self.behaviour.key
        if wanted is None or self.headers.get("authorization") == f"Bearer {wanted}":
            return False
        self._json(401, {"error": {"message": "no key"}})
        return True

    def _complete(self, body: dict[str, Any]) -> None:
        behaviour = self.behaviour
        with behaviour.lock:
            behaviour.arrivals.append(time.monotonic())
            behaviour.bodies.append(body)
            behaviour.running += 1
            behaviour.most_running = max(behaviour.most_running, behaviour.running)
            number = len(behaviour.bodies)
        try:
            unknown = [name for name in behaviour.refused_fields if name in body]
            if unknown:
                self._json(400, {"error": {"message": f"unknown field {unknown[0]}"}})
            elif behaviour.status != 200:
                self._json(behaviour.status, {"error": {"message": "no room"}})
            elif behaviour.fails(number):
                self._json(503, {"error": {"message": "every now and then"}})
            else:
                self._stream(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with behaviour.lock:
                behaviour.running -= 1

    def _stream(self, body: dict[str, Any]) -> None:
        behaviour = self.behaviour
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        if behaviour.server_timing:
            self.send_header("server-timing", behaviour.server_timing)
        self.end_headers()
        for _ in range(behaviour.empty_chunks):
            self._event({"choices": [{"text": "", "delta": {"role": "assistant"}}]})
        time.sleep(behaviour.first_seconds)
        if behaviour.error_event:
            self._event({"error": {"message": "out of memory"}})
            return
        left, chunks = body["max_tokens"], 0
        while left:
            if chunks == behaviour.break_after:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if chunks:
                time.sleep(behaviour.gap_seconds)
            tokens = min(behaviour.tokens_per_chunk, left)
            text = "word " * tokens
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            left, chunks = left - tokens, chunks + 1
        last: dict[str, Any] = {"choices": [{"text": "", "finish_reason": "length"}]}
        if behaviour.timings:
            last["timings"] = behaviour.timings
        self._event(last)
        if behaviour.usage and "stream_options" in body:
            usage: dict[str, Any] = {
                "prompt_tokens": len(prompt.split()),
                "completion_tokens": body["max_tokens"],
            }
            if behaviour.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": behaviour.cached_tokens}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class WordServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"behaviour": self.behaviour}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection cut on purpose is no news."""


@pytest.fixture
def server() -> Iterator[WordServer]:
    made = WordServer()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()
