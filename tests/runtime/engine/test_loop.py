"""The loop of the engine process: what it says of itself when things go wrong."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from page_model import Bench, message, prompt

from firsttoken_runtime import ipc
from firsttoken_runtime.engine import engine as engine_module
from firsttoken_runtime.engine.engine import STALLED_STEPS
from firsttoken_runtime.engine.process import EngineLoop
from firsttoken_runtime.engine.pulse import Pulse
from firsttoken_runtime.engine.scheduler import Step


class Loop:
    """An engine loop in a thread, and our end of its line."""

    def __init__(self, bench: Bench) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(10)
        loop = EngineLoop(ipc.Channel(theirs), bench.engine, message())
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()
        self.frames = ipc.Frames()

    def send(self, command: ipc.Command) -> None:
        self.socket.sendall(ipc.encode(command))

    def events(self) -> Iterator[ipc.Event]:
        while data := self.socket.recv(1 << 16):
            for body in self.frames.feed(data):
                yield ipc.event_decoder.decode(body)

    def stop(self) -> None:
        self.send(ipc.Shutdown())
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_fault_that_lets_nobody_run_is_reported_and_recovers(monkeypatch, caplog) -> None:
    """Given a scheduler that gives nobody anything, whatever the reason."""
    bench = Bench()
    bench.add(prompt(12), id="a")
    right = engine_module.schedule
    monkeypatch.setattr(engine_module, "schedule", lambda *_: Step([], [], []))
    caplog.set_level(logging.ERROR)
    loop = Loop(bench)
    stalled = next(
        event.stats["stalled"]
        for event in loop.events()
        if isinstance(event, ipc.Heartbeat) and event.stats["stalled"]
    )
    assert stalled == (
        f"1 waiting, 0 running, nothing computed for {STALLED_STEPS} steps; "
        "a needs 3 pages, 64 of 64 can be had"
    )
    assert f"the engine is stuck: {stalled}" in caplog.text
    monkeypatch.setattr(engine_module, "schedule", right)
    tokens = next(event for event in loop.events() if isinstance(event, ipc.Tokens))
    assert tokens.tokens[0].request_id == "a"
    assert any(isinstance(e, ipc.Heartbeat) and e.stats["stalled"] is None for e in loop.events())
    loop.stop()


def test_waiting_for_a_place_is_no_stall() -> None:
    bench = Bench(switches=message(1, continuousBatching={"maxSequences": 1}))
    bench.add(prompt(8, 1), max_tokens=2 * STALLED_STEPS)
    bench.add(prompt(8, 2))
    bench.steps(STALLED_STEPS + 20)
    assert bench.engine.stats()["waiting"] == 1
    assert bench.engine.stalled() is None


def test_the_expected_time_of_a_step_follows_the_measured_speed() -> None:
    bench = Bench(total_pages=400, prefill_tokens_per_second=100, seconds_per_token=0.01)
    assert bench.engine.expected_step_seconds() is None
    bench.add(prompt(200))
    bench.step()
    computed = bench.computed_per_step()[0]
    assert bench.engine.expected_step_seconds() == pytest.approx(computed / 100, rel=0.01)


def test_a_pulse_ends_quietly_when_the_other_process_has_ended() -> None:
    ours, theirs = socket.socketpair()
    sent = threading.Event()

    def look() -> ipc.Pulse:
        sent.set()
        return ipc.Pulse()

    with Pulse(ipc.Channel(theirs), look, period_seconds=0.01) as pulse:
        assert sent.wait(5)
        ours.close()
        pulse._thread.join(5)
        assert not pulse._thread.is_alive()
