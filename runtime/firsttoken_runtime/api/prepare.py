"""From a request's body to what the engine is asked: prompt text, grammar, sampling parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from firsttoken_runtime.api.bodies import Prompt
from firsttoken_runtime.api.choices import choice_seed
from firsttoken_runtime.api.errors import ApiError, bad_request
from firsttoken_runtime.api.output_format import FormatError, encode_format, read_format
from firsttoken_runtime.api.schemas import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from firsttoken_runtime.api.tool_calls import ToolCallParser
from firsttoken_runtime.api.tools import (
    ToolChoice,
    ToolFormat,
    forced_format,
    strict_format,
    template_messages,
    tool_format,
)
from firsttoken_runtime.engine.requests import SamplingParams
from firsttoken_runtime.model.chat_template import open_ended

if TYPE_CHECKING:
    from firsttoken_runtime.model.tokenizer import Tokenizer

Json = dict[str, Any]
# As the gateways of the Gateway API Inference Extension and of llm-d send it.
TTFT_LIMIT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")


@dataclass(frozen=True)
class Conversation:
    """A chat request, read with the model's tool format. tools: None where none are offered."""

    body: ChatRequest | TokenizeRequest
    form: ToolFormat
    tools: ToolChoice | None

    def render(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the prompt. Raises ChatTemplateError, ModelError, UnicodeEncodeError."""
        body = self.body
        tools = list(self.tools.tools) if self.tools else []
        prefill = bool(body.continue_final_message)
        messages = body.template_messages()
        text = tokenizer.render_chat(
            template_messages(messages, self.form, tools),
            add_generation_prompt=not prefill and body.add_generation_prompt is not False,
            tools=tools if tools and self.form.native else None,
            **(body.chat_template_kwargs or {}),
        )
        if prefill:
            text = open_ended(text, messages[-1]["content"])
        return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

    def grammar(self, tokenizer: Tokenizer) -> str | None:
        """The answer's grammar. Raises ApiError 400."""
        assert isinstance(self.body, ChatRequest)
        asked = _asked_format(self.body)
        if self.tools is None:
            return _encoded(*asked) if asked else None
        if self.tools.forced:
            return _encoded(
                "tools", forced_format(self.tools, self.form.dialect, self._marker_ids(tokenizer))
            )
        if asked is None:
            strict = strict_format(self.tools, self.form.dialect)
            return _encoded("tools", strict) if strict else None
        calls = forced_format(self.tools, self.form.dialect, self._marker_ids(tokenizer))
        param, form = asked
        if form.get("type") == "structural_tag":
            raise bad_request(f"{param}: a structural tag cannot be combined with tools", param=param)
        return _encoded(param, {"type": "or", "elements": [calls, form]})

    def parser(self) -> Callable[[], ToolCallParser] | None:
        """Makes the reader of calls for an answer."""
        if self.tools is None:
            return None
        dialect = self.form.dialect
        return lambda: ToolCallParser(dialect)

    def kept_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that stay in the text, because calls are told by them."""
        return frozenset(self._marker_ids(tokenizer).values()) if self.tools else frozenset()

    def _marker_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        return marker_ids(tokenizer, self.form)


def marker_ids(tokenizer: Tokenizer, form: ToolFormat) -> dict[str, int]:
    """Ids of the format's markers that are tokens of the model."""
    ids = {marker: tokenizer.token_id(marker) for marker in form.markers}
    return {marker: id for marker, id in ids.items() if id is not None}


def conversation(body: ChatRequest | TokenizeRequest, template: str | None) -> Conversation:
    """Read tools and tool choice. Raises ApiError 400."""
    form = tool_format(template)
    tools = tuple(tool.model_dump(exclude_unset=True) for tool in body.tools or ())
    choice = body.tool_choice if isinstance(body, ChatRequest) else None
    if choice == "none":
        return Conversation(body, form, None)
    if not tools:
        if choice not in (None, "auto"):
            raise bad_request("tool_choice: asks for a call, and there are no tools", param="tool_choice")
        return Conversation(body, form, None)
    parallel = not isinstance(body, ChatRequest) or body.parallel_tool_calls is not False
    only = choice["function"]["name"] if isinstance(choice, dict) else None
    if only is not None and only not in (tool["function"]["name"] for tool in tools):
        raise bad_request(f"tool_choice: no tool has the name {only!r}", param="tool_choice")
    forced = choice == "required" or only is not None
    return Conversation(body, form, ToolChoice(tools, forced, only, parallel))


def completion_grammar(body: CompletionRequest) -> str | None:
    """The answers' grammar. Raises ApiError 400."""
    asked = _asked_format(body)
    return _encoded(*asked) if asked else None


def completion_prompt(body: CompletionRequest, given: str | list[int], tokenizer: Tokenizer) -> Prompt:
    """One prompt of a completion. Raises UnicodeEncodeError."""
    if isinstance(given, str):
        tokens, text = tokenizer.encode(given, add_special_tokens=body.add_special_tokens is not False), given
    else:
        tokens = given
        # Ids that do not exist are the engine's to refuse.
        shown = body.echo and all(0 <= id < tokenizer.vocab_size for id in given)
        text = tokenizer.decode(given, body.skip_special_tokens is not False) if shown else ""
    return Prompt(tokens, text if body.echo else None, body.prompt_logprobs is not None)


def _asked_format(body: GenerationRequest) -> tuple[str, Json] | None:
    try:
        return read_format(body.output_formats())
    except FormatError as error:
        raise _refused(error) from None


def _encoded(param: str, form: Json) -> str:
    try:
        return encode_format(param, form)
    except FormatError as error:
        raise _refused(error) from None


def _refused(error: FormatError) -> ApiError:
    return bad_request(str(error), param=error.param, code="invalid_grammar")


def vocabulary(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token, for grammars.

    Special tokens have none and never come, but for those that mark tool calls.
    """
    kept = frozenset(marker_ids(tokenizer, tool_format(tokenizer.chat_template)).values())
    return [
        b"" if id in tokenizer.special_ids and id not in kept else tokenizer.token_bytes(id)
        for id in range(tokenizer.vocab_size)
    ]


def sampling_params(
    body: ChatRequest | CompletionRequest,
    max_model_len: int,
    seeds: random.Random,
    grammar: str | None = None,
) -> SamplingParams:
    """What the engine needs to pick tokens; what the caller left out has the OpenAI defaults.

    max_model_len: the limit of an answer without one; the engine cuts it to what the prompt leaves.
    seeds: draws the seed of a request that brings none.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=max_model_len if body.token_limit is None else max(body.token_limit, 1),
        temperature=temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=seeds.getrandbits(63) if body.seed is None and temperature > 0 else body.seed,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.top_logprobs,
        logit_bias={int(key): value for key, value in (body.logit_bias or {}).items()},
        min_tokens=body.min_tokens or 0,
        prompt_logprobs=body.scored_prompt,
        grammar=grammar,
    )


def follower(params: SamplingParams, answer: int) -> SamplingParams:
    """The parameters of a further answer: another seed, and the prompt is not scored again."""
    seed = params.seed if params.seed is None else choice_seed(params.seed, answer)
    return replace(params, seed=seed, prompt_logprobs=None)


def ttft_limit(headers: Mapping[str, str]) -> float | None:
    """Seconds that the caller gives the first token, from the headers that gateways send; None without one.

    Raises ApiError 400 for what is no time.
    """
    for name in TTFT_LIMIT_HEADERS:
        if (text := headers.get(name)) is None:
            continue
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = math.nan
        if not 0 < milliseconds < math.inf:
            raise bad_request(f"{name}: {text[:40]!r} is no time; write milliseconds, as in 500", param=name)
        return milliseconds / 1e3
    return None
