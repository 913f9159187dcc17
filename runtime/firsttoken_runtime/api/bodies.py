"""The JSON of answers: chat and plain completions, whole and in chunks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from firsttoken_runtime import ipc
from firsttoken_runtime.api.generation import Piece
from firsttoken_runtime.api.tool_calls import Delta, ToolCallParser, message_calls
from firsttoken_runtime.engine.requests import TokenScore

Json = dict[str, Any]

# JSON has no minus infinity; this is what other servers write for a token that cannot come.
_LOWEST_LOGPROB = -9999.0


class Spelling(Protocol):
    """What a tokenizer says of one token."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True)
class Prompt:
    """What an answer may repeat of its prompt.

    echo: its text, put before the answer; None for no echo. scored: tell the log probabilities of its tokens.
    """

    tokens: Sequence[int]
    echo: str | None = None
    scored: bool = False


@dataclass(frozen=True)
class Answer:
    """A whole answer. scores: of the prompt's tokens from the second one on."""

    text: str
    tokens: Sequence[ipc.Token]
    finish: str
    scores: Sequence[TokenScore] = ()


@dataclass
class CompletionShape:
    """`text_completion` bodies. Keeps the text offset that each choice's logprobs carry.

    prompts: of each choice. empty: no token was asked for, and the one that was computed is not shown.
    """

    id: str
    created: int
    model: str
    spelling: Spelling
    logprobs: bool
    prompts: Callable[[int], Prompt]
    empty: bool = False
    _offsets: dict[int, int] = field(default_factory=dict)
    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def first_chunk(self, index: int, piece: Piece, scores: Sequence[TokenScore]) -> Json:
        """The first chunk of a choice; it is sent whatever is in it."""
        return self._chunk(self._completion(index, self._shown(piece.text, piece.tokens), None, True, scores))

    def chunk(self, index: int, piece: Piece) -> Json | None:
        """None when there is nothing to tell yet."""
        text, tokens = self._shown(piece.text, piece.tokens)
        if not text and not (tokens and self.logprobs):
            return None
        return self._chunk(self._completion(index, (text, tokens), None))

    def last_chunk(self, index: int, finish: str) -> Json:
        return self._chunk(self._completion(index, ("", ()), self._finish(finish)))

    def usage_chunk(self) -> Json:
        return self._head(self.chunk_object, [])

    def whole(self, answers: Sequence[Answer]) -> Json:
        choices = []
        for index, answer in enumerate(answers):
            shown = self._shown(answer.text, answer.tokens)
            choice = self._completion(index, shown, self._finish(answer.finish), True, answer.scores)
            if self.prompts(index).scored:
                choice["prompt_logprobs"] = self._prompt_logprobs(index, answer.scores)
            choices.append(choice)
        return self._head(self.object, choices)

    def _head(self, object: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, choice: Json) -> Json:
        return self._head(self.chunk_object, [choice])

    def _shown(self, text: str, tokens: Sequence[ipc.Token]) -> tuple[str, Sequence[ipc.Token]]:
        return ("", ()) if self.empty else (text, tokens)

    def _finish(self, finish: str) -> str:
        return "length" if self.empty else finish

    def _completion(
        self,
        index: int,
        shown: tuple[str, Sequence[ipc.Token]],
        finish: str | None,
        first: bool = False,
        scores: Sequence[TokenScore] = (),
    ) -> Json:
        text, tokens = shown
        prompt = self.prompts(index)
        echo = prompt.echo if first else None
        return {
            "index": index,
            "text": text if echo is None else echo + text,
            "logprobs": self._text_logprobs(index, tokens, prompt.tokens if echo is not None else (), scores),
            "finish_reason": finish,
        }

    def _text_logprobs(
        self,
        index: int,
        tokens: Sequence[ipc.Token],
        echoed: Sequence[int],
        scores: Sequence[TokenScore],
    ) -> Json | None:
        if not self.logprobs or not (tokens or echoed):
            return None
        listed = Listed()
        known = (None, *scores) if echoed else ()
        for token, score in zip(echoed, known, strict=True):
            top = None if score is None else self._top(token, score.logprob, score.top)
            listed.add(self.spelling.token_text(token), None if score is None else score.logprob, top)
        for each in tokens:
            top = self._top(each.token, each.logprob, each.top)
            listed.add(self.spelling.token_text(each.token), _finite(each.logprob), top)
        body, self._offsets[index] = listed.body(self._offsets.get(index, 0))
        return body

    def _top(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Alternatives by text, the likelier one where two have the same; the token itself is among them."""
        texts: dict[str, float] = {}
        for id, value in (*top, (token, logprob)):
            texts.setdefault(self.spelling.token_text(id), _finite(value))
        return texts

    def _prompt_logprobs(self, index: int, scores: Sequence[TokenScore]) -> list[Json | None]:
        """As vLLM has them: per prompt token, by token id; nothing is known of the first one."""
        tokens = self.prompts(index).tokens
        told: list[Json | None] = [None]
        for token, score in zip(tokens[1:], scores, strict=True):
            entries = {
                id: self._rank(id, logprob, rank) for rank, (id, logprob) in enumerate(score.top, start=1)
            }
            entries[token] = self._rank(token, score.logprob, score.rank)
            told.append({str(id): entry for id, entry in entries.items()})
        return told

    def _rank(self, id: int, logprob: float, rank: int) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.spelling.token_text(id)}


@dataclass
class Listed:
    """The four lists of a text completion's logprobs."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] = field(default_factory=list)

    def add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self.texts.append(text)
        self.logprobs.append(logprob if logprob is None else _finite(logprob))
        self.tops.append(top)

    def body(self, offset: int) -> tuple[Json, int]:
        """The JSON, and the offset behind it. offset: characters of the choice's text so far."""
        offsets = []
        for text in self.texts:
            offsets.append(offset)
            offset += len(text)
        lists = {"tokens": self.texts, "token_logprobs": self.logprobs, "top_logprobs": self.tops}
        return {**lists, "text_offset": offsets}, offset


@dataclass
class ChatShape(CompletionShape):
    """`chat.completion` bodies. The first chunk carries the role and the first text together.

    parser: makes the reader of tool calls for a choice; None where no tools are offered.
    """

    parser: Callable[[], ToolCallParser] | None = None
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)
    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def first_chunk(self, index: int, piece: Piece, scores: Sequence[TokenScore]) -> Json:
        message = _message(self._read(index, piece.text))
        message.setdefault("content", "")
        return self._chunk(self._delta(index, {"role": "assistant", **message}, piece.tokens, None))

    def chunk(self, index: int, piece: Piece) -> Json | None:
        message = _message(self._read(index, piece.text))
        if not message and not (piece.tokens and self.logprobs):
            return None
        return self._chunk(self._delta(index, message or {"content": ""}, piece.tokens, None))

    def last_chunk(self, index: int, finish: str) -> Json:
        parser = self._parser(index)
        message = _message(parser.finish()) if parser is not None else {}
        return self._chunk(self._delta(index, message, (), _finish_reason(finish, parser)))

    def whole(self, answers: Sequence[Answer]) -> Json:
        body = self._head(
            self.object, [self._message_choice(index, answer) for index, answer in enumerate(answers)]
        )
        if self.prompts(0).scored:
            body["prompt_logprobs"] = self._prompt_logprobs(0, answers[0].scores)
        return body

    def _message_choice(self, index: int, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        parser = self._parser(index)
        if parser is not None:
            first, rest = parser.push(answer.text), parser.finish()
            message["content"] = (first.content + rest.content) or ("" if not parser.calls else None)
            if parser.calls:
                message["tool_calls"] = message_calls(first.calls + rest.calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": _finish_reason(answer.finish, parser),
        }

    def _parser(self, index: int) -> ToolCallParser | None:
        if self.parser is None:
            return None
        if index not in self._parsers:
            self._parsers[index] = self.parser()
        return self._parsers[index]

    def _read(self, index: int, text: str) -> Delta:
        parser = self._parser(index)
        return Delta(text) if parser is None else parser.push(text)

    def _delta(
        self, index: int, delta: Mapping[str, Any], tokens: Sequence[ipc.Token], finish: str | None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ipc.Token]) -> Json | None:
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

    def _token(self, id: int, logprob: float | None) -> Json:
        return {
            "token": self.spelling.token_text(id),
            "logprob": _finite(logprob),
            "bytes": list(self.spelling.token_bytes(id)),
        }


def _message(delta: Delta) -> Json:
    message: Json = {}
    if delta.content:
        message["content"] = delta.content
    # One entry per call in a chunk: clients take a list's place for the call's.
    parts: dict[int, Json] = {}
    for part in delta.calls:
        if (begun := parts.get(part["index"])) is None:
            parts[part["index"]] = {**part, "function": dict(part["function"])}
        else:
            begun["function"]["arguments"] += part["function"]["arguments"]
    if parts:
        message["tool_calls"] = list(parts.values())
    return message


def _finish_reason(finish: str, parser: ToolCallParser | None) -> str:
    return "tool_calls" if parser is not None and parser.calls and finish == "stop" else finish


def _finite(logprob: float | None) -> float:
    return max(logprob, _LOWEST_LOGPROB) if logprob is not None else _LOWEST_LOGPROB
