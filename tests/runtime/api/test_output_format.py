"""Every way to ask for an answer in a form becomes one structural tag, and contradictions are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firsttoken_runtime.api.output_format import (
    LONGEST_FORMAT_BYTES,
    MOST_WHITESPACE,
    FormatError,
    encode_format,
    read_format,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": MOST_WHITESPACE}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "json_object": False}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"response_format": {"type": "json_object"}}, {**JSON, "json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json_object": True}}, {**JSON, "json_schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        (
            {"guided_grammar": 'root ::= "a"'},
            {"type": "grammar", "grammar": 'root ::= "a"', "syntax": "ebnf"},
        ),
        ({"guided_grammar": 'start: "a"'}, {"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}),
        ({"guided_choice": ["a"]}, {"type": "const_string", "value": "a"}),
        (
            {"structured_outputs": {"choice": ["a", 'b"']}},
            {
                "type": "or",
                "elements": [
                    {"type": "const_string", "value": "a"},
                    {"type": "const_string", "value": 'b"'},
                ],
            },
        ),
    ],
)
def test_the_forms_of_the_openai_api_and_of_vllm(fields: dict[str, Any], form: dict[str, Any] | None) -> None:
    found = read_format(fields)
    assert (found[1] if found else None) == form


def test_a_structural_tag_goes_through_as_it_is() -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}}
    for fields in ({"response_format": tag}, {"structured_outputs": {"structural_tag": json.dumps(tag)}}):
        found = read_format(fields)
        assert found is not None
        assert json.loads(encode_format(*found)) == tag


def test_a_form_is_wrapped_once_and_equal_forms_are_equal_text() -> None:
    form = {"type": "regex", "pattern": "a"}
    assert json.loads(encode_format("x", form)) == {"type": "structural_tag", "format": form}
    assert encode_format("x", form) == encode_format("y", dict(form))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "regex", "pattern": "a" * LONGEST_FORMAT_BYTES}, "at most 65536 are taken"),
        ({"type": "regex", "pattern": "\ud800"}, "surrogate"),
        ({"type": "json_schema", "json_schema": deep(5000)}, "nested too deeply"),
    ],
)
def test_what_is_too_much_is_refused_before_it_travels(form: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        encode_format("guided_json", form)
