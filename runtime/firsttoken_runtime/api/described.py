"""What /openapi.json says of fields that are checked by hand, for errors in words."""

from __future__ import annotations

from typing import Any

_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}
STOP: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}
_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]
}
RESPONSE_FORMAT: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
                "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
            },
            "required": ["type"],
        },
        {"type": "null"},
    ]
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}
