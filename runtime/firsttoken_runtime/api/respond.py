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
from firsttoken_runtime.api.bodies import Answer, CompletionShape
from firsttoken_runtime.api.choices import Choices
from firsttoken_runtime.api.engine_client import EngineLost
from firsttoken_runtime.api.errors import ApiError, error_response
from firsttoken_runtime.api.timeline import Timeline

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family would collect the stream otherwise.
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class GenerationResponse(Response):
    """Runs the generations of a request while the caller listens.

    continuous_usage: every event of a stream has the usage so far. on_error: told of every ApiError that is
    answered, before or after the first token.
    """

    def __init__(
        self,
        choices: Choices,
        shape: CompletionShape,
        timeline: Timeline,
        *,
        stream: bool,
        include_usage: bool,
        continuous_usage: bool = False,
        on_error: Callable[[ApiError], None],
    ) -> None:
        super().__init__()
        self._choices = choices
        self._shape = shape
        self._timeline = timeline
        self._stream = stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._on_error = on_error
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._timeline.begin()
        answer = asyncio.ensure_future(self._answer(scope, receive, send))
        answer.add_done_callback(self._settle)
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

    def _settle(self, answer: asyncio.Future[None]) -> None:
        """How it ended, where the generations cannot know; without effect where they do."""
        if not answer.cancelled() and answer.exception() is not None:
            self._timeline.failed("internal_error")
        else:
            self._timeline.aborted()

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
        choices, shape = self._choices, self._shape
        begun: set[int] = set()
        finished = 0
        last: list[dict[str, Any]] = []
        async with aclosing(choices.parts()) as parts:
            async for part in parts:
                index, piece = part.index, part.piece
                if index in begun:
                    chunk = shape.chunk(index, piece)
                else:
                    begun.add(index)
                    chunk = shape.first_chunk(index, piece, choices.scores(index))
                if part.opens is not None:
                    await self._send_opening(send, self._chunk(chunk or {}))
                elif chunk is not None:
                    last.append(self._chunk(chunk))
                if piece.finish is not None:
                    last.append(self._chunk(shape.last_chunk(index, piece.finish)))
                    finished += 1
                if last and finished < choices.count:
                    await _body(send, b"".join(map(_event, last)))
                    last = []
        if self._include_usage:
            last.append({**shape.usage_chunk(), "usage": choices.usage.to_json()})
        last[-1]["timings"] = self._timeline.timings()
        await _body(send, b"".join(map(_event, last)) + _DONE, more=False)

    async def _send_opening(self, send: Send, chunk: dict[str, Any]) -> None:
        """The first event of a prompt's first answer, and for the first of all what goes before it."""
        if self._started:
            await _body(send, _event(chunk))
            return
        timing = self._timeline.first_ready()
        event = _event(chunk)
        headers = [*_STREAM_HEADERS, (b"server-timing", timing.encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _body(send, event)
        await self._timeline.first_written()

    async def _send_whole(self, send: Send) -> None:
        choices = self._choices
        texts: list[list[str]] = [[] for _ in range(choices.count)]
        tokens: list[list[ipc.Token]] = [[] for _ in range(choices.count)]
        finishes = [""] * choices.count
        timing = ""
        async with aclosing(choices.parts()) as parts:
            async for part in parts:
                timing = timing or self._timeline.first_ready()
                texts[part.index].append(part.piece.text)
                tokens[part.index].extend(part.piece.tokens)
                finishes[part.index] = part.piece.finish or finishes[part.index]
        answers = [
            Answer("".join(texts[index]), tokens[index], finish, choices.scores(index))
            for index, finish in enumerate(finishes)
        ]
        body = self._shape.whole(answers)
        body |= {"usage": choices.usage.to_json(), "timings": self._timeline.timings()}
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
        if not self._include_usage:
            return chunk
        return {**chunk, "usage": self._choices.usage.to_json() if self._continuous_usage else None}


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
