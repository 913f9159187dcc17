"""What an answer must look like, as one structural tag (xgrammar's JSON for a grammar). Pure.

`response_format` of the OpenAI API and `structured_outputs` or `guided_*` of vLLM say the same in several
ways; the engine knows this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

# Between the parts of JSON. Without a bound a small model may write blanks until its tokens are used up.
MOST_WHITESPACE = 20
LONGEST_FORMAT_BYTES = 64 << 10
MOST_CHOICES = 1024


class FormatError(ValueError):
    """An output format that is not taken; param is the field it came in."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(f"{param}: {text}")
        self.param = param


def json_format(schema: Any) -> Json:
    """JSON that keeps to a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITESPACE}


def read_format(fields: Mapping[str, Any]) -> tuple[str, Json] | None:
    """The format that a request's fields ask for, with the field's name; None where none does.

    fields: response_format, structured_outputs and guided_*, as they came. Raises FormatError.
    """
    found: list[tuple[str, Json]] = []
    for name, value in fields.items():
        if value is None:
            continue
        if name == "response_format":
            form = _response_format(value)
        elif name == "structured_outputs":
            form = _structured_outputs(value)
        else:
            form = _constraint(name, name.removeprefix("guided_"), value)
        if form is not None:
            found.append((name, form))
    if len(found) > 1:
        raise FormatError(found[1][0], f"an output format is given in {found[0][0]} already; leave one out")
    return found[0] if found else None


def encode_format(param: str, form: Json) -> str:
    """Text of a structural tag. Raises FormatError beyond LONGEST_FORMAT_BYTES."""
    tag = form if form.get("type") == "structural_tag" else {"type": "structural_tag", "format": form}
    try:
        text = json.dumps(tag, ensure_ascii=False, separators=(",", ":"))
        size = len(text.encode())
    except RecursionError:
        raise FormatError(param, "is nested too deeply") from None
    except UnicodeEncodeError:
        raise FormatError(param, "half a surrogate pair is no character") from None
    if size > LONGEST_FORMAT_BYTES:
        raise FormatError(
            param, f"has {size} bytes as a grammar, and at most {LONGEST_FORMAT_BYTES} are taken"
        )
    return text


def _response_format(value: Any) -> Json | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return json_format({"type": "object"})
        case "json_schema":
            inner = value.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict | bool):
                raise FormatError("response_format", "json_schema must have a schema, a JSON object")
            return json_format(schema)
        case "structural_tag":
            return dict(value)
    raise FormatError("response_format", "type must be text, json_object, json_schema or structural_tag")


def _structured_outputs(value: Any) -> Json | None:
    if not isinstance(value, dict):
        raise FormatError("structured_outputs", "must be an object")
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [kind for kind in kinds if value.get(kind) not in (None, False)]
    if unknown := sorted(set(value) - {*kinds, "whitespace_pattern", "disable_any_whitespace"}):
        raise FormatError(
            "structured_outputs", f"{unknown[0][:40]} is not known; give one of {', '.join(kinds)}"
        )
    if len(given) > 1:
        raise FormatError("structured_outputs", f"has {given[0]} and {given[1]}; give one")
    return _constraint("structured_outputs", given[0], value[given[0]]) if given else None


def _constraint(param: str, kind: str, value: Any) -> Json | None:
    match kind:
        case "json":
            return json_format(_schema(param, value))
        case "json_object":
            return json_format({"type": "object"}) if value else None
        case "regex":
            return {"type": "regex", "pattern": _text(param, value)}
        case "grammar":
            grammar = _text(param, value)
            syntax = "ebnf" if "::=" in grammar else "lark"
            return {"type": "grammar", "grammar": grammar, "syntax": syntax}
        case "choice":
            return _choice(param, value)
        case "structural_tag":
            tag = _schema(param, value)
            if isinstance(tag, dict):
                return tag
    raise FormatError(param, "is not an output format")


def _schema(param: str, value: Any) -> Json | bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FormatError(param, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise FormatError(param, "must be a JSON schema: an object, or its text")
    return value


def _text(param: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise FormatError(param, "must be a string that is not empty")
    return value


def _choice(param: str, value: Any) -> Json:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise FormatError(param, "must be a list of strings, none of them empty")
    if len(value) > MOST_CHOICES:
        raise FormatError(param, f"has {len(value)} choices, and at most {MOST_CHOICES} are taken")
    options = [{"type": "const_string", "value": item} for item in value]
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}
