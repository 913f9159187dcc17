"""Request bodies of the OpenAI routes.

Unknown fields are ignored, except those that would change the meaning of the answer: they are refused, so
that nobody takes an unconstrained answer for a constrained one. Types are strict: `"5"` is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from firsttoken_runtime.api import described
from firsttoken_runtime.api.errors import ApiError, bad_request, from_validation
from firsttoken_runtime.api.messages import Message, Tool

MOST_STOP_STRINGS = 16
MOST_ANSWERS_EACH = 128
MOST_ANSWERS = 1024  # over all prompts of a request
MOST_TOOLS = 256
LONGEST_STOP_STRING = 1024
MOST_TOP_LOGPROBS = 20
_INT64 = 2**63
# In one number: what this build can be asked to generate at most; the model's own length is smaller.
_MOST_TOKENS = 2**31 - 1

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]


def _free_names(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted({"messages", "tools", "add_generation_prompt", "self"} & set(variables))
    if taken:
        raise ValueError(f"must not set {taken[0]}; the name is taken")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_free_names)]

_NOT_HERE = "is not in this build; leave it out"
# Fields of the OpenAI API and of other servers that would change the answer: when they count as used.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "functions": bool,
    "function_call": lambda value: value not in ("none", "auto"),
    "modalities": lambda value: value != ["text"],
    "audio": bool,
    "prediction": bool,
    "web_search_options": lambda value: value is not None,
    "suffix": bool,
    "echo": bool,
    "use_beam_search": bool,
    "guided_whitespace_pattern": bool,
    "bad_words": bool,
    "chat_template": bool,
    "logits_processors": bool,
    "truncate_prompt_tokens": bool,
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS_EACH)] | None = None
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKENS)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, float] | None = None
    stop: Annotated[Any, WithJsonSchema(described.STOP)] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    response_format: Annotated[Any, WithJsonSchema(described.RESPONSE_FORMAT)] = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, stop: Any) -> list[str]:
        strings = [stop] if isinstance(stop, str) else (stop if stop is not None else [])
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise ValueError("must be a string or a list of strings")
        if len(strings) > MOST_STOP_STRINGS:
            raise ValueError(f"has {len(strings)} strings, and at most {MOST_STOP_STRINGS} are taken")
        if any(not 1 <= len(string) <= LONGEST_STOP_STRING for string in strings):
            raise ValueError(f"strings must have 1 to {LONGEST_STOP_STRING} characters")
        return strings

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key, value in (bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f'keys must be token ids such as "42", not {key[:20]!r}')
            if not -100 <= value <= 100:
                raise ValueError(f"values must lie between -100 and 100, not {value}")
        return bias

    def refuse_unsupported(self) -> None:
        """Raises ApiError for a field that this build cannot honour."""
        for name, value in (self.model_extra or {}).items():
            used = _UNSUPPORTED.get(name)
            if used is not None and value is not None and used(value):
                raise bad_request(f"{name} {_NOT_HERE}", param=name, code="unsupported_parameter")

    def refuse_contradictions(self) -> None:
        """Raises ApiError for fields that do not go together."""
        limit = self.token_limit
        if self.min_tokens and limit is not None and self.min_tokens > limit:
            raise bad_request(
                f"min_tokens: {self.min_tokens} are more than the {limit} that max_tokens allows",
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(
                "best_of: every answer is returned; leave it out, or give the value of n", param="best_of"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs: come with whole answers only; leave out stream", param="prompt_logprobs"
            )

    def output_formats(self) -> dict[str, Any]:
        """The fields that say what an answer must look like."""
        return {
            name: getattr(self, name)
            for name in (
                "response_format",
                "structured_outputs",
                "guided_json",
                "guided_regex",
                "guided_choice",
                "guided_grammar",
            )
        }

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def scored_prompt(self) -> int | None:
        """How many alternatives to each prompt token to report; None scores no prompt."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(described.PROMPT)]
    # 0 with echo: nothing is generated, the prompt alone comes back.
    max_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, prompt: Any) -> list[str | list[int]]:
        if isinstance(prompt, str) or _are_token_ids(prompt):
            return [prompt]
        if isinstance(prompt, list) and all(isinstance(item, str) or _are_token_ids(item) for item in prompt):
            if len(prompt) > MOST_ANSWERS:
                raise ValueError(f"has {len(prompt)} prompts, and at most {MOST_ANSWERS} are taken")
            return prompt
        raise ValueError("must be a string or a list of token ids, or a list of such prompts")

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        answers = len(self.prompt) * (self.n or 1)
        if answers > MOST_ANSWERS:
            raise bad_request(f"n: makes {answers} answers, and at most {MOST_ANSWERS} are given", param="n")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request(
                "max_tokens: must be greater than or equal to 1 (0 goes with echo only)", param="max_tokens"
            )

    @property
    def scored_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        given = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(given, default=None)

    @property
    def top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else 16


def _are_token_ids(items: Any) -> bool:
    """Whole numbers that fit the wire to the engine, which knows which of them exist."""
    return isinstance(items, list) and all(type(item) is int and -_INT64 <= item < _INT64 for item in items)


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(described.TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs_count: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = Field(
        None, alias="top_logprobs"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, choice: Any) -> Any:
        if choice is None or choice in ("none", "auto", "required"):
            return choice
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or choice.get("type") != "function":
            raise ValueError(
                'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
            )
        return choice

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        _refuse_prefill(self)
        if self.top_logprobs_count and not self.logprobs:
            raise bad_request("top_logprobs: needs logprobs to be true", param="top_logprobs")

    @property
    def top_logprobs(self) -> int | None:
        return (self.top_logprobs_count or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_unset=True) for message in self.messages]


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a prompt, or messages to render with the chat template."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None

    def one_source(self) -> Self:
        """Raises ApiError unless exactly one of prompt and messages is there."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")
        if self.messages is not None:
            _refuse_prefill(self)
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_unset=True) for message in self.messages or ()]


def _refuse_prefill(body: ChatRequest | TokenizeRequest) -> None:
    """Raises ApiError where the last message cannot be continued."""
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise bad_request(
            "continue_final_message: goes on with the last message; leave out add_generation_prompt",
            param="continue_final_message",
        )
    last = (body.messages or [])[-1]
    if last.role != "assistant" or not (last.content or "").strip() or last.tool_calls:
        raise bad_request(
            "continue_final_message: the last message must be an assistant's, with text and without calls",
            param="continue_final_message",
        )


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=-_INT64, lt=_INT64)]]


Body = TypeVar("Body", bound=BaseModel)


def parse(schema: type[Body], body: bytes) -> Body:
    """Read a request body. Raises ApiError with the first problem."""
    if not body.strip():
        raise bad_request("the body is empty; send a JSON object", code="invalid_json")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


__all__ = ["ApiError", "ChatRequest", "CompletionRequest", "DetokenizeRequest", "TokenizeRequest", "parse"]
