"""Whatever happens, in whatever order: every page is accounted for, and every token is the right one."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_model import EOS, VOCAB, Bench, message

from firsttoken_runtime.engine.requests import AdmissionError, Finish

# Few distinct stems, cut anywhere and continued differently, so that prefixes are shared often and end within
# pages as well as at their borders.
STEMS = [[1 + (stem * 37 + i * 7) % (VOCAB - 1) for i in range(24)] for stem in range(2)]
prompts = st.builds(
    lambda stem, length, tail: STEMS[stem][:length] + tail,
    st.integers(0, 1),
    st.integers(0, 24),
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4),
)
samplings = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": False, "stop_token_ids": tuple(range(1, 12))},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {5: 2.0, 6: -3.0}, "logprobs": 2},
    ]
)
switches = st.fixed_dictionaries(
    {},
    optional={
        "continuousBatching": st.one_of(
            st.booleans(),
            st.fixed_dictionaries(
                {
                    "maxSequences": st.sampled_from([1, 2, 3, 8]),
                    "maxBatchTokens": st.sampled_from(["auto", 16, 24]),
                    "maxQueued": st.sampled_from(["auto", "auto", 0, 3]),
                    "maxTtftSeconds": st.sampled_from([0.0, 0.0, 0.5]),
                }
            ),
        ),
        "prefixCache": st.one_of(
            st.booleans(), st.builds(lambda cap: {"maxMemory": cap}, st.sampled_from(["1%", "20%", "100%"]))
        ),
        "chunkedPrefill": st.one_of(st.booleans(), st.just({"chunkSize": 16})),
        "kvQuantization": st.one_of(
            st.booleans(),
            st.builds(
                lambda precision, layers: {"precision": precision, "layers": layers},
                st.sampled_from(["fp8", "int8", "int4"]),
                st.sampled_from(
                    [[], [{"layer": 1, "precision": "model"}], [{"layer": 2, "precision": "int8"}]]
                ),
            ),
        ),
        "slidingWindow": st.one_of(
            st.booleans(),
            st.fixed_dictionaries(
                {"window": st.sampled_from([16, 17, 24]), "sinkTokens": st.sampled_from([0, 1, 5])}
            ),
        ),
        "priorityScheduling": st.one_of(
            st.booleans(), st.just({"ageingTokensPerSecond": 0.0, "maxWaitSeconds": 2.0})
        ),
        "speculativeDecoding": st.one_of(
            st.booleans(),
            st.fixed_dictionaries(
                {"method": st.sampled_from(["ngram", "draft"]), "tokens": st.sampled_from([1, 3, 8])}
            ),
        ),
    },
)


class AnyOrder(RuleBasedStateMachine):
    """Adds, aborts, steps, switches, flushes, failing steps and time, in any order, on a small pool."""

    @initialize(
        pages=st.integers(4, 48),
        page_tokens=st.sampled_from([1, 2, 3, 4]),
        first=switches,
        queue=st.integers(1, 9),
        repeats=st.booleans(),
        draft_pages=st.sampled_from([0, 5, 60]),
        draft_errs=st.sampled_from([0, 3]),
        layer_windows=st.sampled_from([(None, None), (None, None), (3, None), (4, 2), (18, 18), (40, 20)]),
    )
    def start(
        self,
        pages: int,
        page_tokens: int,
        first: dict[str, object],
        queue: int,
        repeats: bool,
        draft_pages: int,
        draft_errs: int,
        layer_windows: tuple[int | None, ...],
    ) -> None:
        self.generation = 1
        self.bench = Bench(
            pages,
            page_tokens,
            64,
            switches=message(1, **first),
            max_queued=queue,
            seconds_per_token=0.01,
            repeats=repeats,
            draft_pages=draft_pages,
            draft_errs=draft_errs,
            layer_windows=layer_windows,
        )
        self.ended_early: set[str] = set()
        self.refusals: set[str] = set()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "", "tenant"]),
        sampling=samplings,
        copies=st.sampled_from([1, 1, 2, 3]),
        limit=st.sampled_from([None, None, None, 0.1, 2.0]),
    )
    def add(self, prompt, max_tokens, priority, salt, sampling, copies, limit) -> None:
        asked = {"priority": priority, "cache_salt": salt, "ttft_limit_seconds": limit, **sampling}
        try:
            for _ in range(copies):
                self.bench.add(prompt, max_tokens, **asked)
        except AdmissionError as error:
            self.refusals.add(error.code)

    @rule(count=st.integers(1, 12), seconds=st.sampled_from([0.0, 0.0, 0.3, 2.5]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.step_once()
            self.bench.clock.pass_seconds(seconds / count)
            self.bench.check()
            assert self.bench.engine.stats()["steps_without_progress"] == 0

    def step_once(self) -> None:
        """One step, in which nobody passes one who has waited longest and longer than the longest wait.

        Who takes the place of lower priority passes, because that place would not have been its own; it is
        given back when the urgent one ends.
        """
        engine = self.bench.engine
        snapshot, now_ns = engine._snapshot, self.bench.clock.now_ns
        waited, ran = dict(engine._waiting), set(engine._running)
        overdue = {id for id, s in waited.items() if s.waited(now_ns) >= snapshot.max_wait_ns}
        self.bench.step()
        left_behind = [waited[id] for id in overdue if id in engine._waiting]
        displaced = ran & set(engine._waiting)
        if not left_behind or displaced or not (snapshot.continuous and snapshot.by_priority):
            return
        first = min(left_behind, key=lambda s: (s.request.arrival_ns, s.number))
        for id in set(waited) - set(engine._waiting):
            passed = id not in overdue or waited[id].number > first.number
            assert not passed, f"{id} passed {first.id}"

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.bench.requests)))
        here = id in {entry["id"] for entry in self.bench.engine.requests()}
        assert self.bench.engine.abort(id) == here
        if here:
            self.ended_early.add(id)

    @rule(changed=switches)
    def switch(self, changed: dict[str, object]) -> None:
        self.generation += 1
        assert self.bench.engine.set_switches(message(self.generation, **changed))

    @rule()
    def flush(self) -> None:
        self.bench.engine.flush_prefix_cache()

    @rule()
    def fail_one_step(self) -> None:
        if self.bench.engine.requests():
            self.bench.failures.append(torch.OutOfMemoryError("no memory for the activations"))
            self.bench.step()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()
            pages = self.bench.engine.pages()
            assert pages["free"] + pages["cached"] + pages["locked"] + pages["owned"] == pages["total"]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        assert self.refusals <= {"prompt_too_long", "pool_too_small", "queue_full", "ttft_limit"}
        bench.run()
        bench.assert_drained()
        for id, request in bench.requests.items():
            right = bench.expected(id)
            tokens = bench.tokens(id)
            assert tokens == right[: len(tokens)], id
            events = bench.events[id]
            assert [event.finish is None for event in events] == [True] * (len(events) - 1) + [False]
            assert [event.index for event in events if event.token >= 0] == list(range(len(tokens)))
            if id in self.ended_early:
                assert bench.finish(id) == Finish.ABORT
            elif bench.finish(id) != Finish.ERROR:
                # With windows of its own in all layers, a model goes on in a pool that just holds them.
                room = min(64, bench.engine._limits.pool_tokens + 1) - len(request.prompt)
                assert len(tokens) == min(len(right), room)
                stops = (EOS, *request.sampling.stop_token_ids)
                stopped = not request.sampling.ignore_eos and tokens[-1] in stops
                assert bench.finish(id) == (Finish.STOP if stopped else Finish.LENGTH)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
