"""The engine: takes requests, and does one step after the other.

`Engine` has no threads and no socket; `process` calls it from its loop. A switch message is in force from the
next step on: `step` reads one immutable snapshot, once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from firsttoken_api.switches import State as SwitchState
from firsttoken_api.switches import SwitchMessage
from firsttoken_runtime.engine import integrity
from firsttoken_runtime.engine.admission import Limits, check
from firsttoken_runtime.engine.measurements import Measurements
from firsttoken_runtime.engine.prefix import Namespace
from firsttoken_runtime.engine.requests import NO_TOKEN, AdmissionError, Finish, Request, TokenEvent
from firsttoken_runtime.engine.sampling import Row, Sampled, TokenCounts, sample
from firsttoken_runtime.engine.scheduler import State, Step, schedule
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.settings import EngineSettings, Runner
from firsttoken_runtime.engine.snapshot import Snapshot, read_snapshot
from firsttoken_runtime.engine.tables import PageTables
from firsttoken_runtime.model.runner import Chunk

_log = logging.getLogger(__name__)
FAILED_STEPS_IN_A_ROW = 3


class EngineFailure(Exception):
    """The model runner fails at every step: the engine cannot go on, and the process should end."""


class Engine:
    """Scheduler, pages and sampling around a model runner."""

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        message: SwitchMessage,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """clock: nanoseconds, the same clock as Request.arrival_ns."""
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._capabilities = runner.capabilities()
        self._snapshot = self._read(message)
        self._tables = PageTables(
            settings.total_pages,
            settings.page_tokens,
            self._snapshot.cache_pages,
            self._snapshot.cache_enabled,
        )
        self._tell_runner()
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self._pending: list[TokenEvent] = []
        self._measurements = Measurements(settings.prefill_tokens_per_second)
        self._limits = Limits(
            settings.max_model_len, settings.total_pages, settings.page_tokens, settings.vocab_size
        )
        self._seeds = random.Random(settings.seed)  # noqa: S311 - sampling, not secrets
        self._arrivals = 0
        self._failures = 0
        self._draining = False

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionError for what can never run, and when the queue is full.

        `max_tokens` beyond the model's length or the pool is cut to what fits; the request then ends with
        finish "length".
        """
        if self._draining:
            raise AdmissionError("draining", "the server is shutting down; ask another replica", 503, 1.0)
        if request.id in self._running or request.id in self._waiting:
            raise AdmissionError(
                "duplicate_id", f"request id {request.id!r} is in use; give each its own", 409
            )
        max_tokens = check(request, self._limits)
        self._check_queue()
        sequence = Sequence(request, self._arrivals, max_tokens, self._namespace(request))
        self._arrivals += 1
        params = request.sampling
        sequence.seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self._settings.eos_token_ids
        sequence.stop_ids = frozenset((*params.stop_token_ids, *eos))
        if TokenCounts.needed(params):
            sequence.token_counts = TokenCounts(params, request.prompt)
        self._tables.probe(sequence)
        self._waiting[request.id] = sequence
        self._measurements.arrived(sequence.prompt_len, len(self._running) + len(self._waiting))

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages now. False when it is not (any more) here.

        The next `step` returns its last event, with finish "abort" and no token.
        """
        sequence = self._running.get(request_id) or self._waiting.get(request_id)
        if sequence is None:
            return False
        self._pending.append(self._end(sequence, Finish.ABORT))
        return True

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self._draining = True

    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._running or self._waiting or self._pending)

    # Switches

    def set_switches(self, message: SwitchMessage) -> bool:
        """Take a message; in force from the next step on.

        False when it is older than the one in force, or has the same generation and other content.
        """
        current = self._snapshot.message
        if message.generation <= current.generation:
            return message.generation == current.generation and message.to_json() == current.to_json()
        self._snapshot = self._read(message)
        self._tables.tree.set_enabled(self._snapshot.cache_enabled)
        self._tables.tree.set_cap(self._snapshot.cache_pages)
        self._tell_runner()
        return True

    def switch_states(self) -> list[dict[str, Any]]:
        """name, state, reason and parameters of every optimization, in catalogue order."""
        return [dict(state) for state in self._snapshot.states]

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes; pages in use are not found again, and free when their sequences end."""
        self._tables.tree.flush()

    # The step

    def step(self) -> list[TokenEvent]:
        """Schedule, compute, sample: at most one token per running sequence.

        When the runner raises, what was in prefill in this step ends with finish "error" (all of the step, if
        nothing was), and the others repeat their token in the next step: nothing they had computed is lost.
        Raises EngineFailure when the runner has failed FAILED_STEPS_IN_A_ROW times, running out of memory
        apart.
        """
        events, self._pending = self._pending, []
        if not self._running and not self._waiting:
            return events
        begin_ns = self._clock()
        settings = self._snapshot.for_step(self._measurements.load())
        state = State(self._running.values(), self._waiting.values(), self._tables)
        step = schedule(state, begin_ns, settings)
        chunks, sampling = self._prepare(step, begin_ns)
        measurements = self._measurements
        measurements.steps += 1
        if step.empty:
            measurements.steps_without_progress += 1
            return events
        measurements.steps_without_progress = 0
        model_begin_ns = self._clock()
        try:
            logits = self._runner.run(chunks)
        except Exception as error:
            return events + self._fail(step, error)
        self._failures = 0
        model_end_ns = self._clock()
        for sequence, chunk in zip(
            (*step.decodes, *(g.sequence for g in step.prefills)), chunks, strict=True
        ):
            self._tables.commit(sequence, len(chunk.token_ids))
        rows = [Row(s.request.sampling, s.seed, len(s.tokens), s.token_counts) for s in sampling]
        sample_begin_ns = self._clock()
        results = sample(logits, rows)
        sampled_ns = self._clock()
        for sequence, result in zip(sampling, results, strict=True):
            events.append(self._take_token(sequence, result, model_end_ns, sampled_ns))
        prefill_tokens = sum(len(chunk.token_ids) for chunk in chunks) - len(step.decodes)
        measurements.stepped(
            self._clock() - begin_ns,
            model_end_ns - model_begin_ns,
            sampled_ns - sample_begin_ns,
            prefill_tokens,
        )
        return events

    def _prepare(self, step: Step, now_ns: int) -> tuple[list[Chunk], list[Sequence]]:
        """Put the step's decisions into effect on sequences and pages; returns chunks and who gets a token.

        Order matters: see `tables`.
        """
        tables = self._tables
        for sequence in step.preempted:
            self._preempt(sequence, now_ns)
        for grant in step.prefills:
            if grant.admitted:
                self._admit(grant.sequence, now_ns)
        chunks = []
        sampling = list(step.decodes)
        for sequence in step.decodes:
            tables.grow(sequence, 1)
            chunks.append(Chunk((sequence.tokens[-1],), sequence.computed, sequence.pages, True))
        for grant in step.prefills:
            sequence = grant.sequence
            start = sequence.computed
            tokens = sequence.tokens[start : start + grant.tokens]
            tables.grow(sequence, len(tokens))
            last = start + len(tokens) == len(sequence.tokens)
            chunks.append(Chunk(tokens, start, sequence.pages, last))
            if last:
                sampling.append(sequence)
        return chunks, sampling

    def _admit(self, sequence: Sequence, now_ns: int) -> None:
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        cached = self._tables.admit(sequence)
        if sequence.prefill_start_ns is None:
            # Only now: what a preempted sequence finds later are its own pages, not hits.
            sequence.prefill_start_ns = now_ns
            sequence.cached_tokens = cached
            if self._snapshot.cache_enabled:
                self._measurements.prefix_queries += sequence.prompt_len
                self._measurements.prefix_hits += cached

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        self._tables.release(sequence)
        del self._running[sequence.id]
        self._waiting[sequence.id] = sequence
        sequence.preempted = True
        if sequence.waiting_since_ns is None:
            sequence.waiting_since_ns = now_ns
        self._measurements.preemptions += 1
        self._tables.probe(sequence)

    def _take_token(
        self, sequence: Sequence, result: Sampled, model_end_ns: int, sampled_ns: int
    ) -> TokenEvent:
        token = result.token
        if token is None:
            _log.error("request %s: the model gave no usable logits", sequence.id)
            return self._end(sequence, Finish.ERROR)
        sequence.tokens.append(token)
        sequence.preempted = False
        if sequence.waiting_since_ns is not None:
            sequence.waited_ns += max(sampled_ns - sequence.waiting_since_ns, 0)
            sequence.waiting_since_ns = None
        if sequence.token_counts is not None:
            sequence.token_counts.add(token)
        self._measurements.generation_tokens += 1
        index = len(sequence.tokens) - sequence.prompt_len - 1
        finish: Finish | None = None
        if token in sequence.stop_ids:
            finish = Finish.STOP
        elif index + 1 >= sequence.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            self._end(sequence, finish)
        if index > 0:
            return TokenEvent(sequence.id, token, index, result.logprob, result.top, finish)
        return TokenEvent(
            sequence.id,
            token,
            index,
            result.logprob,
            result.top,
            finish,
            prefill_start_ns=sequence.prefill_start_ns,
            prefill_end_ns=model_end_ns,
            sampled_ns=sampled_ns,
            cached_tokens=sequence.cached_tokens,
        )

    def _end(self, sequence: Sequence, finish: Finish) -> TokenEvent:
        """Forget a sequence and free its pages; the event is for an end without a token."""
        self._tables.release(sequence)
        self._running.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        self._measurements.finished[finish.value] += 1
        return TokenEvent(sequence.id, NO_TOKEN, sequence.output_len, finish=finish)

    def _fail(self, step: Step, error: Exception) -> list[TokenEvent]:
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        self._measurements.failed_steps += 1
        self._failures += not out_of_memory
        if self._failures >= FAILED_STEPS_IN_A_ROW:
            raise EngineFailure(
                f"the model failed {self._failures} steps in a row, last with {type(error).__name__}: {error}"
            ) from error
        failed = [grant.sequence for grant in step.prefills] or step.decodes
        _log.error("a step failed; ending %s", ", ".join(sequence.id for sequence in failed), exc_info=error)
        if out_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return [self._end(sequence, Finish.ERROR) for sequence in failed]

    # What it says of itself

    def pages(self) -> dict[str, int]:
        """free, cached, locked, owned, total."""
        return self._tables.counts()

    def integrity(self) -> dict[str, Any]:
        """Recount every page; linear in pages and tokens."""
        problems = integrity.problems(self._tables, self._running.values(), self._waiting.values())
        return {"ok": not problems, "problems": problems, "pages": self.pages()}

    def requests(self) -> list[dict[str, Any]]:
        """Every request that is here, running ones first."""
        now_ns = self._clock()
        return [
            {
                "id": sequence.id,
                "state": "waiting" if sequence.handle is None else _running_state(sequence),
                "priority": sequence.request.priority,
                "prompt_tokens": sequence.prompt_len,
                "computed_tokens": sequence.computed,
                "cached_tokens": sequence.cached_tokens,
                "output_tokens": sequence.output_len,
                "waited_ms": round(sequence.waited(now_ns) / 1e6, 3),
            }
            for sequence in (*self._running.values(), *self._waiting.values())
        ]

    def stats(self) -> dict[str, Any]:
        """Load, counters and recent medians; cheap enough for every second.

        steps_without_progress: steps in a row that computed nothing although requests were there; more than 0
        is a fault. kv_usage: part of the pool in use (locked and owned), 0 to 1.
        """
        pages, tree = self.pages(), self._tables.tree
        settings = self._snapshot.for_step(self._measurements.load())
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "kv_usage": (pages["locked"] + pages["owned"]) / pages["total"],
            **self._measurements.to_json(),
            "evictions": tree.evictions,
            "insertions": tree.insertions,
            "cache_cap_pages": tree.cap_pages,
            "max_sequences": settings.max_sequences,
            "max_batch_tokens": settings.max_batch_tokens,
            "step_prefill_tokens": settings.prefill_tokens,
        }

    def _read(self, message: SwitchMessage) -> Snapshot:
        settings = self._settings
        return read_snapshot(
            message, settings.total_pages, settings.page_tokens, settings.page_bytes, self._capabilities
        )

    def _tell_runner(self) -> None:
        on = {state["name"] for state in self._snapshot.states if state["state"] == SwitchState.ON}
        self._runner.set_fused_kernels("fusedKernels" in on)

    def _namespace(self, request: Request) -> Namespace:
        return Namespace(self._settings.model, cache_salt=request.cache_salt)

    def _check_queue(self) -> None:
        places = max(self._snapshot.max_sequences - len(self._running), 0)
        queued = len(self._waiting) - places
        if queued < self._settings.max_queued:
            return
        left = sum(len(s.tokens) - s.hit.pages * self._tables.page_tokens for s in self._waiting.values())
        rate = self._measurements.prefill_tokens_per_second
        seconds = min(max(left / rate, 1.0), 60.0) if rate else 1.0
        raise AdmissionError(
            "queue_full",
            f"{queued} requests with {left} tokens wait already, the limit is {self._settings.max_queued}; "
            f"try again in {seconds:.0f} s",
            429,
            round(seconds, 1),
        )


def _running_state(sequence: Sequence) -> str:
    return "prefill" if sequence.in_prefill else "decode"
