"""Request bodies of the OpenAI routes.

Unknown fields are ignored, except those that would change the meaning of the answer: they are refused, so
that nobody takes an unconstrained answer for a constrained one. Types are strict: `"5"` is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from firsttoken_runtime.api.errors import ApiError, bad_request, from_validation

MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 1024
MOST_TOP_LOGPROBS = 20
_INT64 = 2**63
# In one number: what this build can be asked to generate at most; the model's own length is smaller.
_MOST_TOKENS = 2**31 - 1

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]

_NOT_HERE = "is not in this build; leave it out"
# Fields of the OpenAI API and of other servers that would change the answer: when they count as used.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "tools": bool,
    "functions": bool,
    "tool_choice": lambda value: value not in ("none", "auto"),
    "function_call": lambda value: value not in ("none", "auto"),
    "response_format": lambda value: not (isinstance(value, dict) and value.get("type") == "text"),
    "modalities": lambda value: value != ["text"],
    "audio": bool,
    "prediction": bool,
    "web_search_options": lambda value: value is not None,
    "suffix": bool,
    "echo": bool,
    "best_of": lambda value: value != 1,
    "use_beam_search": bool,
    "structured_outputs": bool,
    "guided_json": bool,
    "guided_regex": bool,
    "guided_choice": bool,
    "guided_grammar": bool,
    "min_tokens": bool,
    "bad_words": bool,
    "prompt_logprobs": lambda value: value is not False,
    "include_stop_str_in_output": bool,
    "continue_final_message": bool,
    "chat_template": bool,
    "logits_processors": bool,
    "truncate_prompt_tokens": bool,
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
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
    stop: Any = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @field_validator("n")
    @classmethod
    def _one_answer(cls, n: int | None) -> int | None:
        if n is not None and n != 1:
            raise ValueError(f"this build gives one answer per request, not {n}; send the request {n} times")
        return n

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

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> str | list[int]:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list):
            if _are_token_ids(prompt):
                return prompt
            if all(isinstance(item, str) or _are_token_ids(item) for item in prompt):
                if len(prompt) == 1:
                    return prompt[0]
                raise ValueError(
                    f"one prompt per request in this build, not {len(prompt)}; send one request each"
                )
        raise ValueError("must be a string or a list of token ids")

    @property
    def top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else 16


def _are_token_ids(items: Any) -> bool:
    """Whole numbers that fit the wire to the engine, which knows which of them exist."""
    return isinstance(items, list) and all(type(item) is int and -_INT64 <= item < _INT64 for item in items)


class Message(BaseModel):
    """One message; fields a template may read beyond these are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Any = None

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


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs_count: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = Field(
        None, alias="top_logprobs"
    )
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted({"messages", "tools", "add_generation_prompt", "self"} & set(variables or ()))
        if taken:
            raise ValueError(f"must not set {taken[0]}; the name is taken")
        return variables

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
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    def one_source(self) -> Self:
        """Raises ApiError unless exactly one of prompt and messages is there."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: list[int]


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
