"""A server in this process: the real applications and the real engine loop around a scripted engine.

The scripted engine says what `reply` says, one byte per token and one token per step, so every test knows the
answer; the tokenizer has one token per byte and one end-of-text token.
"""

from __future__ import annotations

import asyncio
import codecs
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from firsttoken_api.switches import SwitchMessage
from firsttoken_runtime import ipc
from firsttoken_runtime.api.admin import TokenFile, build_admin_app
from firsttoken_runtime.api.app import build_app
from firsttoken_runtime.api.engine_client import EngineClient
from firsttoken_runtime.api.server import HttpServer
from firsttoken_runtime.api.service import Service
from firsttoken_runtime.engine.admission import Limits, check
from firsttoken_runtime.engine.grammar import Constraint, Grammars
from firsttoken_runtime.engine.process import EngineLoop
from firsttoken_runtime.engine.requests import (
    NO_TOKEN,
    NOT_GENERATED,
    AdmissionError,
    Request,
    TokenEvent,
    TokenScore,
)
from firsttoken_runtime.metrics import Metrics
from firsttoken_runtime.model.errors import ChatTemplateError
from firsttoken_runtime.serve import bind
from firsttoken_runtime.switches import default_message

EOS = 256
MODEL = "echo"
LIMITS = Limits(max_model_len=1000, total_pages=100, page_tokens=16, vocab_size=257)
ADMIN_TOKEN = "open-sesame"


class ByteTokenizer:
    """One token per UTF-8 byte; the chat template is `role: content` lines, and knows no tools."""

    vocab_size = 257
    chat_template = "{{ messages }}"
    special_ids = frozenset({EOS})

    def token_id(self, text: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(id for id in ids if id != EOS).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return b"" if id == EOS else bytes([id])

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise ChatTemplateError("the conversation must not begin with the assistant")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def detokenizer(
        self, skip_special_tokens: bool = True, kept: Collection[int] = frozenset()
    ) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        return "" if id == EOS else self._decoder.decode(bytes([id]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ScriptedEngine:
    """Says `reply`, then end of text. `hold()` keeps steps back, as a long step would.

    Lives in the loop's thread; a test only sets attributes and reads them.
    """

    def __init__(self) -> None:
        self.reply = b"Hello, world."
        self.refusal: AdmissionError | None = None
        self.failure: Exception | None = None
        self.message = default_message()
        self.cached_tokens = 0
        self.aborted: list[str] = []
        self.added: list[Request] = []
        self.limit: int | None = None  # steps that may still be made
        self.expected_seconds: float | None = None
        self.step_seconds = 0.0
        self._most: dict[str, int] = {}
        self._running: dict[str, tuple[Request, list[int], int]] = {}

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._most[request.id] = check(request, LIMITS)
        self.added.append(request)
        self._running[request.id] = (request, [*self.reply, EOS], 0)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self._running.pop(request_id, None) is not None

    def set_switches(self, message: SwitchMessage) -> bool:
        if message.generation < self.message.generation:
            return False
        self.message = message
        return True

    def has_work(self) -> bool:
        return bool(self._running) and self.limit != 0

    def step(self) -> list[TokenEvent]:
        if self.failure is not None:
            raise self.failure
        if self.limit is not None:
            self.limit -= 1
        time.sleep(self.step_seconds)
        now = time.monotonic_ns()
        events = []
        for id, (request, tokens, index) in list(self._running.items()):
            token = tokens[index] if index < len(tokens) else ord("x")
            finish = "stop" if token == EOS and not request.sampling.ignore_eos else None
            if finish is None and index + 1 == self._most[id]:
                finish = "length"
            if index == 0 and request.sampling.prompt_logprobs is not None:
                scores = tuple(TokenScore(-1.0, 2, ((32, -0.25),)) for _ in request.prompt[1:])
                events.append(TokenEvent(id, NO_TOKEN, NOT_GENERATED, prompt=scores))
            first = (
                {"prefill_start_ns": now, "prefill_end_ns": now + 1000, "sampled_ns": now + 2000}
                if index == 0
                else {}
            )
            top = ((token, -0.5), (0, float("-inf"))) if request.sampling.logprobs else ()
            cached = self.cached_tokens if index == 0 else None
            events.append(TokenEvent(id, token, index, -0.5, top, finish, cached_tokens=cached, **first))
            self._running[id] = (request, tokens, index + 1)
            if finish is not None:
                del self._running[id]
        return events

    def switch_states(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "state": "on" if setting.enabled else "off", "reason": None, "parameters": {}}
            for name, setting in self.message.switches.items()
        ]

    def pages(self) -> dict[str, int]:
        owned = len(self._running)
        return {"free": 100 - owned, "cached": 0, "locked": 0, "owned": owned, "total": 100}

    def kv(self) -> dict[str, Any]:
        pool = {"bytes_per_token": 64, "pages": 100, "tokens": 1600, "pool_bytes": 102_400}
        return {"precision": "model", **pool}

    def integrity(self) -> dict[str, Any]:
        return {"ok": True, "problems": [], "pages": self.pages()}

    def requests(self) -> list[dict[str, Any]]:
        return [{"id": id} for id in self._running]

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._running), "waiting": 0, "prefix_cache_hits": 0, "steps": 1}

    def flush_prefix_cache(self) -> None:
        pass

    def expected_step_seconds(self) -> float | None:
        return self.expected_seconds

    def stalled(self) -> str | None:
        return None


class Running:
    """A server that answers, and what a test may want to touch."""

    def __init__(self, service: Service, engine: ScriptedEngine, url: str, admin_url: str) -> None:
        self.service = service
        self.engine = engine
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=10)
        self.admin = httpx.AsyncClient(
            base_url=admin_url, timeout=10, headers={"authorization": f"Bearer {ADMIN_TOKEN}"}
        )
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)

    async def close(self) -> None:
        for client in (self.http, self.admin):
            await client.aclose()
        await self.openai.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something another thread does. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(ADMIN_TOKEN + "\n")
    return path


@pytest.fixture
def scripted() -> ScriptedEngine:
    """The engine of `server`; a module may put another in its place."""
    return ScriptedEngine()


@pytest_asyncio.fixture
async def server(token_file: Path, scripted: ScriptedEngine) -> AsyncIterator[Running]:
    ours, theirs = socket.socketpair()
    client = EngineClient()
    service = Service(MODEL, client, scripted.message, Metrics(MODEL), "0.0.0", max_body_bytes=1 << 16)
    client.on_heartbeat = service.on_heartbeat
    await client.connect(ours)

    def engine_process() -> None:
        channel = ipc.Channel(theirs)
        loop = EngineLoop(channel, scripted, scripted.message, grammars=Grammars(257, [EOS]))
        pool = {"max_model_len": 1000, "page_tokens": 16, "total_pages": 100, "kv_bytes": 1 << 20}
        channel.send(
            ipc.Ready(
                **pool,
                device="cpu",
                dtype="float32",
                architecture="bytes",
                state=loop.state(),
                stats=scripted.stats(),
            )
        )
        try:
            loop.run()
        except Exception as error:
            channel.send(ipc.Failed(f"the engine failed: {error}", False))
        theirs.close()

    thread = threading.Thread(target=engine_process)
    thread.start()
    service.tokenizer = ByteTokenizer()  # type: ignore[assignment]
    service.on_ready(await client.ready)
    sockets = [bind("127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    token = TokenFile(token_file)
    apps = [build_app(service, token), build_admin_app(service, token)]
    servers = [HttpServer(app) for app in apps]
    tasks = [
        asyncio.create_task(server.serve(sockets=[sock]))
        for server, sock in zip(servers, sockets, strict=True)
    ]
    running = Running(service, scripted, *urls)
    try:
        yield running
    finally:
        await running.close()
        scripted.limit = None
        # The orderly end takes uvicorn some tenths of a second; `test_serve_real.py` looks at that one.
        for task, http_server in zip(tasks, servers, strict=True):
            task.cancel()
            for listener in http_server.servers:
                listener.close()
        await asyncio.wait(tasks)
        client.shut_down()
        await until(client.ended.done)
        thread.join(5)
        service.close()
