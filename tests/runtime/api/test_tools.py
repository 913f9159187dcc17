"""Tools: told in the template's way or a neutral one, forced by a grammar, read back while they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime.api.tool_calls import ToolCallParser, message_calls
from firsttoken_runtime.api.tools import (
    Dialect,
    ToolChoice,
    ToolFormat,
    forced_format,
    strict_format,
    template_messages,
    tool_format,
)

NEUTRAL = ToolFormat(Dialect.TAGS, False)
NATIVE = ToolFormat(Dialect.TAGS, True)

Calls = list[tuple[str, str]]


def read(dialect: Dialect, pieces: list[str]) -> tuple[str, Calls]:
    parser = ToolCallParser(dialect, lambda: "id")
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish())
    calls = message_calls([call for delta in deltas for call in delta.calls])
    assert len(calls) == parser.calls
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(delta.content for delta in deltas), told


READINGS: list[tuple[Dialect, str, str, Calls]] = [
    (Dialect.TAGS, "no call at all ", "no call at all ", []),
    (
        Dialect.TAGS,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [1, {}]}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {"q": 1}, "name": "g"}\n</tool_call>\n',
        "Let me see.",
        [("f", '{"a": "}\\"</tool_call>", "b": [1, {}]}'), ("g", '{"q": 1}')],
    ),
    (Dialect.TAGS, "<tool_call>\nnot json</tool_call> so", "<tool_call>\nnot json</tool_call> so", []),
    (
        Dialect.TAGS,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        Dialect.TAGS,
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (Dialect.TAGS, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (Dialect.TAGS, '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    (Dialect.TAGS, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (Dialect.TAGS, "a <tool_ca", "a <tool_ca", []),
    (
        Dialect.BARE,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        Dialect.BARE,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
        "",
        [("f", "{}")],
    ),
    (Dialect.BARE, '{"parameters": {"z": 1}, "name": "h"}', "", [("h", '{"z": 1}')]),
    (Dialect.BARE, 'In JSON: {"name": "f"}', 'In JSON: {"name": "f"}', []),
    (Dialect.BARE, '{"answer": 42}', '{"answer": 42}', []),
    (Dialect.BARE, '{"name": "Bob", "age": 3} is he', '{"name": "Bob", "age": 3} is he', []),
    (
        Dialect.MISTRAL,
        'So: [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, 2]}}, {"arguments": {}, "name": "g"}]',
        "So:",
        [("f", '{"a": [1, 2]}'), ("g", "{}")],
    ),
    (Dialect.MISTRAL, "a [TOOL", "a [TOOL", []),
    (
        Dialect.MISTRAL_NAMED,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
        "",
        [("f", '{"a": 1}'), ("g", '{"b": 2}')],
    ),
]


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), READINGS)
def test_calls_are_read_and_what_is_none_stays_text(dialect, text, content, calls) -> None:
    assert read(dialect, [text]) == (content, calls)


@given(st.sampled_from(READINGS), st.lists(st.integers(1, 30), max_size=60))
def test_wherever_the_pieces_are_cut_the_reading_is_the_same(reading, cuts: list[int]) -> None:
    dialect, text, content, calls = reading
    pieces, at = [], 0
    for length in cuts:
        pieces.append(text[at : at + length])
        at += length
    assert read(dialect, [*pieces, text[at:]]) == (content, calls)


@given(st.sampled_from(Dialect), st.text(st.sampled_from('<>{}[]"\\:,;ab tool_cal/TOLCS\n'), max_size=60))
def test_no_text_breaks_it_and_none_that_has_no_call_is_lost(dialect: Dialect, text: str) -> None:
    content, calls = read(dialect, list(text))
    if not calls:
        assert "".join(content.split()) == "".join(text.replace("<|python_tag|>", "").split())


def test_arguments_are_handed_on_as_they_grow() -> None:
    parser = ToolCallParser(Dialect.TAGS)
    head = parser.push('<tool_call>\n{"name": "write", "arguments": {"text": "once')
    assert head.calls[0]["function"]["name"] == "write"
    assert head.calls[0]["id"].startswith("call_")
    more = parser.push(" upon a time")
    assert [call["function"]["arguments"] for call in more.calls] == [" upon a time"]


def test_mistral_ids_are_nine_letters_and_digits() -> None:
    delta = ToolCallParser(Dialect.MISTRAL).push('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert len(delta.calls[0]["id"]) == 9
    assert delta.calls[0]["id"].isalnum()


def test_a_long_answer_that_is_no_call_costs_no_more_than_its_length() -> None:
    import time

    text = json.dumps({"name": "Bob", "friends": ["x" * 20] * 2000})
    began = time.monotonic()
    content, calls = read(Dialect.BARE, [text[at : at + 4] for at in range(0, len(text), 4)])
    assert (content, calls) == (text, [])
    assert time.monotonic() - began < 5


QWEN = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
)
LLAMA = '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}{% endif %}'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, NEUTRAL),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", NEUTRAL),
        ("{{ tools }}<｜tool▁calls▁begin｜>", NEUTRAL),
        (QWEN, NATIVE),
        (LLAMA, ToolFormat(Dialect.BARE, True)),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", ToolFormat(Dialect.MISTRAL, True)),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", ToolFormat(Dialect.MISTRAL_NAMED, True)),
    ],
)
def test_the_template_says_how_calls_are_written(template: str | None, expected: ToolFormat) -> None:
    assert tool_format(template) == expected


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": "warm"},
]


def test_a_native_template_gets_arguments_as_objects() -> None:
    told = template_messages(CONVERSATION, NATIVE, [tool("f")])
    assert told[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "tool"]


def test_a_template_without_tools_gets_them_in_words() -> None:
    system, user, assistant, response = template_messages(CONVERSATION, NEUTRAL, [tool("f", description="d")])
    assert (system["role"], user["content"]) == ("system", "Weather?")
    assert '{"type": "function", "function": {"name": "f", "description": "d"}}' in system["content"]
    assert assistant["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert response == {
        "role": "user",
        "content": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>",
    }


def test_a_system_message_of_the_caller_stays_in_front() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    system, _ = template_messages(messages, NEUTRAL, [tool("f")])
    assert system["content"].startswith("Be brief.\n\nYou may call functions")
    assert template_messages(messages, NEUTRAL, []) == messages


@pytest.fixture(scope="module")
def accepts():
    """Whether xgrammar's grammar of a form takes a text."""
    from firsttoken_runtime.engine.grammar import _xgrammar

    xgrammar = _xgrammar()
    info = xgrammar.TokenizerInfo(
        [b"", *(bytes([byte]) for byte in range(1, 256))], vocab_size=256, stop_token_ids=[0]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def check(form: dict[str, Any], text: str) -> bool:
        grammar = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
        matcher = xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(text)) and bool(matcher.is_completed())

    return check


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = (tool("f", parameters=PARAMETERS), tool("g"))
FORCED = {
    Dialect.TAGS: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    Dialect.BARE: '{"name": "f", "parameters": {"a": 1}}',
    Dialect.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    Dialect.MISTRAL_NAMED: '[TOOL_CALLS]f[ARGS]{"a": 1}',
}


@pytest.mark.parametrize("dialect", Dialect)
def test_a_forced_call_is_what_the_parser_reads(accepts, dialect: Dialect) -> None:
    text = FORCED[dialect]
    form = forced_format(ToolChoice(TOOLS, forced=True), dialect, {})
    assert accepts(form, text)
    assert read(dialect, [text]) == ("", [("f", '{"a": 1}')])
    assert not accepts(form, "")
    assert not accepts(form, text.replace("1}", '"one"}'))
    assert not accepts(form, text.replace("f", "h", 1))
    only_g = forced_format(ToolChoice(TOOLS, forced=True, only="g"), dialect, {})
    assert not accepts(only_g, text)


def test_several_calls_follow_each_other_unless_parallel_calls_are_off(accepts) -> None:
    two = FORCED[Dialect.TAGS] + "\n" + FORCED[Dialect.TAGS]
    assert accepts(forced_format(ToolChoice(TOOLS, forced=True), Dialect.TAGS, {}), two)
    single = ToolChoice(TOOLS, forced=True, parallel=False)
    assert not accepts(forced_format(single, Dialect.TAGS, {}), two)


def test_strict_tools_bind_calls_and_leave_the_text_free(accepts) -> None:
    strict = tool("f", parameters=PARAMETERS, strict=True)
    form = strict_format(ToolChoice((strict, tool("g"))), Dialect.TAGS)
    assert form is not None
    assert accepts(form, "Nothing to call here.")
    assert accepts(form, "So: " + FORCED[Dialect.TAGS])
    assert not accepts(form, "So: " + FORCED[Dialect.TAGS].replace("1}", '"one"}'))
    assert strict_format(ToolChoice(TOOLS), Dialect.TAGS) is None
