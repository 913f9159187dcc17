"""Answers that keep to a grammar: compiled beside the step loop; a mask says what may come next.

xgrammar does the work, in C++ and without the interpreter lock, in a thread of its own: no step waits for a
compilation, and a request joins the queue when its grammar is ready. Nothing of this is loaded before the
first request that needs it.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from firsttoken_runtime.engine.requests import AdmissionError, Request

# A compilation cannot be stopped: after this time its requests are refused, and it is left alone.
LONGEST_COMPILATION_SECONDS = 10.0
MOST_STUCK = 2
MOST_WAITING = 256
CACHE_BYTES = 128 << 20
LARGEST_BYTES = 64 << 20
_PLACE_IN_SOURCE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, stop_tokens: bool) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_tokens = stop_tokens
        self._words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)

    def forbidden(self) -> torch.Tensor:
        """bool [vocab]: tokens that must not come next; never all of them before `ended`."""
        self._matcher.fill_next_token_bitmask(self._words, 0)
        bits = np.unpackbits(self._words.numpy().view(np.uint8)[0], bitorder="little")
        return torch.from_numpy(bits[: self._vocab_size] == 0)

    def accept(self, token: int) -> bool:
        """Go on by a token. False when the grammar does not have it here."""
        return bool(self._matcher.accept_token(token))

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        if self._matcher.is_terminated():
            return True
        return not self._stop_tokens and bool(self._matcher.is_completed())


@dataclass
class _Job:
    grammar: str
    requests: list[Request]
    started: float | None = None
    outcome: Any = None  # a compiled grammar, or an AdmissionError


@dataclass
class _Thread:
    """A worker, and what it does; abandoned: it took too long, and nobody waits for it."""

    abandoned: bool = False
    job: _Job | None = None
    native: threading.Thread = field(init=False)


class Grammars:
    """Compiles grammars (structural tags as JSON text) and remembers them.

    Used from one thread, except for what runs in `_work`. vocab_size: width of the logits.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = [id for id in dict.fromkeys(eos_token_ids) if id < vocab_size]
        self._clock = clock
        self._vocabulary: list[bytes] | None = None
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._cached_bytes = 0
        self._jobs: dict[str, _Job] = {}
        self._ready: deque[tuple[Request, Any]] = deque()
        self._lock = threading.Condition()
        self._todo: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._thread: _Thread | None = None
        self._stuck: list[_Thread] = []
        self._compiler: Any = None

    def set_vocabulary(self, tokens: list[bytes]) -> None:
        """The bytes of every token, empty for special ones; needed before the first request."""
        self._vocabulary = tokens

    @property
    def pending(self) -> bool:
        """Whether `finished` will have something to tell."""
        return bool(self._jobs or self._ready)

    def begin(self, request: Request) -> None:
        """Compile a request's grammar; `finished` has it when it is done. Raises AdmissionError."""
        grammar = request.sampling.grammar
        assert grammar is not None
        if self._vocabulary is None:
            raise AdmissionError("invalid_grammar", "this engine has no vocabulary for grammars", 400)
        if (compiled := self._cache.get(grammar)) is not None:
            self._cache.move_to_end(grammar)
            self._ready.append((request, compiled))
            return
        if (job := self._jobs.get(grammar)) is not None:
            job.requests.append(request)
            return
        self._stuck = [thread for thread in self._stuck if thread.native.is_alive() and thread.job]
        if len(self._stuck) >= MOST_STUCK or len(self._jobs) >= MOST_WAITING:
            raise AdmissionError("grammar_busy", "too many output formats are being compiled", 503, 10.0)
        job = self._jobs[grammar] = _Job(grammar, [request])
        with self._lock:
            self._todo.append(job)
            self._lock.notify_all()
        if self._thread is None:
            self._start_thread()

    def cancel(self, request_id: str) -> bool:
        """Forget a request. False when it does not wait here."""
        before = len(self._ready)
        self._ready = deque(entry for entry in self._ready if entry[0].id != request_id)
        for job in self._jobs.values():
            kept = [request for request in job.requests if request.id != request_id]
            if len(kept) < len(job.requests):
                job.requests = kept
                return True
        return len(self._ready) < before

    def finished(self) -> Iterator[tuple[Request, Constraint | AdmissionError]]:
        """Requests whose grammar is ready, or refused."""
        while self._done:
            job = self._done.popleft()
            if self._jobs.get(job.grammar) is not job:
                continue  # it was given up
            del self._jobs[job.grammar]
            self._ready.extend((request, job.outcome) for request in job.requests)
            if not isinstance(job.outcome, AdmissionError):
                self._remember(job.grammar, job.outcome)
        self._give_up()
        while self._ready:
            request, outcome = self._ready.popleft()
            yield request, outcome if isinstance(outcome, AdmissionError) else self._constraint(outcome)

    def _constraint(self, compiled: Any) -> Constraint:
        matcher = _xgrammar().GrammarMatcher(compiled)
        return Constraint(matcher, self._vocab_size, bool(self._eos))

    def _remember(self, grammar: str, compiled: Any) -> None:
        self._cache[grammar] = compiled
        self._cached_bytes += compiled.memory_size_bytes
        while self._cached_bytes > CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.memory_size_bytes

    def _give_up(self) -> None:
        thread = self._thread
        job = thread.job if thread is not None else None
        if thread is None or job is None or job.started is None:
            return
        if self._clock() - job.started < LONGEST_COMPILATION_SECONDS:
            return
        with self._lock:
            if thread.job is not job:
                return
            thread.abandoned = True
        self._stuck.append(thread)
        self._thread = None
        refusal = AdmissionError(
            "invalid_grammar",
            f"the output format takes longer than {LONGEST_COMPILATION_SECONDS:.0f} s to compile; "
            "give a simpler one, with smaller bounds on repetition",
            400,
        )
        if self._jobs.pop(job.grammar, None) is not None:
            self._ready.extend((request, refusal) for request in job.requests)
        if self._todo:
            self._start_thread()

    # In the thread

    def _start_thread(self) -> None:
        thread = self._thread = _Thread()
        thread.native = threading.Thread(target=self._work, args=(thread,), name="grammar", daemon=True)
        thread.native.start()

    def _work(self, thread: _Thread) -> None:
        while True:
            with self._lock:
                thread.job = None
                if thread.abandoned:
                    return
                while not self._todo:
                    self._lock.wait()
                job = self._todo.popleft()
                job.started = self._clock()
                thread.job = job
            try:
                job.outcome = self._compile(job.grammar)
            except Exception as error:
                words = _PLACE_IN_SOURCE.sub("", str(error)).strip()
                job.outcome = AdmissionError(
                    "invalid_grammar", f"the output format is not taken: {words}", 400
                )
            self._done.append(job)

    def _compile(self, grammar: str) -> Any:
        xgrammar = _xgrammar()
        compiler = self._compiler
        if compiler is None:
            # Rows of the logits beyond the vocabulary are padding; they are never allowed.
            tokenizer = xgrammar.TokenizerInfo(
                self._vocabulary,
                xgrammar.VocabType.RAW,
                vocab_size=self._vocab_size,
                stop_token_ids=self._eos,
            )
            compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
            self._compiler = compiler
        compiled = compiler.compile_structural_tag(grammar)
        if compiled.memory_size_bytes > LARGEST_BYTES:
            raise ValueError(f"it takes {compiled.memory_size_bytes >> 20} MiB; give a simpler one")
        return compiled


_importing = threading.Lock()


def _xgrammar() -> Any:
    with _importing, _without_transformers():
        import xgrammar
    return xgrammar


@contextmanager
def _without_transformers() -> Iterator[None]:
    """Stand-ins for three names of transformers while xgrammar is imported.

    It wants them for type checks in functions that are not called here, and the real ones cost two seconds,
    in which steps would wait for the interpreter lock.
    """
    if "transformers" in sys.modules or "xgrammar" in sys.modules:
        yield
        return
    stand_in = types.ModuleType("transformers")
    for name in ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "LogitsProcessor"):
        setattr(stand_in, name, type(name, (), {}))
    sys.modules["transformers"] = stand_in
    try:
        yield
    finally:
        del sys.modules["transformers"]
