"""Chat templates: Jinja text that comes with a model, rendered in a sandbox.

Same names in scope as in transformers' `apply_chat_template`, whose template dialect models are written for:
messages, tools, documents, add_generation_prompt, the special tokens, raise_exception, strftime_now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firsttoken_runtime.model.errors import ChatTemplateError, ModelError


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here the marks mean nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template. Raises ModelError when the text is not valid Jinja."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        try:
            self._compiled = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text. Raises ChatTemplateError when the template refuses the messages."""
        scope: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled.render(scope)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message}") from None
        except Exception as error:  # a template is a program: fed with odd messages it can fail in any way
            raise ChatTemplateError(f"the chat template cannot take these messages: {error}") from None


def open_ended(text: str, last: str) -> str:
    """A rendered conversation cut behind the text of its last message, so that the answer goes on from there.

    Raises ChatTemplateError when the template does not render that text as it is.
    """
    begin = text.rfind(last.strip())
    if begin < 0 or not last.strip():
        raise ChatTemplateError(
            "the last message cannot be continued: the chat template does not show its text as it is"
        )
    # White space at its end stays where the template left it.
    whole = text.startswith(last.lstrip(), begin)
    return text[: begin + len(last.lstrip() if whole else last.strip())]
