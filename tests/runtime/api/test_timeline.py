"""A request's timeline on a clock that stands still: who is told what, and once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from firsttoken_runtime import ipc
from firsttoken_runtime.api.timeline import Ended, RequestFacts, Timeline
from firsttoken_runtime.timing import Stamps

MS = 1_000_000


@dataclass
class Listener:
    told: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append(name)


@dataclass
class Clock:
    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


def timeline(stream: bool = True, choices: int = 1) -> tuple[Timeline, Listener, Clock]:
    listener, clock = Listener(), Clock()
    stamps = Stamps(0, parsed_ns=1 * MS, tokenized_ns=2 * MS)
    facts = RequestFacts("id", "chat", stream, {}, choices=choices)
    return Timeline(facts, stamps, listener, 10, clock=clock), listener, clock


def first(**stamps: int) -> ipc.Token:
    given = {"queued_ns": 3, "admitted_ns": 4, "prefill_start_ns": 5, "prefill_end_ns": 15, "sampled_ns": 16}
    return ipc.Token("id", 7, 0, **{name: value * MS for name, value in {**given, **stamps}.items()})


def test_a_stream_of_one_token_has_its_ttft_before_it_is_finished() -> None:
    one, listener, clock = timeline()
    one.begin()
    clock.now_ns = 17 * MS
    one.token(first(), 0)
    one.detokenized()
    one.ended("length")
    assert one.state is None, "nothing was sent yet"
    one.first_ready()
    clock.now_ns = 20 * MS
    asyncio.run(one.first_written())
    assert listener.told == ["began", "token", "first_token", "ended", "complete", "acknowledged"]
    assert one.state is Ended.FINISHED
    assert one.timings()["ttft_ms"] == 20
    assert one.timings()["parts"]["write_ms"] == 3


def test_with_several_answers_the_first_token_of_any_counts_and_the_last_end_ends_it() -> None:
    one, _, clock = timeline(stream=False, choices=2)
    clock.now_ns = 17 * MS
    one.token(first(), 0)
    one.first_ready()
    clock.now_ns = 40 * MS
    one.token(first(queued_ns=20, sampled_ns=39), 0)
    one.ended("stop")
    assert one.state is None
    one.ended("length")
    assert (one.state, one.finish_reasons) == (Ended.FINISHED, ["stop", "length"])
    assert one.timings()["ttft_ms"] == 17


def test_what_the_engine_did_after_the_caller_had_gone_is_no_part_of_the_account() -> None:
    one, listener, clock = timeline()
    last_word = one.await_last_word()
    clock.now_ns = 10 * MS
    one.aborted()
    assert "complete" not in listener.told, "the engine has not said how far it was"
    clock.now_ns = 30 * MS
    last_word(first())
    assert listener.told == ["ended", "complete"]
    assert one.segment == "prefill"
    segments = one.account.segments
    assert (segments.queue_ns, segments.prefill_ns, segments.ttft_ns) == (5 * MS, 5 * MS, 10 * MS)


@pytest.mark.parametrize("state", list(Ended))
def test_a_request_ends_once(state: Ended) -> None:
    one, listener, _ = timeline()
    one._end(state)
    one.aborted()
    one.failed("late")
    assert (one.state, one.error_code) == (state, "")
    assert listener.told == ["ended", "complete"]
