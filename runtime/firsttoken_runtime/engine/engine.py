"""The engine: takes requests, and does one step after the other.

`Engine` has no threads and no socket; `process` calls it from its loop. A switch message is in force from the
next step on: `step` reads one immutable snapshot, once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch

from firsttoken_api.switches import State as SwitchState
from firsttoken_api.switches import SwitchMessage
from firsttoken_runtime.engine import describe, integrity, prediction
from firsttoken_runtime.engine.admission import Limits, check
from firsttoken_runtime.engine.forbidden import forbidden
from firsttoken_runtime.engine.grammar import Constraint
from firsttoken_runtime.engine.measurements import Measurements
from firsttoken_runtime.engine.overload import check_queue, check_ttft
from firsttoken_runtime.engine.prefix import NO_HIT, Namespace
from firsttoken_runtime.engine.prompt_scores import ScoreBudget, tell_scores
from firsttoken_runtime.engine.requests import (
    NO_TOKEN,
    AdmissionError,
    Finish,
    Request,
    TokenEvent,
)
from firsttoken_runtime.engine.sampling import Row, Sampled, TokenCounts, sample
from firsttoken_runtime.engine.scheduler import State, Step, schedule
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.settings import EngineSettings, Runner
from firsttoken_runtime.engine.snapshot import Snapshot, read_snapshot
from firsttoken_runtime.engine.speculation import DraftFailed, Proposer, Speculation
from firsttoken_runtime.engine.tables import PageTables
from firsttoken_runtime.model.runner import Chunk
from firsttoken_runtime.model.windows import Window, layer_windows, widest

_log = logging.getLogger(__name__)
FAILED_STEPS_IN_A_ROW = 3
STALLED_STEPS = 100


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
        draft: Proposer | None = None,
    ) -> None:
        """clock: nanoseconds, the same clock as Request.arrival_ns. draft: the draft model, if any."""
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._capabilities = runner.capabilities()
        self._speculation = Speculation(draft)
        self._kv_table = settings.kv.model_table if settings.kv is not None else None
        self._window: Window | None = None  # of the switch, as the runner has it
        self._snapshot = self._read(message)
        self._tables = self._new_tables()
        self._tell_runner()
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self._pending: list[TokenEvent] = []
        self._measurements = Measurements(settings.prefill_tokens_per_second)
        self._limits = Limits(
            settings.max_model_len,
            settings.total_pages,
            settings.page_tokens,
            settings.vocab_size,
            widest(layer_windows(settings.layer_windows)),
        )
        self._seeds = random.Random(settings.seed)  # noqa: S311 - sampling, not secrets
        self._arrivals = 0
        self._failures = 0
        self._expected_seconds: float | None = None
        self._draining = False

    # Requests

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request. Raises AdmissionError for what can never run, and when the queue is full.

        constraint: of the request's grammar, where it has one.

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
        sequence = Sequence(request, self._arrivals, max_tokens, self._namespace(request))
        self._check_load(sequence)
        self._arrivals += 1
        params = request.sampling
        sequence.seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self._settings.eos_token_ids
        sequence.stop_ids = frozenset((*params.stop_token_ids, *eos))
        if TokenCounts.needed(params):
            sequence.token_counts = TokenCounts(params, request.prompt)
        sequence.constraint = constraint
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
        self._speculation.retry()
        before, self._snapshot = self._snapshot, self._read(message)
        if (self._snapshot.kv_table, self._snapshot.window) != (before.kv_table, before.window):
            self._start_over_on_new_pages()
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
        """Schedule, compute, sample: at most one token per sequence, and those proposed before it.

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
        proposals = self._propose(step)
        chunks, sampling = self._prepare(step, proposals, begin_ns)
        measurements = self._measurements
        measurements.steps += 1
        if step.empty:
            measurements.steps_without_progress += 1
            return events
        measurements.steps_without_progress = 0
        model_begin_ns = self._clock()
        self._expected_seconds = measurements.rate.seconds(sum(grant.tokens for grant in step.prefills))
        for grant in step.prefills:
            if grant.sequence.prefill_start_ns is None:
                grant.sequence.prefill_start_ns = model_begin_ns
        try:
            logits = self._runner.run(chunks)
        except Exception as error:
            return events + self._fail(step, error)
        self._failures = 0
        model_end_ns = self._clock()
        logits = tell_scores(step, chunks, logits, events)
        for sequence, chunk in zip(
            (*step.decodes, *(g.sequence for g in step.prefills)), chunks, strict=True
        ):
            # Proposals are committed one by one, as they turn out right.
            proposed = len(proposals.get(sequence.number, ()))
            self._tables.commit(sequence, len(chunk.token_ids) - proposed)
        measurements.prefilled(step, chunks, model_end_ns - model_begin_ns)
        rows = [
            Row(s.request.sampling, s.seed, len(s.tokens) + ahead, s.token_counts, forbidden(s, ahead))
            for s in sampling
            for ahead in range(1 + len(proposals.get(s.number, ())))
        ]
        sample_begin_ns = self._clock()
        results = iter(sample(logits, rows))
        sampled_ns = self._clock()
        for sequence in sampling:
            guesses = proposals.get(sequence.number, [])
            drawn = list(islice(results, 1 + len(guesses)))
            events += self._take_tokens(sequence, drawn, guesses, model_end_ns, sampled_ns)
        prefill_tokens = sum(len(chunk.token_ids) for chunk in chunks[len(step.decodes) :])
        if not prefill_tokens:
            self._speculation.stepped(len(rows), (self._clock() - begin_ns) / 1e9)
        measurements.stepped(
            self._clock() - begin_ns,
            model_end_ns - model_begin_ns,
            sampled_ns - sample_begin_ns,
            prefill_tokens,
        )
        return events

    def _propose(self, step: Step) -> dict[int, list[int]]:
        """Proposals for the step's decodes, by Sequence.number."""
        rate = self._measurements.prefill_tokens_per_second
        try:
            return self._speculation.propose(step, self._settings.page_tokens, 1 / rate if rate else 0.0)
        except DraftFailed as error:
            _log.error("%s; it is asked again after the next switches", error, exc_info=error.__cause__)
            self._snapshot = self._read(self._snapshot.message)
            self._tell_runner()
            return {}

    def _prepare(
        self, step: Step, proposals: Mapping[int, list[int]], now_ns: int
    ) -> tuple[list[Chunk], list[Sequence]]:
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
        scoring = ScoreBudget()
        sampling = list(step.decodes)
        for sequence in step.decodes:
            ids = (sequence.tokens[-1], *proposals.get(sequence.number, ()))
            tables.grow(sequence, len(ids))
            chunks.append(Chunk(ids, sequence.computed, sequence.pages, len(ids)))
        for grant in step.prefills:
            sequence = grant.sequence
            start = sequence.computed
            most = scoring.most_tokens(sequence)
            length = grant.tokens if most is None else min(grant.tokens, most)
            tokens = sequence.tokens[start : start + length]
            tables.grow(sequence, len(tokens))
            last = start + len(tokens) == len(sequence.tokens)
            logits = scoring.take(sequence, start, start + len(tokens)) if most is not None else 0
            chunks.append(Chunk(tokens, start, sequence.pages, max(logits, int(last))))
            if last:
                sampling.append(sequence)
        return chunks, sampling

    def _admit(self, sequence: Sequence, now_ns: int) -> None:
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        cached = self._tables.admit(sequence)
        if sequence.admitted_ns is None:
            # Only now: what a preempted sequence finds later are its own pages, not hits.
            sequence.admitted_ns = now_ns
            sequence.cached_tokens = cached
            if self._snapshot.cache_enabled:
                self._measurements.prefix_queries += sequence.prompt_len
                self._measurements.prefix_hits += cached

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        self._tables.release(sequence)
        del self._running[sequence.id]
        self._waiting[sequence.id] = sequence
        sequence.preempted = True
        sequence.preemptions += 1
        if sequence.waiting_since_ns is None:
            sequence.waiting_since_ns = now_ns
        self._measurements.preemptions += 1
        self._tables.probe(sequence)

    def _take_tokens(
        self,
        sequence: Sequence,
        drawn: list[Sampled],
        proposed: list[int],
        model_end_ns: int,
        sampled_ns: int,
    ) -> list[TokenEvent]:
        """Tokens of one sequence, up to the first that its proposal missed."""
        events = []
        accepted = 0
        for place, result in enumerate(drawn):
            event = self._take_token(sequence, result, model_end_ns, sampled_ns)
            events.append(event)
            right = place < len(proposed) and result.token == proposed[place]
            accepted += right
            if not right or event.finish is not None:
                break
            self._tables.commit(sequence, 1)
        if proposed:
            self._tables.shrink(sequence)
            self._speculation.judged(sequence, len(proposed), accepted)
        return events

    def _take_token(
        self, sequence: Sequence, result: Sampled, model_end_ns: int, sampled_ns: int
    ) -> TokenEvent:
        token = result.token
        if token is None:
            _log.error("request %s: the model gave no usable logits", sequence.id)
            return self._end(sequence, Finish.ERROR)
        constraint = sequence.constraint
        if constraint is not None and token not in sequence.stop_ids and not constraint.accept(token):
            _log.error("request %s: token %d is not in its grammar", sequence.id, token)
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
        if index == 0:
            sequence.prefill_end_ns = model_end_ns
        finish: Finish | None = None
        if token in sequence.stop_ids or (constraint is not None and constraint.ended):
            finish = Finish.STOP
        elif index + 1 >= sequence.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            self._end(sequence, finish)
        if index > 0:
            return TokenEvent(sequence.id, token, index, result.logprob, result.top, finish)
        self._measurements.first_token(sequence, sampled_ns)
        return TokenEvent(
            sequence.id,
            token,
            index,
            result.logprob,
            result.top,
            finish,
            sampled_ns=sampled_ns,
            **describe.account(sequence),
        )

    def _end(self, sequence: Sequence, finish: Finish) -> TokenEvent:
        """Forget a sequence and free its pages; the event is for an end without a token."""
        self._tables.release(sequence)
        self._running.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        self._speculation.forget(sequence)
        self._measurements.ended(sequence, finish.value, self._clock())
        account = {} if sequence.output_len else describe.account(sequence)
        return TokenEvent(sequence.id, NO_TOKEN, sequence.output_len, finish=finish, **account)

    def _fail(self, step: Step, error: Exception) -> list[TokenEvent]:
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        self._measurements.failed_steps += 1
        for sequence in step.decodes:
            self._tables.shrink(sequence)
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

    def kv(self) -> dict[str, Any]:
        """How KV is stored now: precision, bytes per token, and the pool in pages and bytes."""
        return describe.kv(self._settings, self._snapshot, self._tables.total)

    def integrity(self) -> dict[str, Any]:
        """Recount every page; linear in pages and tokens."""
        problems = integrity.problems(self._tables, self._running.values(), self._waiting.values())
        return {"ok": not problems, "problems": problems, "pages": self.pages()}

    def requests(self) -> list[dict[str, Any]]:
        """Every request that is here, running ones first."""
        return describe.requests((*self._running.values(), *self._waiting.values()), self._clock())

    def stats(self) -> dict[str, Any]:
        """Load, counters and recent medians; cheap enough for every second.

        steps_without_progress: steps in a row that computed nothing although requests were there; more than 0
        is a fault. kv_usage: part of the pool in use (locked and owned), 0 to 1. kv_slots_unfilled: tokens
        that would fit in pages which running sequences own, and are not there (yet): what paging wastes.
        """
        pages, tree = self.pages(), self._tables.tree
        settings = self._snapshot.for_step(self._measurements.load())
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "stalled": self.stalled(),
            "kv_usage": (pages["locked"] + pages["owned"]) / pages["total"],
            "kv_slots_unfilled": sum(
                len(sequence.pages) * self._tables.page_tokens - sequence.computed
                for sequence in self._running.values()
            ),
            **self._measurements.to_json(),
            **self._speculation.to_json(),
            "evictions": tree.evictions,
            "insertions": tree.insertions,
            "cache_cap_pages": tree.cap_pages,
            "max_sequences": settings.max_sequences,
            "max_batch_tokens": settings.max_batch_tokens,
            "step_prefill_tokens": settings.prefill_tokens,
            "prefill_cost": self._measurements.prefill_costs.to_json(
                self._snapshot.chunk_size if self._snapshot.continuous else None, self._settings.max_model_len
            ),
        }

    def _read(self, message: SwitchMessage) -> Snapshot:
        settings = self._settings
        return read_snapshot(
            message,
            settings.total_pages,
            settings.page_tokens,
            settings.page_bytes,
            self._capabilities,
            settings.kv,
            self._speculation.obstacle,
            settings.weights,
            settings.layer_windows,
        )

    def _tell_runner(self) -> None:
        on = {state["name"] for state in self._snapshot.states if state["state"] == SwitchState.ON}
        self._runner.set_fused_kernels("fusedKernels" in on)
        self._speculation.configure(self._snapshot.speculation, "fusedKernels" in on)

    def _new_tables(self) -> PageTables:
        """Empty tables for the pool as the snapshot has it laid out."""
        snapshot = self._snapshot
        if snapshot.kv_table is not None and snapshot.kv_table != self._kv_table:
            self._runner.set_kv_table(snapshot.kv_table)
            self._kv_table = snapshot.kv_table
        windows = layer_windows(self._settings.layer_windows, snapshot.window)
        if snapshot.window != self._window:
            self._runner.set_windows(windows)
            self._window = snapshot.window
        return PageTables(
            snapshot.total_pages,
            snapshot.page_tokens,
            snapshot.cache_pages,
            snapshot.cache_enabled,
            widest(windows),
        )

    def _start_over_on_new_pages(self) -> None:
        """KV is of other precisions or of another window from now on: all of it is lost, and what runs is
        computed again.

        Nothing is lost besides: sequences keep their tokens, wait as preempted ones, which go first, and fit,
        as limits are those of the model's precision, the one with the fewest pages, and of its own windows.
        """
        now_ns = self._clock()
        for sequence in list(self._running.values()):
            self._preempt(sequence, now_ns)
        old = self._tables.tree
        self._tables = self._new_tables()
        self._tables.tree.evictions, self._tables.tree.insertions = old.evictions, old.insertions
        for sequence in self._waiting.values():
            sequence.namespace = self._namespace(sequence.request)
            sequence.hit, sequence.hit_version = NO_HIT, -1
        self._measurements.kv_changes += 1

    def _namespace(self, request: Request) -> Namespace:
        snapshot = self._snapshot
        return Namespace(self._settings.model, snapshot.kv_precision, snapshot.window, request.cache_salt)

    def expected_step_seconds(self) -> float | None:
        """What the prompt tokens of the step under way, or the last one, take at the measured speed."""
        return self._expected_seconds

    def stalled(self) -> str | None:
        """What is wrong when requests wait and the last STALLED_STEPS steps computed nothing; else None."""
        steps = self._measurements.steps_without_progress
        if steps < STALLED_STEPS or not self._waiting:
            return None
        first = next(iter(self._waiting.values()))
        needs = self._tables.needs.needed(first)
        return (
            f"{len(self._waiting)} waiting, {len(self._running)} running, nothing computed for {steps} "
            f"steps; {first.id} needs {needs} pages, "
            f"{self._tables.available} of {self._tables.total} can be had"
        )

    def _check_load(self, sequence: Sequence) -> None:
        """Look its prefix up and predict its TTFT. Raises AdmissionError 429 when too much is here."""
        snapshot, measurements = self._snapshot, self._measurements
        now_ns = sequence.queued_ns = self._clock()
        self._tables.probe(sequence)
        if sequence.request.follows:
            return
        load = prediction.Load(
            self._running.values(),
            self._waiting.values(),
            self._tables,
            snapshot.for_step(measurements.load()),
            measurements.rate,
            measurements.prefill_costs.cost(),
            measurements.stay_seconds,
        )
        most = self._settings.max_queued if snapshot.max_queued is None else snapshot.max_queued
        try:
            check_queue(load, most)
            predicted = check_ttft(
                sequence, load, snapshot.max_ttft_seconds, measurements.calibration, now_ns
            )
        except AdmissionError as error:
            measurements.refused[error.code] += 1
            raise
        sequence.predicted_seconds = predicted.seconds if predicted is not None else None
