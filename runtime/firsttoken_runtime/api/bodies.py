"""The JSON of answers: chat and plain completions, whole and in chunks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from firsttoken_runtime import ipc
from firsttoken_runtime.api.generation import Piece

# JSON has no minus infinity; this is what other servers write for a token that cannot come.
_LOWEST_LOGPROB = -9999.0


@dataclass
class CompletionShape:
    """`text_completion` bodies. Keeps the text offset that logprobs carry."""

    id: str
    created: int
    model: str
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    logprobs: bool
    _offset: int = field(default=0)
    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def first_chunk(self, piece: Piece) -> dict[str, Any]:
        return self.chunk(piece)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._head(self.chunk_object, [self._choice(piece.text, piece.tokens, None)])

    def last_chunk(self, finish: str) -> dict[str, Any]:
        return self._head(self.chunk_object, [self._choice("", (), finish)])

    def usage_chunk(self) -> dict[str, Any]:
        return self._head(self.chunk_object, [])

    def whole(self, text: str, tokens: Sequence[ipc.Token], finish: str) -> dict[str, Any]:
        return self._head(self.object, [self._choice(text, tokens, finish)])

    def _head(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, text: str, tokens: Sequence[ipc.Token], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ipc.Token]) -> dict[str, Any] | None:
        if not self.logprobs or not tokens:
            return None
        texts = [self.token_text(token.token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self.token_text(id): _finite(logprob) for id, logprob in token.top} for token in tokens
            ],
            "text_offset": offsets,
        }


class ChatShape(CompletionShape):
    """`chat.completion` bodies. The first chunk carries the role and the first text together."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"role": "assistant", "content": piece.text}
        return self._delta(delta, piece.tokens, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._delta({"content": piece.text}, piece.tokens, None)

    def last_chunk(self, finish: str) -> dict[str, Any]:
        return self._delta({}, (), finish)

    def whole(self, text: str, tokens: Sequence[ipc.Token], finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
        }
        return self._head(self.object, [choice])

    def _delta(
        self, delta: Mapping[str, Any], tokens: Sequence[ipc.Token], finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}
        return self._head(self.chunk_object, [choice])

    def _logprobs(self, tokens: Sequence[ipc.Token]) -> dict[str, Any] | None:
        if not self.logprobs or not tokens:
            return None
        content = [
            {
                **self._token(token.token, token.logprob),
                "top_logprobs": [self._token(id, logprob) for id, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self.token_text(id),
            "logprob": _finite(logprob),
            "bytes": list(self.token_bytes(id)),
        }


def _finite(logprob: float | None) -> float:
    return max(logprob, _LOWEST_LOGPROB) if logprob is not None else _LOWEST_LOGPROB
