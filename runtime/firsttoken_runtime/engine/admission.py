"""What is refused before it waits: requests that can never run."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken_runtime.engine.page_needs import PageNeeds, least_pages, pages_for
from firsttoken_runtime.engine.requests import AdmissionError, Request
from firsttoken_runtime.model.windows import Window


@dataclass(frozen=True)
class Limits:
    """What one sequence may take. max_model_len: prompt and output tokens together.

    window: what no layer of the model sees beyond by itself. That of a switch does not count: no request is
    let in that could not go on once the switch is taken back.
    """

    max_model_len: int
    total_pages: int
    page_tokens: int
    vocab_size: int | None = None
    window: Window | None = None

    @property
    def pool_tokens(self) -> int:
        """Tokens of one sequence for which the pool suffices."""
        return PageNeeds.of(self.page_tokens, self.total_pages, self.window).longest


def check(request: Request, limits: Limits) -> int:
    """Tokens the request may generate: what it asks for, cut to what fits the model's length and the pool.

    The last token generated needs no KV. Raises AdmissionError (status 400) when not even one token fits.
    """
    length = len(request.prompt)
    if not length:
        raise AdmissionError("empty_prompt", "the prompt has no tokens; send at least one", 400)
    if limits.vocab_size is not None:
        for name, tokens in (("the prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
            if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
                raise AdmissionError(
                    "token_out_of_range",
                    f"{name} has token {wrong}; this model has tokens 0 to {limits.vocab_size - 1}",
                    400,
                )
    check_length(length, limits)
    return min(request.sampling.max_tokens, limits.max_model_len - length, limits.pool_tokens + 1 - length)


def check_length(length: int, limits: Limits) -> None:
    """Raises AdmissionError (status 400, with the numbers) for a prompt of so many tokens that never fits."""
    if length + 1 > limits.max_model_len:
        excess = length + 1 - limits.max_model_len
        raise AdmissionError(
            "prompt_too_long",
            f"the prompt has {length} tokens, and with one token to generate {length + 1}; this server takes "
            f"{limits.max_model_len} in all; shorten it by {excess} token{'s' if excess > 1 else ''}",
            400,
        )
    if length > limits.pool_tokens:
        needed = pages_for(length, limits.page_tokens)
        if limits.window is not None:
            needed = min(needed, least_pages(limits.page_tokens, limits.window))
        raise AdmissionError(
            "pool_too_small",
            f"the prompt has {length} tokens and needs {needed} KV pages; the pool has {limits.total_pages} "
            f"of {limits.page_tokens} tokens; shorten it to {limits.pool_tokens} tokens, or serve with more "
            "KV memory",
            400,
        )
