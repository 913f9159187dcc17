"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response


class ApiError(Exception):
    """Answered as it is: HTTP status, a message that says what to do, a code a program can test."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.close = close

    @property
    def kind(self) -> str:
        """The `type` of the error body."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_seconds is not None:
            headers["retry-after"] = str(max(math.ceil(self.retry_after_seconds), 1))
        if self.close:
            headers["connection"] = "close"
        return headers


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """HTTP 400."""
    return ApiError(400, message, code=code, param=param)


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for the first id that the vocabulary does not have."""
    wrong = next((id for id in ids if not 0 <= id < vocab_size), None)
    if wrong is not None:
        raise bad_request(
            f"{param}: token id {wrong} does not exist; ids go from 0 to {vocab_size - 1}", param=param
        )


def from_validation(error: ValidationError) -> ApiError:
    """HTTP 400 that names the first wrong field and what would be right; the value is not repeated."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return bad_request(f"the body is not valid JSON: {reason}", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"]) or None
    text = first["msg"].removeprefix("Value error, ")
    if param is None:
        text = "the body must be a JSON object" if first["type"] == "model_type" else text
        return bad_request(text)
    text = text[:1].lower() + text[1:]
    return bad_request(f"{param}: {text}", param=param)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; NaN and infinities become null."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())
