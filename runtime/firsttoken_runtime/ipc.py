"""What the API process and the engine process say to each other, and how.

One socket pair, inherited by the engine process: there is no path to guess, nobody else can connect, and the
end of either process is an end of file for the other. A message is four bytes of length (big endian) and
that many bytes of MessagePack; several messages may share one write.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from firsttoken_runtime.engine.requests import Request, TokenScore

_LENGTH = struct.Struct(">I")
_LARGEST = 1 << 28
_READ_BYTES = 1 << 18


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First command: what to load and with which switches (a SwitchMessage as JSON data)."""

    model: str
    device: str
    dtype: str
    kv_memory: str
    page_tokens: int
    switches: dict[str, Any]
    max_model_len: int | None = None
    threads: int | None = None
    seed: int = 0
    max_queued: int = 1024
    draft_model: str | None = None


class Add(msgspec.Struct, frozen=True, tag="add"):
    request: Request


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The bytes of every token, for grammars; sent before the first request with one."""

    tokens: list[bytes]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class SetSwitches(msgspec.Struct, frozen=True, tag="switches"):
    """Answered by a Reply with the state; its `taken` is False for an older generation."""

    id: int
    message: dict[str, Any]


class GetState(msgspec.Struct, frozen=True, tag="state"):
    id: int


class GetRequests(msgspec.Struct, frozen=True, tag="requests"):
    id: int


class GetIntegrity(msgspec.Struct, frozen=True, tag="integrity"):
    id: int


class FlushPrefixCache(msgspec.Struct, frozen=True, tag="flush"):
    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """One finished part of the start-up."""

    text: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests.

    max_model_len: tokens one sequence may have, prompt and output together, in the model and in the pool.
    window: tokens beyond which no layer of the model sees anything; 0 where one sees everything.
    """

    max_model_len: int
    page_tokens: int
    total_pages: int
    kv_bytes: int
    device: str
    dtype: str
    architecture: str
    state: dict[str, Any]
    stats: dict[str, Any]
    window: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine gives up, in one line. user_error: something the person who started it can put right."""

    line: str
    user_error: bool


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token; see `engine.requests.TokenEvent`. Stamps that are not known are 0."""

    request_id: str
    token: int
    index: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prefill_start_ns: int = 0
    prefill_end_ns: int = 0
    sampled_ns: int = 0
    cached_tokens: int = 0
    prompt: tuple[TokenScore, ...] = ()
    queued_ns: int = 0
    admitted_ns: int = 0
    computing_ns: int = 0
    chunks: int = 0
    preemptions: int = 0


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """All tokens of one step."""

    tokens: list[Token]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine did not admit the request; the fields are AdmissionError's."""

    request_id: str
    code: str
    message: str
    status: int
    retry_after_seconds: float | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    id: int
    body: dict[str, Any]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """At least once a second while steps are short: the state and the engine's statistics."""

    state: dict[str, Any]
    stats: dict[str, Any]


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Every half second, also while a step runs.

    busy_seconds: how long the loop has been at one step, or what it does beside; None while it waits.
    expected_seconds: what that step should take by the measured speed; None when not known.
    """

    busy_seconds: float | None = None
    expected_seconds: float | None = None


Command = (
    Start
    | Add
    | Vocabulary
    | Abort
    | SetSwitches
    | GetState
    | GetRequests
    | GetIntegrity
    | FlushPrefixCache
    | Shutdown
)
Event = Phase | Ready | Failed | Tokens | Refused | Reply | Heartbeat | Pulse

_encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class ChannelClosed(Exception):
    """The other process ended."""


def encode(message: Command | Event) -> bytes:
    """One framed message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream back into messages. Raises ValueError for a length no message has."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies of the messages that are complete now."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > _LARGEST:
                raise ValueError(f"a message of {length} bytes; the other side speaks something else")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


class Channel:
    """The engine's end: it never waits for a slow API process, and waits for commands only when told to.

    What the socket does not take at once is kept and written when it can be. Several threads may send; one
    receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def send(self, event: Event) -> None:
        data = encode(event)
        with self._sending:
            self._unsent += data
            self._flush()

    def receive(self, timeout_seconds: float) -> list[Command]:
        """Commands that are there, after at most `timeout_seconds` of waiting. Raises ChannelClosed."""
        writers = [self._socket] if self._unsent else []
        readable, writable, _ = select.select([self._socket], writers, [], timeout_seconds)
        if writable:
            with self._sending:
                self._flush()
        if not readable:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("end of file")
        return [command_decoder.decode(body) for body in self._frames.feed(data)]

    def drain(self, timeout_seconds: float) -> None:
        """Write what is left, for at most `timeout_seconds`; used before the process ends."""
        if self._unsent:
            select.select([], [self._socket], [], timeout_seconds)
            with self._sending:
                self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            del self._unsent[:sent]
