"""The API process's line to the engine process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from firsttoken_api.switches import SwitchMessage
from firsttoken_runtime import ipc
from firsttoken_runtime.api.errors import ApiError
from firsttoken_runtime.engine.requests import Request

# The engine's codes that OpenAI clients know under another name, or that are about one field.
_OPENAI_CODES: dict[str, tuple[str, str | None]] = {
    "prompt_too_long": ("context_length_exceeded", "prompt"),
    "pool_too_small": ("context_length_exceeded", "prompt"),
    "empty_prompt": ("empty_prompt", "prompt"),
    "invalid_grammar": ("invalid_grammar", "response_format"),
}


LastWord = Callable[[ipc.Token | None], None]


class EngineLost(Exception):
    """The engine process ended, or gave up; the text is its line."""


class TokenStream:
    """Tokens of one request as they arrive; one reader."""

    def __init__(self) -> None:
        self._tokens: deque[ipc.Token] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, token: ipc.Token) -> None:
        self._tokens.append(token)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    @property
    def last(self) -> ipc.Token | None:
        """The token that ends the request, when it is here and was not read."""
        return self._tokens[-1] if self._tokens and self._tokens[-1].finish is not None else None

    @property
    def failed(self) -> bool:
        return self._error is not None

    async def next(self) -> list[ipc.Token]:
        """All tokens that are there, at least one. Raises ApiError when refused, EngineLost."""
        while not self._tokens:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(asyncio.Protocol):
    """Sends commands, and hands every event to whoever waits for it.

    on_phase, on_heartbeat: called in the event loop.
    """

    def __init__(
        self,
        on_phase: Callable[[ipc.Phase], None] = lambda phase: None,
        on_heartbeat: Callable[[dict[str, Any], dict[str, Any]], None] = lambda state, stats: None,
    ) -> None:
        self.on_phase = on_phase
        self.on_heartbeat = on_heartbeat
        self._frames = ipc.Frames()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[str, TokenStream] = {}
        self._leaving: dict[str, LastWord] = {}
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0
        self.vocabulary: list[bytes] | None = None  # must be there before a request with a grammar
        self._vocabulary_sent = False
        self.ready: asyncio.Future[ipc.Ready] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[ipc.Failed | None] = asyncio.get_running_loop().create_future()
        self.heard_at = time.monotonic()
        self.pulse = ipc.Pulse()  # the last one, and when it came
        self.pulse_at = self.heard_at

    async def connect(self, sock: socket.socket, start: ipc.Start | None = None) -> None:
        """Take over our end of the socket pair and say what to load."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        if start is not None:
            self._send(start)

    @property
    def active(self) -> int:
        """Requests that wait for tokens."""
        return len(self._streams)

    def add(self, request: Request) -> TokenStream:
        """Hand a request over. Raises EngineLost."""
        self._must_live()
        if request.sampling.grammar is not None and not self._vocabulary_sent:
            assert self.vocabulary is not None
            self._send(ipc.Vocabulary(self.vocabulary))
            self._vocabulary_sent = True
        # First: a request that cannot be sent must not leave a stream behind.
        self._send(ipc.Add(request))
        stream = self._streams[request.id] = TokenStream()
        return stream

    def release(self, request_id: str, *, abort: bool, last_word: LastWord | None = None) -> None:
        """Nobody reads this request any more; with `abort` the engine stops computing it.

        last_word: called once with the engine's account of it, its first token or its end, whichever comes
        first, or with None when neither will come.
        """
        stream = self._streams.pop(request_id, None)
        last = stream.last if stream is not None else None
        will_tell = False
        if stream is not None and abort and not self.ended.done():
            self._send(ipc.Abort(request_id))
            will_tell = last is None and not stream.failed
        if last_word is None:
            return
        if will_tell:
            self._leaving[request_id] = last_word
        else:
            last_word(last)

    async def set_switches(self, message: SwitchMessage, timeout_seconds: float) -> dict[str, Any]:
        """The state once the message is in force, with `taken`. Raises EngineLost, TimeoutError."""
        return await self._ask(lambda id: ipc.SetSwitches(id, message.to_json()), timeout_seconds)

    async def state(self, timeout_seconds: float) -> dict[str, Any]:
        return await self._ask(ipc.GetState, timeout_seconds)

    async def requests(self, timeout_seconds: float) -> dict[str, Any]:
        return await self._ask(ipc.GetRequests, timeout_seconds)

    async def integrity(self, timeout_seconds: float) -> dict[str, Any]:
        return await self._ask(ipc.GetIntegrity, timeout_seconds)

    async def flush_prefix_cache(self, timeout_seconds: float) -> dict[str, Any]:
        return await self._ask(ipc.FlushPrefixCache, timeout_seconds)

    def shut_down(self) -> None:
        """Ask the engine process to end."""
        if not self.ended.done():
            self._send(ipc.Shutdown())

    def fail_all(self, error: Exception) -> None:
        """End every request that is still running with this error."""
        for stream in self._streams.values():
            stream.fail(error)

    async def _ask(self, command: Callable[[int], ipc.Command], timeout_seconds: float) -> dict[str, Any]:
        self._must_live()
        self._next_id += 1
        id = self._next_id
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        self._send(command(id))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await reply
        finally:
            del self._replies[id]

    def _must_live(self) -> None:
        if self.ended.done():
            raise EngineLost(lost_line(self.ended.result()))

    def _send(self, command: ipc.Command) -> None:
        assert self._transport is not None
        self._transport.write(ipc.encode(command))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        for body in self._frames.feed(data):
            self._take(ipc.event_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None)

    def _take(self, event: ipc.Event) -> None:
        match event:
            case ipc.Tokens(tokens):
                for token in tokens:
                    if (stream := self._streams.get(token.request_id)) is not None:
                        stream.put(token)
                    elif token.request_id in self._leaving and (token.index == 0 or token.finish is not None):
                        self._leaving.pop(token.request_id)(token)
            case ipc.Reply(id, body):
                reply = self._replies.get(id)
                if reply is not None and not reply.done():
                    reply.set_result(body)
            case ipc.Refused():
                if (stream := self._streams.get(event.request_id)) is not None:
                    stream.fail(refused(event))
                elif event.request_id in self._leaving:
                    self._leaving.pop(event.request_id)(None)
            case ipc.Heartbeat(state, stats):
                self.on_heartbeat(state, stats)
            case ipc.Pulse():
                self.pulse, self.pulse_at = event, self.heard_at
            case ipc.Phase():
                self.on_phase(event)
            case ipc.Ready():
                self.ready.set_result(event)
            case ipc.Failed():
                self._end(event)

    def _end(self, failed: ipc.Failed | None) -> None:
        if self.ended.done():
            return
        self.ended.set_result(failed)
        error = EngineLost(lost_line(failed))
        self.fail_all(error)
        for last_word in self._leaving.values():
            last_word(None)
        self._leaving.clear()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        if not self.ready.done():
            self.ready.cancel()


def lost_line(failed: ipc.Failed | None) -> str:
    return failed.line if failed else "the engine process ended"


def refused(event: ipc.Refused) -> ApiError:
    """The engine's refusal as an HTTP error."""
    code, param = _OPENAI_CODES.get(event.code, (event.code, None))
    return ApiError(
        event.status, event.message, code=code, param=param, retry_after_seconds=event.retry_after_seconds
    )
