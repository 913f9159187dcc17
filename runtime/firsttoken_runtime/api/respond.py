"""The response to a completion: one JSON body, or server-sent events.

Nothing is sent before the first token is there, not even the status line: so a refusal is a proper 4xx or
5xx, and the `Server-Timing` header can carry queue, prefill and decode. When the caller goes, the engine is
told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firsttoken_runtime import ipc
from firsttoken_runtime.api.bodies import CompletionShape
from firsttoken_runtime.api.engine_client import EngineLost
from firsttoken_runtime.api.errors import ApiError, error_response
from firsttoken_runtime.api.generation import Generation, Piece

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family would collect the stream otherwise.
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class GenerationResponse(Response):
    """Runs a generation while the caller listens.

    on_error: told of every ApiError that is answered, before or after the first token.
    """

    def __init__(
        self,
        generation: Generation,
        shape: CompletionShape,
        *,
        stream: bool,
        include_usage: bool,
        on_error: Callable[[ApiError], None],
    ) -> None:
        super().__init__()
        self._generation = generation
        self._shape = shape
        self._stream = stream
        self._include_usage = include_usage
        self._on_error = on_error
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also when we are cancelled ourselves: the generator's end releases the request in the engine.
            gone.cancel()
            if not answer.done():
                answer.cancel()
        await asyncio.wait({answer})
        if not answer.cancelled() and (error := answer.exception()) is not None:
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._stream:
                await self._send_events(send)
            else:
                await self._send_whole(send)
        except (ApiError, EngineLost) as caught:
            error = caught if isinstance(caught, ApiError) else engine_lost(caught)
            self._on_error(error)
            if self._started:
                await _body(send, _event(error.body()), more=False)
            else:
                await error_response(error)(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        generation, shape = self._generation, self._shape
        finish = ""
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if not self._started:
                    await self._send_first(send, piece)
                elif piece.text or (piece.tokens and shape.logprobs):
                    await _body(send, _event(self._chunk(shape.chunk(piece))))
                finish = piece.finish or finish
        last = [self._chunk(shape.last_chunk(finish))]
        if self._include_usage:
            last.append({**shape.usage_chunk(), "usage": generation.usage.to_json()})
        last[-1]["timings"] = generation.timings()
        await _body(send, b"".join(map(_event, last)) + _DONE, more=False)

    async def _send_first(self, send: Send, piece: Piece) -> None:
        generation = self._generation
        handed_over_ns = generation.clock()
        timing = generation.handed_over(handed_over_ns, handed_over_ns).server_timing()
        event = _event(self._chunk(self._shape.first_chunk(piece)))
        headers = [*_STREAM_HEADERS, (b"server-timing", timing.encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _body(send, event)
        generation.first_written(handed_over_ns, generation.clock())

    async def _send_whole(self, send: Send) -> None:
        generation = self._generation
        texts: list[str] = []
        tokens: list[ipc.Token] = []
        finish = timing = ""
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if not timing:
                    now = generation.clock()
                    timing = generation.first_written(now, now).server_timing()
                texts.append(piece.text)
                tokens.extend(piece.tokens)
                finish = piece.finish or finish
        body = self._shape.whole("".join(texts), tokens, finish)
        body |= {"usage": generation.usage.to_json(), "timings": generation.timings()}
        data = msgspec.json.encode(body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"server-timing", timing.encode()),
        ]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _body(send, data, more=False)

    def _chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {**chunk, "usage": None} if self._include_usage else chunk


def engine_lost(error: EngineLost) -> ApiError:
    """HTTP 503: the server is about to restart, another try may find it well."""
    return ApiError(
        503, f"the engine stopped: {error}", code="engine_stopped", retry_after_seconds=5, close=True
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
