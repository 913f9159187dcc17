"""Tools: how a model family writes calls, how they are told to it, and which grammar forces one. Pure.

The format follows from the chat template. A template that knows no tools, or writes calls in a way that is
not read here, gets the neutral one: the tools described in the system message, calls in <tool_call> tags.
Reading calls back from text is in `tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from firsttoken_runtime.api.output_format import json_format

Json = dict[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL_CALLS, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class Dialect(StrEnum):
    """How calls are written.

    TAGS: <tool_call>{"name": …, "arguments": …}</tool_call>, as Hermes and Qwen. BARE: {"name": …,
    "parameters": …} and nothing else, as Llama 3. MISTRAL: [TOOL_CALLS] and a list; MISTRAL_NAMED:
    [TOOL_CALLS]name[ARGS]{…} for each, as its later models.
    """

    TAGS = "tags"
    BARE = "bare"
    MISTRAL = "mistral"
    MISTRAL_NAMED = "mistral named"


@dataclass(frozen=True)
class ToolFormat:
    """native: the template renders tools and calls itself."""

    dialect: Dialect
    native: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must stay in the text, also where they are special ones."""
        if self.dialect is Dialect.TAGS:
            return (OPEN, CLOSE)
        return () if self.dialect is Dialect.BARE else (MISTRAL_CALLS, MISTRAL_ARGUMENTS)


def tool_format(template: str | None) -> ToolFormat:
    """The format of a chat template (its text)."""
    text = template or ""
    if "tools" in text:
        if MISTRAL_CALLS in text:
            named = MISTRAL_ARGUMENTS in text
            return ToolFormat(Dialect.MISTRAL_NAMED if named else Dialect.MISTRAL, True)
        if OPEN in text and '"arguments"' in text:
            return ToolFormat(Dialect.TAGS, True)
        if '"parameters"' in text and '"name"' in text:
            return ToolFormat(Dialect.BARE, True)
    return ToolFormat(Dialect.TAGS, False)


@dataclass(frozen=True)
class ToolChoice:
    """What a request wants of its tools. forced: at least one call; only: the name of the one that must be
    called. parallel: several calls may follow each other."""

    tools: tuple[Json, ...]
    forced: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> list[Json]:
        """The functions that a forced call may name."""
        functions = [tool["function"] for tool in self.tools]
        return [each for each in functions if self.only in (None, each["name"])]


# Telling


def template_messages(messages: Iterable[Json], form: ToolFormat, tools: Sequence[Json]) -> list[Json]:
    """Messages for the template: arguments as objects where it renders calls, as text where we do."""
    if form.native:
        return [_with_objects(message) for message in messages]
    plain: list[Json] = []
    before = ""
    for message in messages:
        _append(plain, message, joined=before == message["role"] == "tool")
        before = message["role"]
    if tools:
        described = _description(tools)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{described}".lstrip()}
        else:
            plain.insert(0, {"role": "system", "content": described})
    return plain


def _with_objects(message: Json) -> Json:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments(call)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def arguments(call: Mapping[str, Any]) -> Any:
    """Arguments of a call in a message: an object. Raises ValueError for text that is not JSON."""
    given = call["function"].get("arguments")
    if given is None or given == "":
        return {}
    return json.loads(given) if isinstance(given, str) else given


def _append(messages: list[Json], message: Json, joined: bool) -> None:
    """Add a message in words that every template has: no calls, no role `tool`. joined: to the one before."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        if joined:
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user", "content": text})
        return
    if message.get("tool_calls"):
        said = [message["content"]] if message.get("content") else []
        for call in message["tool_calls"]:
            body = {"name": call["function"]["name"], "arguments": arguments(call)}
            said.append(f"{OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE}")
        messages.append({"role": message["role"], "content": "\n".join(said)})
        return
    messages.append({**message, "content": message.get("content") or ""})


def _description(tools: Sequence[Json]) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. These are their signatures:\n"
        f"<tools>\n{signatures}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments, like this:\n"
        f'{OPEN}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n{CLOSE}'
    )


# Forcing


def forced_format(choice: ToolChoice, dialect: Dialect, token_ids: Mapping[str, int]) -> Json:
    """The structural tag of one or more calls and nothing else. token_ids: of the markers the model has."""
    functions = choice.callable
    if dialect is Dialect.MISTRAL_NAMED:
        return _either([_named_call(each, token_ids) for each in functions])
    if dialect is Dialect.MISTRAL:
        calls = _calls([_tag(each, '{"name": %s, "arguments": ', "}") for each in functions], ", ", choice)
        start = _marker(MISTRAL_CALLS, token_ids)
        return _sequence([start, _constant("["), calls, _constant("]")])
    if dialect is Dialect.BARE:
        return _calls([_tag(each, '{"name": %s, "parameters": ', "}") for each in functions], "; ", choice)
    return _calls([_tagged(each) for each in functions], "\n", choice)


def strict_format(choice: ToolChoice, dialect: Dialect) -> Json | None:
    """Free text in which calls of tools with `strict` keep to their schema; None where nothing is asked."""
    if dialect is not Dialect.TAGS or not any(each.get("strict") for each in choice.callable):
        return None
    tags = [_tagged(each if each.get("strict") else {"name": each["name"]}) for each in choice.callable]
    return {
        "type": "triggered_tags",
        "triggers": [OPEN],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not choice.parallel,
    }


def _tagged(function: Json) -> Json:
    return _tag(function, OPEN + '\n{"name": %s, "arguments": ', "}\n" + CLOSE)


def _tag(function: Json, begin: str, end: str) -> Json:
    name = json.dumps(function["name"])
    return {"type": "tag", "begin": begin % name, "content": _parameters(function), "end": end}


def _named_call(function: Json, token_ids: Mapping[str, int]) -> Json:
    return _sequence(
        [
            _marker(MISTRAL_CALLS, token_ids),
            _constant(function["name"]),
            _marker(MISTRAL_ARGUMENTS, token_ids),
            _parameters(function),
        ]
    )


def _parameters(function: Json) -> Json:
    return json_format(function.get("parameters") or {"type": "object"})


def _calls(tags: list[Json], separator: str, choice: ToolChoice) -> Json:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": choice.only is not None or not choice.parallel,
    }


def _marker(text: str, token_ids: Mapping[str, int]) -> Json:
    return {"type": "token", "token": token_ids[text]} if text in token_ids else _constant(text)


def _constant(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _sequence(elements: list[Json]) -> Json:
    return {"type": "sequence", "elements": elements}


def _either(elements: list[Json]) -> Json:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
