"""Tool calls in an answer's text, read while it arrives.

Arguments are handed on as the model writes them, piece by piece: a client sees a long argument grow. What
turns out to be no call is text, unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from firsttoken_runtime.api.stop_strings import overlap
from firsttoken_runtime.api.tools import CLOSE, MISTRAL_ARGUMENTS, MISTRAL_CALLS, OPEN, Dialect

Json = dict[str, Any]

_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"([^"\\]*)"|[^"\s])')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_PYTHON_TAG = "<|python_tag|>"
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass
class Delta:
    """What a piece of text adds to the message: content, and parts of calls as in the OpenAI API."""

    content: str = ""
    calls: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.calls)


def call_id(dialect: Dialect) -> str:
    """A new id; Mistral's templates take nine letters and digits only."""
    if dialect in (Dialect.MISTRAL, Dialect.MISTRAL_NAMED):
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class _In(Enum):
    TEXT = auto()
    CALL = auto()  # a call begins here; its name is not complete
    ARGUMENTS = auto()
    REST = auto()  # behind the arguments, up to the end of the call


class ToolCallParser:
    """Splits text that comes in pieces into content and calls.

    Nothing is held back that cannot be the begin of a call any more. `calls` is how many there were.
    """

    def __init__(self, dialect: Dialect, new_id: Callable[[], str] | None = None) -> None:
        self._dialect = dialect
        self._new_id = new_id or (lambda: call_id(dialect))
        self._state = _In.CALL if dialect is Dialect.BARE else _In.TEXT
        self._buffer = ""
        self._said = ""  # the call as it came, to be shown when it is none
        self._blank = ""  # white space that is shown only when content follows
        self._value = _Value()
        self._scanned = (
            0  # characters of the buffer that `_value` has seen while the call's name is not known
        )
        self._list = False  # in MISTRAL's list
        self.calls = 0

    def push(self, text: str) -> Delta:
        """What is certain with this piece."""
        self._buffer += text
        delta = Delta()
        while self._advance(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """What is left when no more text comes."""
        delta = Delta()
        rest, self._buffer = self._buffer, ""
        if self._state is _In.TEXT:
            self._show(delta, rest)
        elif self._state is _In.CALL and not self._whole_calls(delta, rest):
            self._show(delta, self._said + rest)
        self._state = _In.TEXT
        if not self.calls:
            delta.content += self._blank
        return delta

    def _advance(self, delta: Delta) -> bool:
        """Take what can be taken from the buffer; whether more may follow."""
        match self._state:
            case _In.TEXT:
                return self._text(delta)
            case _In.CALL:
                return self._begin(delta)
            case _In.ARGUMENTS:
                return self._arguments(delta)
            case _In.REST:
                return self._rest()

    # Content

    def _text(self, delta: Delta) -> bool:
        if self._dialect is Dialect.BARE:
            if self.calls:
                return self._between_bare(delta)
            text, self._buffer = self._buffer, ""
            self._show(delta, text)
            return False
        marker = OPEN if self._dialect is Dialect.TAGS else MISTRAL_CALLS
        before, found, after = self._buffer.partition(marker)
        if found:
            self._show(delta, before)
            self._enter(after, marker)
            return True
        keep = overlap(self._buffer, marker)
        text, self._buffer = (
            self._buffer[: len(self._buffer) - keep],
            self._buffer[len(self._buffer) - keep :],
        )
        self._show(delta, text)
        return False

    def _show(self, delta: Delta, text: str) -> None:
        """Content, with white space held back: before, between and behind calls it is none."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        delta.content += shown

    def _between_bare(self, delta: Delta) -> bool:
        """Llama 3 puts `;` between several calls; anything else is text."""
        stripped = self._buffer.lstrip("; \n\t,")
        if not stripped:
            return False
        self._buffer = stripped
        if stripped.startswith("{"):
            self._enter(stripped)
            return True
        self._buffer = ""
        self._show(delta, stripped)
        return False

    def _enter(self, buffer: str, said: str = "") -> None:
        self._buffer, self._said, self._state = buffer, said, _In.CALL
        self._value, self._scanned = _Value(), 0

    # Calls

    def _begin(self, delta: Delta) -> bool:
        if self._dialect is Dialect.TAGS:
            return self._begin_object(delta, CLOSE)
        if self._dialect is Dialect.BARE:
            return self._begin_bare(delta)
        start = self._buffer.lstrip()
        if not start:
            return False
        if self._list or start[0] in "[{":
            if not self._list and start[0] == "[":
                start = start[1:]
                self._said += "["
            if not self._list or self._scanned == 0:
                self._buffer = start
            self._list = True
            return self._begin_object(delta, None)
        return self._begin_named(delta, start)

    def _begin_object(self, delta: Delta, end: str | None) -> bool:
        """A call as an object {"name": …, "arguments": {…}}; other shapes are read when they are complete."""
        header = _HEADER.match(self._buffer)
        if header:
            self._open(delta, json.loads(header[1]), self._buffer[header.end() :])
            return True
        if end is not None:
            inner, found, after = self._buffer.partition(end)
            complete = bool(found)
        else:
            length = self._value.take(self._buffer[self._scanned :])
            complete = length is not None
            cut = self._scanned + (length or 0)
            inner, after = self._buffer[:cut], self._buffer[cut:]
            self._scanned = len(self._buffer)
        if not complete:
            return False
        called = self._whole_calls(delta, inner)
        self._buffer = after
        if called:
            self._state = _In.REST if end is None else _In.TEXT
        else:
            self._state, self._list = _In.TEXT, False
            self._show(delta, self._said + inner + (end or ""))
        return True

    def _begin_bare(self, delta: Delta) -> bool:
        start = self._buffer.lstrip()
        if not start or _PYTHON_TAG.startswith(start):
            return False
        if start.startswith(_PYTHON_TAG):
            self._enter(start.removeprefix(_PYTHON_TAG).lstrip())
            return True
        key = _FIRST_KEY.match(start)
        if start[0] != "{" or (key is not None and key[1] not in _CALL_KEYS):
            self._state = _In.TEXT
            text, self._buffer = self._buffer, ""
            self._show(delta, text)
            return False
        return self._begin_object(delta, None)

    def _begin_named(self, delta: Delta, start: str) -> bool:
        """name[ARGS]{…}, or name{…}."""
        name, found, after = start.partition("{")
        if not found:
            return False
        name = name.replace(MISTRAL_ARGUMENTS, "").strip()
        self._open(delta, name, "{" + after)
        return True

    def _open(self, delta: Delta, name: str, rest: str) -> None:
        function = {"name": name, "arguments": ""}
        delta.calls.append(
            {"index": self.calls, "id": self._new_id(), "type": "function", "function": function}
        )
        self.calls += 1
        self._blank = ""
        self._buffer, self._value, self._state = rest, _Value(), _In.ARGUMENTS

    def _arguments(self, delta: Delta) -> bool:
        length = self._value.take(self._buffer)
        part = self._buffer if length is None else self._buffer[:length]
        self._buffer = self._buffer[len(part) :]
        if part:
            delta.calls.append({"index": self.calls - 1, "function": {"arguments": part}})
        if length is None:
            return False
        named = self._dialect is Dialect.MISTRAL_NAMED or (
            self._dialect is Dialect.MISTRAL and not self._list
        )
        self._state = _In.TEXT if named else _In.REST
        return True

    def _rest(self) -> bool:
        """Skip to the end of the call, and find out whether another one follows."""
        if self._dialect is Dialect.TAGS:
            _, found, after = self._buffer.partition(CLOSE)
            if found:
                self._buffer, self._state = after, _In.TEXT
            return bool(found)
        rest = self._buffer.lstrip("} \n\t\r")
        if not rest:
            return False
        self._buffer = rest
        if self._dialect is Dialect.BARE:
            self._state = _In.TEXT
        elif rest[0] == ",":
            self._enter(rest[1:].lstrip())
        else:
            self._buffer, self._list, self._state = rest.removeprefix("]"), False, _In.TEXT
        return True

    def _whole_calls(self, delta: Delta, text: str) -> bool:
        """Calls from complete JSON, in whatever order its keys come. False when it is none."""
        try:
            body = json.loads(text.strip().removesuffix(";"))
        except (ValueError, RecursionError):
            return False
        calls = body if isinstance(body, list) else [body]
        read = [_read_call(call) for call in calls]
        if not read or None in read:
            return False
        for name, arguments in filter(None, read):
            self._open(delta, name, "")
            delta.calls.append({"index": self.calls - 1, "function": {"arguments": arguments}})
        self._state = _In.TEXT
        return True


def _read_call(call: Any) -> tuple[str, str] | None:
    if not isinstance(call, dict):
        return None
    inner = call.get("function")
    if isinstance(inner, dict):
        call = inner
    name = call.get("name")
    key = "arguments" if "arguments" in call else "parameters"
    given = call.get(key)
    if not isinstance(name, str) or key not in call or not isinstance(given, dict | str | None):
        return None
    return name, given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


class _Value:
    """Finds the end of a JSON object or list that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def take(self, text: str) -> int | None:
        """Length up to and with the end of the value, None when it goes on behind this piece."""
        for at, character in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def message_calls(deltas: list[Json]) -> list[Json]:
    """Whole calls from their parts."""
    calls: list[Json] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({**delta, "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    for call in calls:
        del call["index"]
    return calls
