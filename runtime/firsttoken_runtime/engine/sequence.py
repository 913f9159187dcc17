"""A request on its way through the engine: its tokens, how far they are computed, and on which pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from firsttoken_runtime.engine.prefix import NO_HIT, Hit, Namespace, PageKey, PrefixHandle
from firsttoken_runtime.engine.requests import Request

if TYPE_CHECKING:
    from firsttoken_runtime.engine.grammar import Constraint
    from firsttoken_runtime.engine.sampling import TokenCounts
    from firsttoken_runtime.engine.speculation import Track


class Sequence:
    """One request's state. Only `Engine` and `PageTables` change it; the scheduler reads.

    tokens:  |────────── prompt ──────────|── output ──|
             |───── computed ─────|── left to compute ─|        left is 1 while it decodes
    pages:   |─ the tree's (locked by handle) ─|─ owned ─|      together they cover computed tokens or more

    Behind the windows of all layers, `given_back` places after the sinks' pages hold none (page_needs.py).
    """

    __slots__ = (
        "admitted_ns",
        "cached_tokens",
        "chunks",
        "computed",
        "computing_ns",
        "constraint",
        "given_back",
        "handle",
        "hit",
        "hit_version",
        "max_tokens",
        "namespace",
        "number",
        "pages",
        "predicted_seconds",
        "preempted",
        "preemptions",
        "prefill_end_ns",
        "prefill_start_ns",
        "prompt_len",
        "queued_ns",
        "request",
        "scored",
        "seed",
        "shared",
        "speculation",
        "stop_ids",
        "token_counts",
        "tokens",
        "waited_ns",
        "waiting_since_ns",
    )

    def __init__(self, request: Request, number: int, max_tokens: int, namespace: Namespace) -> None:
        self.request = request
        self.number = number  # place in the order of arrival; breaks ties
        self.max_tokens = max_tokens  # what was asked for, or less where the model's length or the pool ends
        self.namespace = namespace
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.computed = 0
        self.pages: list[int] = []
        self.given_back = 0
        self.handle: PrefixHandle | None = None  # None: not running, has no pages
        self.cached_tokens = 0  # prompt tokens found in the cache when it was first admitted
        self.hit: Hit = NO_HIT  # what the last look-up found …
        self.hit_version = -1  # … and the tree's version then
        self.preempted = False  # lost its pages and has not got a token since
        # Waiting is all time without the next token in sight: in the queue and in prefill.
        self.waiting_since_ns: int | None = request.arrival_ns
        self.waited_ns = 0
        # The account of its first token; see `requests.TokenEvent`.
        self.admitted_ns: int | None = None
        self.prefill_start_ns: int | None = None
        self.prefill_end_ns: int | None = None
        self.computing_ns = 0
        self.chunks = 0
        self.preemptions = 0
        self.queued_ns = request.arrival_ns  # when the engine took it
        self.predicted_seconds: float | None = None  # from then to the first token, as it was predicted
        self.shared = (-1, 0)  # number of the sequence looked at last, and prompt tokens in common with it
        self.seed = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.token_counts: TokenCounts | None = None
        self.constraint: Constraint | None = None
        self.speculation: Track | None = None
        self.scored = 0  # prompt tokens whose scores were told, where they are wanted

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def held(self) -> int:
        """Pages that it has, the tree's included."""
        return len(self.pages) - self.given_back

    @property
    def left(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def in_prefill(self) -> bool:
        """Whether more is to compute than the token sampled last: the prompt, or all of it once preempted."""
        known = len(self.tokens)
        return known - self.computed > 1 or known == self.prompt_len

    def waited(self, now_ns: int) -> int:
        """Nanoseconds without the next token in sight."""
        since = self.waiting_since_ns
        return self.waited_ns if since is None else self.waited_ns + max(now_ns - since, 0)

    def page_keys(self, first: int, page_tokens: int) -> Iterator[PageKey]:
        """Tokens of its full pages from page `first` on."""
        for start in range(first * page_tokens, len(self.tokens) - page_tokens + 1, page_tokens):
            yield tuple(self.tokens[start : start + page_tokens])
