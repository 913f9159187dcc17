"""All that is timed and counted about one HTTP request, from its first bytes to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from firsttoken_runtime import ipc
from firsttoken_runtime.api.connection import NO_CONNECTION, Connection
from firsttoken_runtime.timing import Account, Stamps, account


class Ended(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"  # the caller went
    FAILED = "failed"  # it was answered with an error
    REFUSED = "refused"  # it was not taken


class Recorder(Protocol):
    """Who wants to know of a request; see `recorder.Recorder`.

    complete: it has ended and nothing more will be known of it.
    """

    def began(self, timeline: Timeline) -> None: ...
    def token(self, gap_seconds: float | None) -> None: ...
    def first_token(self, timeline: Timeline) -> None: ...
    def ended(self, timeline: Timeline) -> None: ...
    def complete(self, timeline: Timeline) -> None: ...
    def acknowledged(self, seconds: float | None) -> None: ...


class Nobody:
    """The recorder of requests that are nobody's traffic."""

    def began(self, timeline: Timeline) -> None: ...
    def token(self, gap_seconds: float | None) -> None: ...
    def first_token(self, timeline: Timeline) -> None: ...
    def ended(self, timeline: Timeline) -> None: ...
    def complete(self, timeline: Timeline) -> None: ...
    def acknowledged(self, seconds: float | None) -> None: ...


NOBODY = Nobody()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the caller asked for, without a word of the prompt.

    operation: `chat` or `text_completion`. sampling: numbers that were given, under their OpenAI names.
    traceparent, tracestate: the headers of W3C Trace Context, as they came.
    """

    id: str
    operation: str
    stream: bool
    sampling: Mapping[str, float]
    priority: int = 0
    choices: int = 1
    traceparent: str = ""
    tracestate: str = ""


@dataclass(slots=True)
class Timeline:
    """One request; with several choices the first token of any of them is its first token.

    Every moment is in nanoseconds on the monotonic clock. `stamps` is filled as the request goes on; the TTFT
    account closes with `first_written` (a stream) or `first_ready` (a whole answer), the rest with `ended`.
    """

    facts: RequestFacts
    stamps: Stamps
    recorder: Recorder
    prompt_tokens: int
    connection: Connection = NO_CONNECTION
    clock: Callable[[], int] = time.monotonic_ns
    cached_tokens: int = 0
    chunks: int = 0
    preemptions: int = 0
    completion_tokens: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    ended_ns: int = 0
    state: Ended | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str = ""
    acknowledged_ns: int | None = None
    ack_unknown: str = "not yet"
    _closed: Account | None = None
    _words_awaited: int = 0

    # As it goes on

    def begin(self) -> None:
        """Whoever answers it calls this first; from then on it is in the list of requests, until it ends."""
        self.recorder.began(self)

    def token(self, token: ipc.Token, since_ns: int) -> int:
        """A token of a choice arrived; returns the moment. since_ns: that of the one before it, or 0."""
        now = self.clock()
        if not self.completion_tokens:
            self.first_token_ns = self.stamps.delivered_ns = now
            self._take_stamps(token)
        self.completion_tokens += 1
        self.last_token_ns = now
        self.recorder.token((now - since_ns) / 1e9 if since_ns else None)
        return now

    def detokenized(self) -> None:
        """Called after each token; the first call counts."""
        if self.stamps.detokenized_ns is None:
            self.stamps.detokenized_ns = self.clock()

    def first_ready(self) -> str:
        """There is text to show: the account up to here as a `Server-Timing` header."""
        now = self.stamps.handed_over_ns = self.clock()
        if not self.facts.stream:
            self.ack_unknown = "not streamed: no first token on the wire"
            self._close(now)
        return account(self.stamps, now).server_timing()

    async def first_written(self) -> None:
        """The first chunk was written: wait until it is sent, and close the TTFT account."""
        connection = self.connection
        if not await connection.sent():
            return  # the caller has gone, and whoever listens for that will say so
        self._close(self.clock())
        connection.watch_acknowledgement(self._acknowledged)

    def ended(self, finish: str) -> None:
        """A choice ended by itself; with the last one the request did."""
        self.finish_reasons.append(finish)
        if len(self.finish_reasons) == self.facts.choices and self.stamps.written_ns is not None:
            self._end(Ended.FINISHED)

    def aborted(self) -> None:
        """The caller went. Does nothing when the request has ended already."""
        self._end(Ended.ABORTED)

    def failed(self, code: str, *, refused: bool = False) -> None:
        """The request is answered with an error; `code` is one of our own words.

        refused: it asked for what cannot be, or too many are here; nothing was computed for it.
        """
        if self.state is None:
            self.error_code = code
        self._end(Ended.REFUSED if refused else Ended.FAILED)

    def stopped(self, token: ipc.Token) -> None:
        """The engine ended a choice without a token."""
        if self.stamps.prefill_end_ns is None:
            self._take_stamps(token)

    def await_last_word(self) -> Callable[[ipc.Token | None], None]:
        """A choice was given up before its first token: to be called with what the engine says of it in the
        end, how far it had come, or with None."""
        self._words_awaited += 1
        return self._last_word

    # What it adds up to

    @property
    def account(self) -> Account:
        """Of TTFT when the first token is written; else of the time until now, or until the end."""
        if self._closed is not None:
            return self._closed
        return account(self.stamps, self.ended_ns or self.clock())

    @property
    def segment(self) -> str | None:
        """The segment of TTFT it is in, or ended in; None after the first token was written."""
        return self.stamps.segment

    def timings(self) -> dict[str, Any]:
        """What a response carries as `timings`, when its first token was written: milliseconds and tokens."""
        whole = self.account
        decoding_ns = self.last_token_ns - self.first_token_ns
        return {
            **whole.segments.to_json(),
            "total_ms": (self.last_token_ns - self.stamps.arrival_ns) / 1e6,
            "parts": whole.to_json(),
            **self.ack_json(),
            **self.counts_json(),
            "tokens_per_second": (self.completion_tokens - 1) / decoding_ns * 1e9 if decoding_ns else 0.0,
        }

    def ack_json(self) -> dict[str, Any]:
        """`ack_ms` from written to acknowledged; without it the reason why it is not known."""
        written = self.stamps.written_ns
        if self.acknowledged_ns is None or written is None:
            return {"ack_ms": None, "ack_unknown": self.ack_unknown}
        return {"ack_ms": (self.acknowledged_ns - written) / 1e6}

    def counts_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "chunks": self.chunks,
            "preemptions": self.preemptions,
        }

    # Within

    def _take_stamps(self, token: ipc.Token) -> None:
        """The engine's stamps; those it has not are 0."""
        stamps = self.stamps
        stamps.queued_ns = token.queued_ns or None
        stamps.admitted_ns = token.admitted_ns or None
        stamps.prefill_start_ns = token.prefill_start_ns or None
        stamps.prefill_end_ns = token.prefill_end_ns or None
        stamps.sampled_ns = token.sampled_ns or None
        stamps.computing_ns = token.computing_ns
        self.chunks, self.preemptions = token.chunks, token.preemptions

    def _close(self, written_ns: int) -> None:
        self.stamps.written_ns = written_ns
        self._closed = account(self.stamps)
        self.recorder.first_token(self)
        if len(self.finish_reasons) == self.facts.choices:
            self._end(Ended.FINISHED)

    def _end(self, state: Ended) -> None:
        if self.state is not None:
            return
        self.state, self.ended_ns = state, self.clock()
        # The list of requests keeps this; it must not keep the connection's buffers alive as well.
        self.connection = NO_CONNECTION
        self.recorder.ended(self)
        if not self._words_awaited:
            self.recorder.complete(self)

    def _last_word(self, token: ipc.Token | None) -> None:
        self._words_awaited -= 1
        if token is not None:
            self.stopped(token)
            self.stamps.forget_after(self.ended_ns or self.clock())
        if not self._words_awaited and self.state is not None:
            self.recorder.complete(self)

    def _acknowledged(self, at_ns: int | None, reason: str) -> None:
        self.acknowledged_ns, self.ack_unknown = at_ns, reason
        after_ns = None if at_ns is None else at_ns - (self.stamps.written_ns or at_ns)
        self.recorder.acknowledged(None if after_ns is None else after_ns / 1e9)
