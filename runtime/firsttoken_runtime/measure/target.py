"""A server that has been asked what it is and can: what every load is sent to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from firsttoken_runtime.measure.client import BenchError, Dialect, Sample, complete, probe
from firsttoken_runtime.measure.load import Round
from firsttoken_runtime.measure.prompts import Prompts, WordRate, words_of
from firsttoken_runtime.measure.server import TokenCounter, served_model

CONNECT_SECONDS = 5.0
_FEW, _MANY = 24, 120  # words of the two texts that tell how many tokens a word has


@dataclass(frozen=True)
class Address:
    """Where the server is and how to get in.

    model: None takes the first it serves. key_file, key_variable: where the API key is, if it wants one; the
    key itself is on no command line. timeout_seconds: of one request.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    chat: bool = False
    ignore_eos: bool = True
    key_file: Path | None = None
    key_variable: str | None = None
    timeout_seconds: float = 600.0

    def headers(self) -> dict[str, str]:
        """Raises BenchError when a key is announced and not there."""
        if self.key_file is not None and self.key_variable is not None:
            raise BenchError("use one of --api-key-file and --api-key-env")
        key = None
        if self.key_file is not None:
            try:
                key = self.key_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise BenchError(f"the API key file {self.key_file} cannot be read: {error}") from None
        elif self.key_variable is not None:
            key = os.environ.get(self.key_variable, "").strip()
        if key == "":
            where = self.key_file or f"environment variable {self.key_variable}"
            raise BenchError(f"no API key in {where}")
        return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class Target:
    """model: its name. max_tokens: longest prompt and answer together, where the server says it.

    counted_by: who counts tokens, for the report. notes: what the server does not understand.
    template_tokens: what the chat template adds to every prompt, as far as it is known.
    """

    client: httpx.AsyncClient
    model: str
    dialect: Dialect
    timeout_seconds: float
    prompts: Prompts
    counter: TokenCounter
    max_tokens: int | None = None
    counted_by: str = "usage"
    notes: tuple[str, ...] = field(default=())
    template_tokens: int = 0

    async def send(self, prompt: str, max_tokens: int) -> Sample:
        """One request. Raises RequestError when it fails."""
        return await complete(
            self.client,
            self.model,
            prompt,
            max_tokens,
            dialect=self.dialect,
            timeout_seconds=self.timeout_seconds,
        )

    async def counted(self, done: Round) -> Round:
        """`done` with the answers counted by the server's tokenizer where its stream did not say their
        length.
        """
        if self.counted_by != "/tokenize":
            return done
        outcomes = []
        for outcome in done.outcomes:
            sample = outcome.sample
            if sample is not None and sample.output_tokens is None:
                sample = replace(sample, output_tokens=await self.counter.count(sample.text))
            outcomes.append(replace(outcome, sample=sample))
        return replace(done, outcomes=tuple(outcomes))


@asynccontextmanager
async def connected(address: Address, seed: int, run: str) -> AsyncIterator[Target]:
    """Ask the server what it serves and understands, and how many tokens a word has. Raises BenchError."""
    timeouts = httpx.Timeout(None, connect=CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        client = httpx.AsyncClient(
            base_url=_root(address.url), headers=address.headers(), timeout=timeouts, limits=limits
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise BenchError(f"--url {address.url!r}: {error}") from None
    async with client:
        yield await _ask(client, address, seed, run)


def _root(url: str) -> str:
    """Without the `/v1` that OpenAI clients want at the end."""
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise BenchError(f"--url {url!r}: write it with http:// or https://")
    return root


async def _ask(client: httpx.AsyncClient, address: Address, seed: int, run: str) -> Target:
    served = await served_model(client, address.model)
    counter = TokenCounter(client, served.name)
    short, long = (" ".join(words_of(seed, run, ("first", count), count)) for count in (_FEW, _MANY))
    wanted = Dialect(chat=address.chat, ignore_eos=address.ignore_eos)
    dialect, first = await probe(client, served.name, short, wanted, address.timeout_seconds)
    notes = []
    if wanted.ignore_eos and not dialect.ignore_eos:
        notes.append("the server does not know ignore_eos: answers may be shorter than asked for")
    short_tokens, long_tokens = await counter.count(short), await counter.count(long)
    tokenizer = short_tokens is not None and long_tokens is not None
    fixed = (first.prompt_tokens - short_tokens) if first.prompt_tokens and short_tokens is not None else 0
    if not tokenizer:
        second = await complete(
            client, served.name, long, 8, dialect=dialect, timeout_seconds=address.timeout_seconds
        )
        short_tokens, long_tokens = first.prompt_tokens, second.prompt_tokens
    rate = WordRate()
    if short_tokens is not None and long_tokens is not None:
        rate = WordRate.of((_FEW, short_tokens), (_MANY, long_tokens))
    else:
        notes.append("the server counts no tokens: a word is taken for one, prompt lengths are estimates")
    counts = "usage" if first.output_tokens is not None else "/tokenize" if tokenizer else "chunks"
    if counts == "chunks":
        notes.append("the server counts no tokens: every chunk of text is taken for one token")
    return Target(
        client=client,
        model=served.name,
        dialect=dialect,
        timeout_seconds=address.timeout_seconds,
        prompts=Prompts(seed, run, rate, counter.count if tokenizer else None, fixed if tokenizer else 0),
        counter=counter,
        max_tokens=served.max_tokens,
        counted_by=counts,
        notes=tuple(notes),
        template_tokens=max(fixed, 0) if dialect.chat else 0,
    )
