"""What a connection tells about time: when a request's first bytes came, when an answer's were sent and
acknowledged.

Linux keeps the books per TCP socket: bytes not yet sent, bytes not yet acknowledged. Elsewhere, and on other
kinds of sockets, sending ends where the kernel takes the bytes, and the acknowledgement is unknown.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if sys.platform != "win32":
    import fcntl

RECEIVED = "firsttoken.received_ns"
TRANSPORT = "firsttoken.transport"

ACK_WITHIN_SECONDS = 2.0
_FIRST_LOOK_SECONDS = 0.001
_MOST_WATCHED = 256
# Linux: include/uapi/linux/sockios.h, and struct tcp_info in include/uapi/linux/tcp.h.
_SIOCOUTQ = 0x5411
_SIOCOUTQNSD = 0x894B
_TCP_INFO_BYTES = 128
_BYTES_ACKED_AT = 120
_INT = struct.Struct("i")
_U64 = struct.Struct("Q")


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with two additions to the scope: RECEIVED, the moment (monotonic nanoseconds)
    in which the bytes that begin the request were read, and TRANSPORT, the connection's."""

    _data_ns = 0

    def data_received(self, data: bytes) -> None:
        self._data_ns = time.monotonic_ns()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[RECEIVED] = self._data_ns
        scope[TRANSPORT] = self.transport


class Unknown(Exception):
    """Why the kernel's figures are not known, in words for people."""


class SendQueue:
    """What the kernel still has of the bytes written to one TCP connection."""

    def __init__(self, sock: Any) -> None:
        """sock: the transport's socket. Raises Unknown."""
        if sys.platform != "linux":
            raise Unknown("only Linux tells")
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            raise Unknown("not a TCP connection")
        self._socket = sock

    def unsent_bytes(self) -> int:
        return self._ioctl(_SIOCOUTQNSD)

    def acknowledged_bytes(self) -> int:
        """Since the connection began."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError as error:
            raise Unknown(f"the kernel does not tell: {error.strerror}") from None
        if len(info) < _TCP_INFO_BYTES:
            raise Unknown("the kernel is too old to tell")
        return int(_U64.unpack_from(info, _BYTES_ACKED_AT)[0])

    def goal(self) -> int:
        """What acknowledged_bytes() will be once all that is written by now is acknowledged."""
        # In this order an acknowledgement between the two calls makes the sum too small, never too large: too
        # large it would not be reached before the next chunk.
        acknowledged = self.acknowledged_bytes()
        return acknowledged + self._ioctl(_SIOCOUTQ)

    def _ioctl(self, request: int) -> int:
        number = self._socket.fileno()
        if number < 0:
            raise Unknown("the connection was closed")
        try:
            return int(_INT.unpack(fcntl.ioctl(number, request, bytes(_INT.size)))[0])
        except OSError as error:
            raise Unknown(f"the kernel does not tell: {error.strerror}") from None


class Connection:
    """The caller's connection, as far as delivery to it goes."""

    watched = 0

    def __init__(self, transport: asyncio.Transport | None) -> None:
        """transport: None when the server did not tell; then what is written counts as sent."""
        self._transport = transport
        self._queue: SendQueue | None = None
        self._why_unknown = ""
        try:
            self._queue = SendQueue(transport.get_extra_info("socket") if transport is not None else None)
        except Unknown as reason:
            self._why_unknown = str(reason)

    async def sent(self) -> bool:
        """Return when nothing that was written waits on this side any more; False when the connection is
        closed.

        For a caller who keeps up that is at once. One who does not read holds up himself alone: his further
        chunks are not written before.
        """
        delay_seconds = 0.0
        while self._waiting():
            # First a turn of the loop: a full device queue takes microseconds, a caller who does not read
            # seconds.
            await asyncio.sleep(delay_seconds)
            delay_seconds = min(max(2 * delay_seconds, 0.0005), 0.02)
        return self._transport is None or not self._transport.is_closing()

    def _waiting(self) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size():
            return True
        try:
            return self._queue is not None and self._queue.unsent_bytes() > 0
        except Unknown:
            return False

    def watch_acknowledgement(self, told: Callable[[int | None, str], None]) -> None:
        """Call `told` once, with the moment (monotonic nanoseconds) when all that is written by now was seen
        to be acknowledged, or with None and the reason why that is not known.

        Looks after 1 ms and then less and less often, for two seconds in all: the moment is that of the look,
        late by at most half of the time until then.
        """
        queue, transport = self._queue, self._transport
        if queue is None or transport is None:
            told(None, self._why_unknown)
            return
        if Connection.watched >= _MOST_WATCHED:
            told(None, f"{_MOST_WATCHED} others were watched")
            return
        try:
            goal = queue.goal()
        except Unknown as reason:
            told(None, str(reason))
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + ACK_WITHIN_SECONDS

        def look(next_seconds: float) -> None:
            try:
                if transport.is_closing():
                    raise Unknown("the connection was closed")
                acknowledged = queue.acknowledged_bytes() >= goal
            except Unknown as reason:
                end(None, str(reason))
                return
            if acknowledged:
                end(time.monotonic_ns(), "")
            elif loop.time() >= until:
                end(None, f"not within {ACK_WITHIN_SECONDS:g} s")
            else:
                loop.call_later(next_seconds, look, 1.5 * next_seconds)

        def end(at_ns: int | None, reason: str) -> None:
            Connection.watched -= 1
            told(at_ns, reason)

        Connection.watched += 1
        look(_FIRST_LOOK_SECONDS)


NO_CONNECTION = Connection(None)
