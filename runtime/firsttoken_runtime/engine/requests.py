"""What the API process asks of the engine, and what it gets back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

NO_TOKEN = -1
NOT_GENERATED = -1


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class AdmissionError(Exception):
    """A request that is not taken; the text has the numbers and says what would be right.

    code: one of `empty_prompt`, `token_out_of_range`, `prompt_too_long`, `pool_too_small`, `duplicate_id`,
    `queue_full`, `ttft_limit`, `draining`, `invalid_grammar`, `grammar_busy`. status: the HTTP status that
    fits (400, 409, 429 or 503).
    """

    def __init__(
        self, code: str, message: str, status: int, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked, and when to stop. Raises ValueError on values that make no sense.

    max_tokens: tokens to generate at most. temperature 0: greedy. top_k 0, top_p 1, min_p 0: off.
    seed: None means the engine draws one. logprobs: how many alternatives to report beside the chosen token's
    log probability; None reports neither. logit_bias: token id to what is added to its logit. min_tokens: no
    stop token before. prompt_logprobs: like logprobs, of the prompt's own tokens. grammar: a structural tag
    (xgrammar's JSON), which the answer keeps to.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        rules = (
            (self.max_tokens >= 1, f"max_tokens must be 1 or more, not {self.max_tokens}"),
            (_within(self.temperature, 0), f"temperature must be 0 or more, not {self.temperature}"),
            (
                _within(self.top_p, 0, 1) and self.top_p > 0,
                f"top_p must be above 0, at most 1, not {self.top_p}",
            ),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (_within(self.min_p, 0, 1), f"min_p must be from 0 to 1, not {self.min_p}"),
            (
                _within(self.repetition_penalty, 0) and self.repetition_penalty > 0,
                f"repetition_penalty must be above 0, not {self.repetition_penalty}",
            ),
            (math.isfinite(self.presence_penalty), "presence_penalty must be a finite number"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty must be a finite number"),
            (self.logprobs is None or self.logprobs >= 0, f"logprobs must be 0 or more, not {self.logprobs}"),
            (
                all(math.isfinite(bias) for bias in self.logit_bias.values()),
                "logit_bias must be finite numbers",
            ),
            (self.min_tokens >= 0, f"min_tokens must be 0 or more, not {self.min_tokens}"),
            (
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                f"prompt_logprobs must be 0 or more, not {self.prompt_logprobs}",
            ),
            (all(token >= 0 for token in self.logit_bias), "logit_bias keys must be token ids of 0 or more"),
        )
        problems = [problem for right, problem in rules if not right]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def penalised(self) -> bool:
        """Whether logits change with what was said before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _within(value: float, low: float, high: float = math.inf) -> bool:
    return math.isfinite(value) and low <= value <= high


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    arrival_ns: monotonic clock, when the server received the request; TTFT and ageing count from it.
    priority: lower goes first. cache_salt: requests share cached pages only with those of the same salt.
    ttft_limit_seconds: refuse it at once when its first token would come later, counted from arrival_ns.
    follows: a further answer to the prompt of an admitted request; it is not refused for load.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival_ns: int
    priority: int = 0
    cache_salt: str = ""
    ttft_limit_seconds: float | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What the model thought of a prompt token. rank: 1 for its likeliest token. top: the likeliest ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, or the end of a request without one (`token` is NO_TOKEN on abort and error).

    index: place among the generated tokens, from 0. logprob and top: of the model's own distribution, before
    bias, penalties, temperature and truncation. prompt: scores of the next prompt tokens, from the second one
    on; an event that brings some is of no token (index NOT_GENERATED) and comes before index 0.

    The stamps (monotonic clock) and counts come with index 0 only, and with an end before the first token as
    far as there are any. queued_ns: the engine took the request; admitted_ns: begin of the first step that
    computed a token of it; prefill_start_ns: its first chunk went to the model (before any preemption);
    prefill_end_ns: its last prompt chunk left the model; sampled_ns: token picked. computing_ns: its share,
    by tokens, of the model time of the steps that computed its prompt. chunks: how many those were.
    preemptions: before this token.
    """

    request_id: str
    token: int
    index: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: str | None = None
    prefill_start_ns: int | None = None
    prefill_end_ns: int | None = None
    sampled_ns: int | None = None
    cached_tokens: int | None = None
    prompt: tuple[TokenScore, ...] = ()
    queued_ns: int | None = None
    admitted_ns: int | None = None
    computing_ns: int = 0
    chunks: int = 0
    preemptions: int = 0
