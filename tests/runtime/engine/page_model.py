"""A model runner without a model, for tests: what it answers depends on what is really in the pages.

Every slot of a page holds a digest of the token written there, its position and, read back through the page
table, the digest of the slot before it; so a page's content depends on the whole prefix, as real KV does. The
next token is a digest of all slots of the context, read through the page table. One wrong, stale or foreign
page gives a wrong token; `expected` computes the same on the plain list of tokens. With a window the digest
is of the slots that the last query sees, and a page that was given back must not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from firsttoken_api.switches import SwitchMessage, parse_message
from firsttoken_runtime.engine.draft import DraftModel
from firsttoken_runtime.engine.engine import Engine, EngineSettings
from firsttoken_runtime.engine.pages import Holder
from firsttoken_runtime.engine.requests import Finish, Request, SamplingParams, TokenEvent
from firsttoken_runtime.engine.sampling import Row, TokenCounts, sample
from firsttoken_runtime.model.kv_pool import KvBudget, KvShape, KvTable
from firsttoken_runtime.model.runner import Chunk
from firsttoken_runtime.model.windows import LayerWindows, Window, layer_windows, widest

VOCAB = 97
EOS = 0
_PRIME = (1 << 61) - 1


def _slot(before: int, token: int, position: int) -> int:
    return (before * 6364136223846793005 + token * 1442695040888963407 + position + 1) % _PRIME


def _logits(slots: Sequence[int], last: int, repeats: bool) -> torch.Tensor:
    """A spread-out distribution with a clear winner, made from the context's digest.

    repeats: mostly the winner follows from the last token alone, in short cycles; the digest steps in at one
    place in sixteen.
    """
    digest = hash(tuple(slots))
    row = torch.remainder(torch.arange(VOCAB) * (digest % 7919) + digest % 104729, 31).float() / 8
    if repeats and digest % 16:
        row[1 + last * 3 % 7] = 9.0
    else:
        row[digest % VOCAB] = 5.0
    return row


def seen(end: int, window: Window | None) -> list[int]:
    """Positions that the query at end - 1 sees."""
    if window is None:
        return list(range(end))
    return [at for at in range(end) if at < window.sinks or at >= end - window.tokens]


def expected(
    request: Request,
    max_tokens: int,
    eos: tuple[int, ...] = (EOS,),
    repeats: bool = False,
    windows: Sequence[Window | None] = (None,),
) -> list[int]:
    """Output tokens of a request, computed on the plain list of tokens.

    windows: in force for each output token; the last one for all that follow.
    """
    params = request.sampling
    counts = TokenCounts(params, request.prompt) if TokenCounts.needed(params) else None
    tokens, slots = list(request.prompt), list[int]()
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    while True:
        for position in range(len(slots), len(tokens)):
            slots.append(_slot(slots[-1] if slots else 0, tokens[position], position))
        row = Row(params, params.seed or 0, len(tokens), counts)
        window = windows[min(len(tokens) - len(request.prompt), len(windows) - 1)]
        read = [slots[at] for at in seen(len(slots), window)]
        token = sample(_logits(read, tokens[-1], repeats).unsqueeze(0), [row])[0].token
        assert token is not None
        tokens.append(token)
        if counts is not None:
            counts.add(token)
        if token in stop or len(tokens) - len(request.prompt) >= max_tokens:
            return tokens[len(request.prompt) :]


@dataclass
class Clock:
    """Nanoseconds that pass only when told to."""

    now_ns: int = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_seconds(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass
class PageModel:
    """The runner. seconds_per_token: what a computed token takes on `clock`. repeats: see `_logits`.
    errs: of a draft: at one place in so many it says something else than the model it drafts for.
    own_windows: of its layers."""

    total_pages: int
    page_tokens: int
    clock: Clock | None = None
    seconds_per_token: float = 0.0
    reasons: dict[str, str | None] = field(default_factory=dict)
    fail: Callable[[Sequence[Chunk]], Exception | None] = lambda chunks: None
    steps: list[list[Chunk]] = field(default_factory=list)
    repeats: bool = False
    errs: int = 0
    kv_tables: list[KvTable] = field(default_factory=list)
    own_windows: tuple[int | None, ...] = (None, None)

    def __post_init__(self) -> None:
        self.window = widest(layer_windows(self.own_windows))
        self.slots = [[-1] * self.page_tokens for _ in range(self.total_pages)]

    def capabilities(self) -> dict[str, str | None]:
        return self.reasons

    def set_fused_kernels(self, allowed: bool) -> None:
        self.fused = allowed

    @property
    def kv(self) -> KvBudget:
        """256 bytes per token at model precision, 72 with fp8 or int8, 48 with int4."""
        return KvBudget(KvShape(2, 1, 16, torch.float32, self.page_tokens), self.total_pages)

    def set_kv_table(self, table: KvTable) -> int:
        self.kv_tables.append(table)
        self.slots = [[-1] * self.page_tokens for _ in range(self.kv.pages_at(table))]
        return len(self.slots)

    def set_windows(self, windows: LayerWindows) -> None:
        self.window = widest(windows)

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if not all(chunk.token_ids for chunk in chunks):
            raise AssertionError("an empty chunk")
        self.steps.append([Chunk(tuple(c.token_ids), c.start, tuple(c.pages), c.logits) for c in chunks])
        if self.clock is not None:
            self.clock.pass_seconds(self.seconds_per_token * sum(len(c.token_ids) for c in chunks))
        error = self.fail(chunks)
        rows = []
        for chunk in chunks:
            for offset, token in enumerate(chunk.token_ids):
                self._write(chunk, chunk.start + offset, token)
        if error is not None:  # a failed step may have written any part of what it was to write
            raise error
        for chunk in chunks:
            for end in range(chunk.end - chunk.logits + 1, chunk.end + 1):
                slots = [self._read(chunk, position) for position in seen(end, self.window)]
                row = _logits(slots, chunk.token_ids[end - chunk.end - 1], self.repeats)
                wrong = self.errs and hash(tuple(slots)) % self.errs == 0
                rows.append(row.roll(1) if wrong else row)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _write(self, chunk: Chunk, position: int, token: int) -> None:
        before = self._read(chunk, position - 1) if position else 0
        page = chunk.pages[position // self.page_tokens]
        self.slots[page][position % self.page_tokens] = _slot(before, token, position)

    def _read(self, chunk: Chunk, position: int) -> int:
        page = chunk.pages[position // self.page_tokens]
        assert page >= 0, f"position {position} is read, its page was given back"
        return self.slots[page][position % self.page_tokens]


def message(generation: int = 1, **switches: object) -> SwitchMessage:
    """A switch message; a switch is True, False or a dict of parameters (then it is on)."""
    body = {
        name: {"enabled": value} if isinstance(value, bool) else {"enabled": True, **value}
        for name, value in switches.items()
    }
    return parse_message({"generation": generation, "switches": body})


class Bench:
    """An engine on a page model, with every event kept."""

    def __init__(
        self,
        total_pages: int = 64,
        page_tokens: int = 4,
        max_model_len: int = 4096,
        seconds_per_token: float = 0.0,
        switches: SwitchMessage | None = None,
        repeats: bool = False,
        draft_pages: int = 0,
        draft_errs: int = 0,
        layer_windows: tuple[int | None, ...] = (None, None),
        **settings: object,
    ) -> None:
        self.clock = Clock()
        self.model = PageModel(
            total_pages,
            page_tokens,
            self.clock,
            seconds_per_token,
            repeats=repeats,
            own_windows=layer_windows,
        )
        self.draft_model = PageModel(max(draft_pages, 1), 4, repeats=repeats, errs=draft_errs)
        draft = DraftModel(self.draft_model, draft_pages, 4, max_model_len, VOCAB) if draft_pages else None
        self.engine = Engine(
            self.model,
            EngineSettings(
                total_pages,
                page_tokens,
                max_model_len,
                **{
                    "eos_token_ids": (EOS,),
                    "vocab_size": VOCAB,
                    "page_bytes": 1024,
                    "kv": self.model.kv,
                    "layer_windows": layer_windows,
                    **settings,
                },
            ),
            switches or message(),
            self.clock,
            draft,
        )
        self.failures: list[Exception] = []  # for the next steps to fail with
        self.injected = 0
        self.model.fail = self._before_write
        self.windows: dict[str, list[Window | None]] = {}  # in force for each token
        self.requests: dict[str, Request] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.finished_at: dict[str, int] = {}
        self.first_at: dict[str, int] = {}

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        ttft_limit_seconds: float | None = None,
        arrival_ns: int | None = None,
        **sampling: object,
    ) -> str:
        sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
        request = Request(
            id or f"r{len(self.requests)}",
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, **sampling),
            self.clock.now_ns if arrival_ns is None else arrival_ns,
            priority,
            cache_salt,
            ttft_limit_seconds=ttft_limit_seconds,
        )
        self.engine.add(request)
        self.requests[request.id] = request
        self.events[request.id] = []
        self.windows[request.id] = []
        return request.id

    def _before_write(self, chunks: Sequence[Chunk]) -> Exception | None:
        """What a step writes to belongs to one sequence alone: shared pages are only ever read."""
        pool = self.engine._tables.pool
        written = [page for chunk in chunks for page in chunk.pages[chunk.start // self.model.page_tokens :]]
        assert len(set(written)) == len(written)
        assert min(written) >= 0
        assert all(pool.holder(page) is Holder.SEQUENCE for page in written)
        if not self.failures:
            return None
        self.injected += 1
        return self.failures.pop()

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        assert self.engine.stats()["failed_steps"] == self.injected, "the runner refused a step"
        for event in events:
            self.events[event.request_id].append(event)
            self.windows[event.request_id] += [self.model.window] * (event.token >= 0)
            if event.index == 0 and event.token >= 0:
                self.first_at[event.request_id] = self.clock.now_ns
            if event.finish is not None:
                self.finished_at[event.request_id] = self.clock.now_ns
        return events

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, most_steps: int = 5000) -> int:
        """Step until nothing is left; returns the number of steps, and fails on a stall."""
        for count in range(most_steps):
            if not self.engine.has_work():
                return count
            self.step()
            assert self.engine.stats()["steps_without_progress"] == 0, "requests are here, and nothing runs"
        raise AssertionError(f"not done after {most_steps} steps: {self.engine.requests()}")

    def check(self) -> None:
        """Every page is accounted for."""
        report = self.engine.integrity()
        assert report["ok"], report["problems"]

    def tokens(self, id: str) -> list[int]:
        return [event.token for event in self.events[id] if event.token >= 0]

    def finish(self, id: str) -> str | None:
        return self.events[id][-1].finish if self.events[id] else None

    def cached(self, id: str) -> int | None:
        return self.events[id][0].cached_tokens

    def assert_right(self, *ids: str) -> None:
        """The tokens are those of the plain list, and the request ended by itself."""
        for id in ids or self.requests:
            request = self.requests[id]
            assert self.finish(id) in (Finish.STOP, Finish.LENGTH), (id, self.finish(id))
            tokens = self.tokens(id)
            most = request.sampling.max_tokens
            right = self.expected(id)
            assert tokens == right[: len(tokens)], id
            assert self.finish(id) == Finish.STOP or len(tokens) <= most

    def expected(self, id: str) -> list[int]:
        """Output tokens of a request, with the windows that were in force for each."""
        request = self.requests[id]
        windows = self.windows[id] or [self.model.window]
        return expected(request, request.sampling.max_tokens, repeats=self.model.repeats, windows=windows)

    def assert_drained(self) -> None:
        """Nobody is here, and every page is free or cached."""
        self.check()
        pages = self.engine.pages()
        assert pages["free"] + pages["cached"] == pages["total"], pages

    def computed_per_step(self) -> list[int]:
        return [sum(len(chunk.token_ids) for chunk in chunks) for chunks in self.model.steps]


def prompt(length: int, salt: int = 1) -> list[int]:
    """A prompt without inner repetition of pages."""
    return [1 + (salt * 31 + i * i + i * salt) % (VOCAB - 1) for i in range(length)]
