"""A thin OpenAI-compatible server around OpenVINO GenAI's continuous batching, for measuring it.

Runs in OpenVINO's own virtual environment and needs only the standard library beside it. One thread makes
steps; each request is a thread that waits for its tokens. Prefix caching and dynamic split-fuse are on, as
that library offers them.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai

MODEL = "openvino"
BATCHED_TOKENS = 512


class Stepper:
    """Owns the pipeline: requests come in from many threads, steps are made by one."""

    def __init__(self, model: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.tokenizer = self._pipeline.get_tokenizer()
        self._new = threading.Condition()
        self._active: dict[int, tuple[Any, queue.SimpleQueue[list[int] | None]]] = {}
        self._count = 0
        threading.Thread(target=self._steps, daemon=True).start()

    def generate(self, prompt: str, most: int, ignore_eos: bool) -> queue.SimpleQueue[list[int] | None]:
        """Token ids as they come, None at the end."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = most
        config.ignore_eos = ignore_eos
        config.do_sample = False
        tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        with self._new:
            self._count += 1
            self._active[self._count] = (self._pipeline.add_request(self._count, prompt, config), tokens)
            self._new.notify()
        return tokens

    def _steps(self) -> None:
        while True:
            with self._new:
                while not self._active:
                    self._new.wait()
                active = dict(self._active)
            self._pipeline.step()
            for number, (handle, tokens) in active.items():
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.put(list(output.generated_ids))
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    tokens.put(None)
                    with self._new:
                        del self._active[number]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    stepper: Stepper

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json({"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._json({"count": self._count(body["prompt"])})
            return
        prompt, most = body["prompt"], body["max_tokens"]
        tokens = self.stepper.generate(prompt, most, bool(body.get("ignore_eos")))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        ids: list[int] = []
        sent = ""
        while (more := tokens.get()) is not None:
            ids += more
            text = self.stepper.tokenizer.decode(ids)
            if not text.endswith("\ufffd") and len(text) > len(sent):
                self._event({"choices": [{"text": text[len(sent) :]}]})
                sent = text
        usage = {"prompt_tokens": self._count(prompt), "completion_tokens": len(ids)}
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _count(self, text: str) -> int:
        return int(self.stepper.tokenizer.encode(text).input_ids.shape[1])

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _json(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Handler.stepper = Stepper(options.model)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
