"""The outermost ASGI layer: the arrival stamp, the request id, and how many requests are being answered."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firsttoken_runtime.api.connection import RECEIVED

ARRIVAL = "firsttoken.arrival_ns"
REQUEST_ID = "firsttoken.request_id"
_REQUEST_ID_HEADER = b"x-request-id"
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class Entry:
    """Stamps a request before anything else looks at it.

    The id of the caller's `x-request-id` goes back in the answer; without one, or with one that is not plain
    text, a new one is made.
    on_count: called with +1 and -1 as requests come and go.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_count: Callable[[int], None] = lambda change: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._app = app
        self._on_count = on_count
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The first bytes came before: the head had to be whole, and the loop to get here.
        scope[ARRIVAL] = scope.get(RECEIVED) or self._clock()
        request_id = _given_id(scope) or uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID_HEADER, request_id)]
            await send(message)

        self._on_count(1)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._on_count(-1)


def _given_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == _REQUEST_ID_HEADER:
            return value if _PLAIN_ID.fullmatch(value) else None
    return None
