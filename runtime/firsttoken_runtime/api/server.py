"""The API process: two ports, the engine's line, the switch file, and an orderly end.

On SIGTERM or SIGINT readiness goes off and new requests get 503 with `Connection: close`, so that a client
tries another replica; running ones finish, for at most the drain timeout; then exit status 0. A second signal
ends at once. Kubernetes takes a moment to tell everyone that a pod is going: requests that still come in it
are the matter of a preStop sleep, which runs before the signal; after it none need be taken any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from firsttoken_runtime.api.admin import TokenFile, build_admin_app
from firsttoken_runtime.api.app import build_app
from firsttoken_runtime.api.connection import TimedProtocol
from firsttoken_runtime.api.engine_client import EngineClient, EngineLost
from firsttoken_runtime.api.errors import ApiError
from firsttoken_runtime.api.recorder import Recorder
from firsttoken_runtime.api.service import Service, StaleGeneration
from firsttoken_runtime.metrics import Metrics
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from firsttoken_runtime.serve import (
    EXIT_INTERNAL,
    EXIT_USER_ERROR,
    Plan,
    ServeError,
    end_process,
    ended_line,
)
from firsttoken_runtime.switches import POLL_SECONDS, SwitchFile
from firsttoken_runtime.tracing import Tracing, TracingError, start_tracing

log = logging.getLogger("firsttoken")
# Responses that end in an error get so long to be written before the process ends.
_FAREWELL_SECONDS = 2.0


class HttpServer(uvicorn.Server):
    """A uvicorn server on a bound socket that leaves signals to us."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than load balancers keep idle connections: else they write into a closing one.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(_FAREWELL_SECONDS),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One run of `firsttoken serve`, from the started engine process to the exit status."""

    def __init__(
        self,
        plan: Plan,
        engine_socket: socket.socket,
        port: socket.socket,
        admin_port: socket.socket,
        process: subprocess.Popen[bytes],
        started_at: float,
    ) -> None:
        self._plan = plan
        self._engine_socket = engine_socket
        self._sockets = (port, admin_port)
        self._process = process
        self._started_at = started_at
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal, or until the engine ends. Raises ServeError in the second case."""
        plan = self._plan
        metrics = Metrics(plan.served_name)
        tracing = _tracing(plan)
        engine = EngineClient(on_phase=lambda phase: _log_phase(phase.text, phase.seconds))
        service = self._service = Service(
            plan.served_name,
            engine,
            plan.message,
            metrics,
            plan.version,
            max_body_bytes=plan.options.max_body_bytes,
            seeds=random.Random(plan.options.seed),  # noqa: S311  sampling, no secrets
            recorder=Recorder(metrics, tracing=tracing),
        )
        engine.on_heartbeat = service.on_heartbeat
        await engine.connect(self._engine_socket, plan.start())
        self._listen_to_signals()
        urls = [_url(sock) for sock in self._sockets]
        token = TokenFile(plan.admin_token_file)
        apps = (build_app(service, token), build_admin_app(service, token))
        servers = [HttpServer(app) for app in apps]
        serving = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(servers, self._sockets, strict=True)
        ]
        background: list[asyncio.Task[None]] = []
        try:
            stopped = asyncio.create_task(self._stop.wait())
            background.append(asyncio.create_task(self._load_tokenizer()))
            if await self._until_ready(background[0], stopped):
                took = time.monotonic() - self._started_at
                log.info("admin port %s, token in %s", urls[1], plan.admin_token_file)
                log.info("ready on %s (%.1f s)", urls[0], took)
                background.append(asyncio.create_task(service.watch()))
                if plan.options.switches is not None:
                    background.append(asyncio.create_task(self._watch_switches(plan.options.switches)))
                ends: list[asyncio.Future[Any]] = [engine.ended, stopped]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if engine.ended.done():
                raise await self._engine_ended()
            await self._drain()
            return 0
        finally:
            for task in (*background, stopped):
                task.cancel()
            for server in servers:
                server.should_exit = True
            await asyncio.wait(serving, timeout=_FAREWELL_SECONDS + 1)
            engine.shut_down()
            service.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    async def _until_ready(self, tokenizer: asyncio.Task[None], stopped: asyncio.Task[bool]) -> bool:
        """True when requests can come; False on a signal, or when the engine ended. Raises ServeError."""
        service, engine = self._service, self._service.engine
        waiting: set[asyncio.Future[Any]] = {tokenizer, engine.ready}
        while waiting:
            watched: list[asyncio.Future[Any]] = [*waiting, engine.ended, stopped]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if engine.ended.done() or stopped.done():
                return False
            if tokenizer.done() and isinstance(error := tokenizer.exception(), ModelError):
                raise ServeError(str(error))
            waiting = {task for task in waiting if not task.done()}
        tokenizer.result()
        service.on_ready(engine.ready.result())
        gc.collect()
        gc.freeze()
        return True

    async def _load_tokenizer(self) -> None:
        plan, began = self._plan, time.monotonic()

        def load() -> Tokenizer:
            tokenizer = load_tokenizer(plan.model, plan.chat_template)
            from firsttoken_runtime.model.config import read_config

            check_vocabulary(tokenizer, read_config(plan.model))
            return tokenizer

        self._service.tokenizer = await self._service.in_thread(load)
        _log_phase("tokenizer", time.monotonic() - began)

    async def _engine_ended(self) -> ServeError:
        """Let running responses say it, then the error to end with."""
        failed = self._service.engine.ended.result()
        await self._until_idle(_FAREWELL_SECONDS)
        if failed is not None:
            return ServeError(failed.line, EXIT_USER_ERROR if failed.user_error else EXIT_INTERNAL)
        status = await asyncio.to_thread(end_process, self._process, 5.0)
        return ServeError(ended_line(status), EXIT_INTERNAL)

    async def _drain(self) -> None:
        service, timeout_seconds = self._service, self._plan.options.drain_timeout_seconds
        service.draining = True
        if service.running:
            log.info("draining: %d running, for at most %g s", service.running, timeout_seconds)
        await self._until_idle(timeout_seconds)
        if service.running:
            log.warning("draining: %d did not finish in time", service.running)
            error = ApiError(
                503, "the server shut down before this was finished", code="draining", close=True
            )
            service.engine.fail_all(error)
            await self._until_idle(_FAREWELL_SECONDS)
        log.info("stopped")

    async def _until_idle(self, timeout_seconds: float) -> None:
        """Until no request is being answered, a second signal comes, or the time is over."""
        events = [asyncio.create_task(event.wait()) for event in (self._service.idle, self._stop_now)]
        await asyncio.wait(events, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    async def _watch_switches(self, path: Path) -> None:
        file = SwitchFile(path)
        while True:
            found = await asyncio.to_thread(file.poll)
            if found.problem is not None:
                log.error("%s", found.problem)
            if found.message is not None:
                try:
                    await self._service.set_switches(found.message)
                except StaleGeneration as stale:
                    log.warning("switches file %s: %s; not taken", path, stale)
                except (ApiError, EngineLost) as error:
                    log.error("switches file %s: %s; trying again", path, error)
                    file.forget()
                except Exception:
                    # Without this the watch would end unseen, and with it the way to switch that is left when
                    # the operator is gone.
                    log.exception("switches file %s: not taken; the next change is looked at again", path)
            await asyncio.sleep(POLL_SECONDS)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        # At once, not when the task gets to run: no request may slip in between.
        self._service.draining = True
        self._stop.set()


def _tracing(plan: Plan) -> Tracing | None:
    try:
        return start_tracing(plan.options.otlp_endpoint, plan.version)
    except TracingError as error:
        raise ServeError(f"--otlp-endpoint: {error}") from None


def _log_phase(text: str, seconds: float) -> None:
    log.info("  %-66s %6.2f s", text, seconds)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
