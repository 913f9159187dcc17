"""The line between the two processes: messages survive any cut, and an end is noticed."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_runtime import ipc
from firsttoken_runtime.engine.requests import Request, SamplingParams

REQUEST = Request(
    "a", (1, 2, 3), SamplingParams(max_tokens=5, logit_bias={7: -1.0}), arrival_ns=9, priority=-1
)
COMMANDS = [
    ipc.Start("m", "cpu", "auto", "auto", 16, {"generation": 1, "switches": {}}),
    ipc.Add(REQUEST),
    ipc.Abort("a"),
    ipc.SetSwitches(3, {"generation": 2}),
    ipc.GetState(4),
    ipc.Shutdown(),
]
EVENTS = [
    ipc.Phase("weights", 1.5),
    ipc.Failed("no", True),
    ipc.Tokens([ipc.Token("a", 5, 0, "stop", -0.5, ((5, -0.5),), 1, 2, 3, 4), ipc.Token("b", 6, 1)]),
    ipc.Refused("a", "queue_full", "full", 429, 2.0),
    ipc.Reply(3, {"pages": {"free": 1}}),
    ipc.Heartbeat({"generation": 1}, {"running": 0}),
    ipc.Pulse(1.5, 0.2),
    ipc.Pulse(),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_come_out_as_they_went_in(command):
    (body,) = ipc.Frames().feed(ipc.encode(command))
    assert ipc.command_decoder.decode(body) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_come_out_as_they_went_in(event):
    (body,) = ipc.Frames().feed(ipc.encode(event))
    assert ipc.event_decoder.decode(body) == event


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_messages_survive_any_cut_of_the_stream(events, cuts):
    data = b"".join(map(ipc.encode, events))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    frames = ipc.Frames()
    bodies = [body for start, end in itertools.pairwise(edges) for body in frames.feed(data[start:end])]
    assert [ipc.event_decoder.decode(body) for body in bodies] == events


def test_a_length_that_no_message_has_is_refused():
    with pytest.raises(ValueError, match="something else"):
        list(ipc.Frames().feed(b"HTTP/1.1"))


class TestChannel:
    @pytest.fixture
    def pair(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            yield ours, ipc.Channel(theirs)

    def test_commands_arrive_in_order_and_nothing_is_waited_for_without_a_timeout(self, pair):
        ours, channel = pair
        assert channel.receive(0) == []
        ours.sendall(b"".join(map(ipc.encode, COMMANDS)))
        assert channel.receive(1) == COMMANDS

    def test_a_reader_that_is_slow_does_not_hold_the_engine(self, pair):
        ours, channel = pair
        event = ipc.Reply(1, {"text": "x" * 100_000})
        for _ in range(50):  # far more than a socket buffer holds
            channel.send(event)
        frames, got = ipc.Frames(), 0
        while got < 50:
            got += sum(1 for _ in frames.feed(ours.recv(1 << 20)))
            channel.receive(0)
        assert got == 50

    def test_messages_of_several_threads_do_not_mix(self, pair):
        ours, channel = pair
        events = [ipc.Reply(number, {"text": "x" * 20_000}) for number in range(4)]

        def send(event):
            for _ in range(50):
                channel.send(event)

        threads = [threading.Thread(target=send, args=(event,)) for event in events]
        for thread in threads:
            thread.start()
        frames, got = ipc.Frames(), []
        while len(got) < 200:
            got += [ipc.event_decoder.decode(body) for body in frames.feed(ours.recv(1 << 20))]
            channel.receive(0)
        for thread in threads:
            thread.join()
        assert sorted(event.id for event in got) == sorted([0, 1, 2, 3] * 50)

    def test_the_end_of_the_other_process_is_noticed(self, pair):
        ours, channel = pair
        ours.close()
        with pytest.raises(ipc.ChannelClosed):
            channel.receive(1)
