"""One request from tokens to text: detokenising, stop strings, stamps and counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from firsttoken_runtime import ipc
from firsttoken_runtime.api.engine_client import EngineClient, EngineLost
from firsttoken_runtime.api.errors import ApiError
from firsttoken_runtime.api.stop_strings import StopStrings
from firsttoken_runtime.api.timeline import Timeline
from firsttoken_runtime.engine.requests import Request, TokenScore


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
    timeline: of the HTTP request that this belongs to.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: Request,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        timeline: Timeline,
        *,
        include_stop: bool = False,
    ) -> None:
        self.request = request
        self.timeline = timeline
        self._engine = engine
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop, include_stop)
        self.prompt_scores: list[
            TokenScore
        ] = []  # of the prompt's tokens from the second one on, if asked for
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._last_token_ns = 0

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt), self._completion_tokens, self._cached_tokens)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces with text; the last one has `finish` and perhaps no text.

        Raises ApiError when the engine refuses the request or fails on it, EngineLost when it ends.
        """
        timeline = self.timeline
        try:
            stream = self._engine.add(self.request)
        except EngineLost:
            timeline.failed("engine_stopped")
            raise
        finished = False
        finish: str | None = None
        pending: list[ipc.Token] = []
        try:
            while finish is None:
                text = ""
                for token in await stream.next():
                    if token.prompt:
                        self.prompt_scores.extend(token.prompt)
                        continue
                    finished = finished or token.finish is not None
                    more, finish = self._take(token)
                    pending.append(token)
                    text += more
                    if finish is not None:
                        break
                if text or finish is not None:
                    piece = Piece(text, pending, finish)
                    pending = []
                    if finish is not None:
                        timeline.ended(finish)
                    yield piece
        except ApiError as error:
            timeline.failed(error.code, refused=error.status < 500)
            raise
        except EngineLost:
            timeline.failed("engine_stopped")
            raise
        finally:
            early = not finished and not self._completion_tokens
            last_word = timeline.await_last_word() if early else None
            self._engine.release(self.request.id, abort=not finished, last_word=last_word)

    def _take(self, token: ipc.Token) -> tuple[str, str | None]:
        """Text this token makes final, and the finish reason when the answer ends here."""
        if token.finish in ("error", "abort"):
            self.timeline.stopped(token)
        if token.finish == "error":
            raise ApiError(500, "the engine failed on this request; see its log", code="engine_error")
        if token.finish == "abort":
            raise ApiError(503, "the request was stopped by the server; send it again", code="aborted")
        self._count(token)
        # A stop token ends the answer and is no part of its text.
        text = "" if token.finish == "stop" else self._detokenizer.push(token.token)
        if token.finish is not None:
            text += self._detokenizer.flush()
        self.timeline.detokenized()
        if self._completion_tokens < self.request.sampling.min_tokens and token.finish is None:
            return text, None  # stop strings count from min_tokens on
        shown, stopped = self._stop.push(text)
        if stopped:
            return shown, "stop"
        if token.finish is not None:
            shown += self._stop.flush()
        return shown, token.finish

    def _count(self, token: ipc.Token) -> None:
        if not self._completion_tokens:
            self._cached_tokens = token.cached_tokens
            if not self.request.follows:  # a further answer to a prompt that is counted already
                self.timeline.cached_tokens += token.cached_tokens
        self._last_token_ns = self.timeline.token(token, self._last_token_ns)
        self._completion_tokens += 1
