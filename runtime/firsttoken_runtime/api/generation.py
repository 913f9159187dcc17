"""One request from tokens to text: detokenising, stop strings, stamps and counts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from firsttoken_runtime import ipc
from firsttoken_runtime.api.engine_client import EngineClient
from firsttoken_runtime.api.errors import ApiError
from firsttoken_runtime.api.stop_strings import StopStrings
from firsttoken_runtime.engine.requests import Request
from firsttoken_runtime.metrics import Metrics
from firsttoken_runtime.timing import Segments, TtftWindow, segments


class Detokenizer(Protocol):
    """`model.tokenizer.Detokenizer`: text that is final now, never half a character."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


@dataclass(frozen=True)
class Piece:
    """Text that can be shown now, the tokens since the last piece, and why it ended (with the last piece)."""

    text: str
    tokens: Sequence[ipc.Token]
    finish: str | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Generation:
    """Runs one request in the engine and turns its tokens into pieces of text.

    `pieces` is read once, by one reader; when the reader stops early the engine stops too.
    recorded: False leaves it out of the metrics and of the TTFT window, because it is nobody's traffic.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: Request,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        metrics: Metrics,
        window: TtftWindow,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        recorded: bool = True,
    ) -> None:
        self.request = request
        self._engine = engine
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)
        self._metrics = metrics
        self._window = window
        self._recorded = recorded
        self.clock = clock
        self._completion_tokens = 0
        self._first: ipc.Token | None = None
        self._first_token_ns = 0
        self._last_token_ns = 0
        self._segments: Segments | None = None

    @property
    def usage(self) -> Usage:
        cached = self._first.cached_tokens if self._first else 0
        return Usage(len(self.request.prompt), self._completion_tokens, cached)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces with text; the last one has `finish` and perhaps no text.

        Raises ApiError when the engine refuses the request or fails on it, EngineLost when it ends.
        """
        stream = self._engine.add(self.request)
        finished = False
        finish: str | None = None
        pending: list[ipc.Token] = []
        try:
            while finish is None:
                text = ""
                for token in await stream.next():
                    more, finish = self._take(token)
                    finished = finished or token.finish is not None
                    pending.append(token)
                    text += more
                    if finish is not None:
                        break
                if text or finish is not None:
                    piece = Piece(text, pending, finish)
                    pending = []
                    if finish is not None:
                        self._finished(finish)
                    yield piece
        finally:
            self._engine.release(self.request.id, abort=not finished)

    def _take(self, token: ipc.Token) -> tuple[str, str | None]:
        """Text this token makes final, and the finish reason when the answer ends here."""
        if token.finish == "error":
            raise ApiError(500, "the engine failed on this request; see its log", code="engine_error")
        if token.finish == "abort":
            raise ApiError(503, "the request was stopped by the server; send it again", code="aborted")
        self._count(token)
        # A stop token ends the answer and is no part of its text.
        text = "" if token.finish == "stop" else self._detokenizer.push(token.token)
        if token.finish is not None:
            text += self._detokenizer.flush()
        shown, stopped = self._stop.push(text)
        if stopped:
            return shown, "stop"
        if token.finish is not None:
            shown += self._stop.flush()
        return shown, token.finish

    def _count(self, token: ipc.Token) -> None:
        now, gap_seconds = self.clock(), None
        if self._first is None:
            self._first, self._first_token_ns = token, now
        else:
            gap_seconds = (now - self._last_token_ns) / 1e9
        if self._recorded:
            self._metrics.token(gap_seconds)
        self._last_token_ns = now
        self._completion_tokens += 1

    def handed_over(self, handed_over_ns: int, written_ns: int) -> Segments:
        """The TTFT account at this moment; nothing is recorded. Needs a first token."""
        first = self._first
        assert first is not None
        return segments(
            self.request.arrival_ns, first.prefill_start_ns, first.prefill_end_ns, handed_over_ns, written_ns
        )

    def first_written(self, handed_over_ns: int, written_ns: int) -> Segments:
        """Close the TTFT account: the first token was handed over and written at these moments."""
        self._segments = self.handed_over(handed_over_ns, written_ns)
        if self._recorded:
            prompt_tokens = len(self.request.prompt)
            self._window.add(written_ns, self._segments, prompt_tokens)
            self._metrics.first_token(self._segments, prompt_tokens)
        return self._segments

    def timings(self) -> dict[str, float | int]:
        """What the response carries as `timings`: milliseconds and tokens."""
        assert self._segments is not None
        first = self._first
        assert first is not None
        decoding_ns = self._last_token_ns - self._first_token_ns
        return {
            **self._segments.to_json(),
            "total_ms": (self._last_token_ns - self.request.arrival_ns) / 1e6,
            "prompt_tokens": len(self.request.prompt),
            "cached_tokens": first.cached_tokens,
            "completion_tokens": self._completion_tokens,
            "tokens_per_second": (self._completion_tokens - 1) / decoding_ns * 1e9 if decoding_ns else 0.0,
        }

    def _finished(self, finish: str) -> None:
        if not self._recorded:
            return
        assert self._first is not None
        self._metrics.finished(
            finish,
            self._completion_tokens,
            self.request.arrival_ns,
            self._first.prefill_start_ns,
            self._first_token_ns,
            self._last_token_ns,
        )
