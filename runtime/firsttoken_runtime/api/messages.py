"""Messages and tools of a chat request."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from firsttoken_runtime.api import described


class CalledFunction(BaseModel):
    """arguments: JSON text, as the API gives them out, or an object."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Any = None

    @field_validator("arguments")
    @classmethod
    def _json(cls, arguments: Any) -> Any:
        if isinstance(arguments, str) and arguments:
            try:
                json.loads(arguments)
            except (ValueError, RecursionError):
                raise ValueError("must be JSON text") from None
        elif not isinstance(arguments, dict | str | None):
            raise ValueError("must be JSON text or an object")
        return arguments


class MessageCall(BaseModel):
    """A tool call in an assistant message."""

    model_config = ConfigDict(extra="allow", strict=True)

    function: CalledFunction


class Function(BaseModel):
    """parameters: a JSON schema. strict: the arguments keep to it."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


class Message(BaseModel):
    """One message; fields a template may read beyond these are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[Any, WithJsonSchema(described.CONTENT)] = None
    tool_calls: list[MessageCall] | None = None

    @field_validator("content")
    @classmethod
    def _text(cls, content: Any) -> str | None:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise ValueError("must be a string or a list of text parts")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                named = f"{kind[:30]} parts" if isinstance(kind, str) else "parts without a type"
                raise ValueError(f"this model takes text parts only, no {named}")
            if not isinstance(part.get("text"), str):
                raise ValueError('a text part must look like {"type": "text", "text": "..."}')
        return "".join(part["text"] for part in content)
