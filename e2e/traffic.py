"""Real clients that keep asking while something is changed, and what they saw."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import httpx
import openai

ANSWER_TOKENS = 24
QUESTION = "Name three colours of the rainbow and say one sentence about each."


def ask(client: openai.OpenAI, model: str, question: str = QUESTION, tokens: int = ANSWER_TOKENS) -> str:
    """One greedy chat answer, streamed to its end."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    return "".join(pieces)


@dataclass
class Traffic:
    """`callers` threads asking the same question until stopped. At most `most` requests in all."""

    url: str
    model: str
    callers: int = 2
    most: int = 400
    answers: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.callers)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():
                self.errors.append("a caller got neither an answer nor an error within 60 s")

    def wait_for_answers(self, more: int, timeout_seconds: float = 60) -> None:
        """Wait until `more` further answers came in."""
        wanted = len(self.answers) + more
        deadline = time.monotonic() + timeout_seconds
        while len(self.answers) < wanted and not self.errors:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.answers)} answers after {timeout_seconds} s, wanted {wanted}")
            time.sleep(0.05)

    def _run(self) -> None:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        while not self._stop.is_set() and len(self.answers) + len(self.errors) < self.most:
            try:
                self.answers.append(ask(client, self.model))
            except (openai.OpenAIError, httpx.HTTPError) as error:  # the latter when a stream breaks off
                self.errors.append(f"{type(error).__name__}: {error}")
