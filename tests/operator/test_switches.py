"""Switches: the next generation, the push, and who confirmed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.fakes import FakeRuntime, kill_switch_body

from firsttoken_api.optimizations import CATALOGUE, NAMES
from firsttoken_api.resources import KillSwitch
from firsttoken_api.switches import SwitchMessage, resolve
from firsttoken_operator.runtime_client import PodAddress, PodError, PodErrorKind
from firsttoken_operator.switches import Instance, Pusher, killed_here, plan

KEY = ("default", "smollm")
PLAIN = resolve({}, {}, frozenset())
CACHE = {"optimizations": ["prefixCache"]}
ROLLED_BACK = resolve({}, {"chunkedPrefill": True}, frozenset())


def instance(number: int = 1, container: str = "c0") -> Instance:
    return Instance(f"uid-{number}", container, f"pod-{number}", PodAddress(f"10.0.0.{number}", 8000, 8001))


def test_the_first_message_has_generation_one():
    found = plan(PLAIN, None, 0, 0)
    assert (found.message.generation, found.write) == (1, True)


def test_the_same_switches_keep_their_generation_and_need_no_write():
    written = SwitchMessage(4, PLAIN)
    found = plan(PLAIN, written, 4, 4)
    assert (found.message, found.write) == (written, False)


def test_changed_switches_get_the_next_generation():
    found = plan(ROLLED_BACK, SwitchMessage(4, PLAIN), 4, 4)
    assert (found.message.generation, found.write) == (5, True)


def test_a_deleted_config_map_does_not_take_the_generation_back():
    assert plan(PLAIN, None, 0, observed=9).message.generation == 10


def test_an_unreadable_config_map_does_not_take_the_generation_back():
    assert plan(PLAIN, None, 12, observed=9).message.generation == 13


def test_a_pod_that_is_ahead_makes_the_generation_grow():
    assert plan(PLAIN, SwitchMessage(4, PLAIN), 4, observed=6).message.generation == 7


@given(st.lists(st.tuples(st.sampled_from(["change", "same", "lose", "garble"]), st.booleans()), max_size=30))
def test_whatever_happens_to_the_config_map_generations_only_grow(steps):
    """given pods that remember the last generation, when the ConfigMap is lost or garbled, then no new
    message is ever older than, or as old as but different from, one that went out before."""
    sent: dict[int, object] = {}
    written, highest, current = None, 0, PLAIN
    for step, flip in steps:
        generation = written.generation if written else 0
        if step == "change":
            current = ROLLED_BACK if flip else PLAIN
        elif step == "lose":
            written, generation = None, 0
        elif step == "garble":
            written = None
        message = plan(current, written, generation, highest).message
        assert message.generation >= highest
        assert sent.setdefault(message.generation, message.switches) == message.switches
        written, highest = message, message.generation


def test_the_kill_switch_takes_all_but_essential_ones():
    killed = killed_here(KillSwitch.model_validate(kill_switch_body()), "default", {})
    assert killed == {entry.name for entry in CATALOGUE if not entry.essential}
    assert set(NAMES) - killed == {"continuousBatching"}


@pytest.mark.parametrize(
    ("spec", "namespace", "labels", "killed"),
    [
        ({"engaged": False}, "default", {}, set()),
        ({"optimizations": ["prefixCache"]}, "default", {}, {"prefixCache"}),
        ({"optimizations": ["continuousBatching"]}, "default", {}, {"continuousBatching"}),
        ({**CACHE, "namespaces": ["other"]}, "default", {}, set()),
        ({**CACHE, "selector": {"matchLabels": {"a": "b"}}}, "default", {"a": "b"}, {"prefixCache"}),
        ({**CACHE, "selector": {"matchLabels": {"a": "b"}}}, "default", {"a": "c"}, set()),
    ],
)
def test_the_kill_switch_reaches_whom_it_concerns(spec, namespace, labels, killed):
    found = KillSwitch.model_validate(kill_switch_body(**spec))
    assert killed_here(found, namespace, labels) == killed


def test_no_kill_switch_kills_nothing():
    assert killed_here(None, "default", {}) == frozenset()


async def test_every_pod_confirms_and_is_not_asked_again():
    runtime = FakeRuntime()
    pusher = Pusher(runtime, lambda key: None)
    message = SwitchMessage(3, ROLLED_BACK)
    for _ in range(3):
        known = await pusher.push(KEY, [instance(1), instance(2)], "token", message, 1.0)
    assert all(confirmation.confirms(3) for confirmation in known.values())
    assert [len(runtime.pod(host).messages) for host in ("10.0.0.1", "10.0.0.2")] == [1, 1]
    assert runtime.pod("10.0.0.1").states["chunkedPrefill"] == "rolledBack"
    assert runtime.pod("10.0.0.1").token == "token"
    await pusher.aclose()


async def test_a_restarted_container_is_told_anew():
    runtime = FakeRuntime()
    pusher = Pusher(runtime, lambda key: None)
    message = SwitchMessage(3, PLAIN)
    await pusher.push(KEY, [instance(1, "c0")], "token", message, 1.0)
    runtime.pods.clear()
    known = await pusher.push(KEY, [instance(1, "c1")], "token", message, 1.0)
    assert list(known) == [instance(1, "c1")]
    assert runtime.pod("10.0.0.1").generation == 3
    await pusher.aclose()


class HangingRuntime(FakeRuntime):
    """Pods in `hanging` answer only when let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging: set[str] = set()
        self.gate = asyncio.Event()

    async def put_switches(self, pod, token, message):
        if pod.host in self.hanging:
            await self.gate.wait()
        return await super().put_switches(pod, token, message)


async def test_a_pod_that_hangs_holds_up_neither_the_others_nor_the_reconcile():
    runtime, news = HangingRuntime(), []
    runtime.hanging.add("10.0.0.1")
    pusher = Pusher(runtime, news.append)
    known = await pusher.push(KEY, [instance(1), instance(2)], "token", SwitchMessage(3, PLAIN), 0.01)
    assert not known[instance(1)].confirms(3)
    assert known[instance(2)].confirms(3)
    assert known[instance(1)].why_not(3) == "has not answered yet"
    runtime.gate.set()
    await asyncio.sleep(0.01)
    assert news == [KEY]
    assert pusher.confirmations(KEY)[instance(1)].confirms(3)
    await pusher.aclose()


async def test_a_pod_that_hung_gets_the_newest_message_and_not_the_ones_between():
    runtime = HangingRuntime()
    runtime.hanging.add("10.0.0.1")
    pusher = Pusher(runtime, lambda key: None)
    for generation in (3, 4, 5):
        await pusher.push(KEY, [instance(1)], "token", SwitchMessage(generation, PLAIN), 0.01)
    runtime.gate.set()
    await asyncio.sleep(0.01)
    assert [message.generation for message in runtime.pod("10.0.0.1").messages] == [3, 5]
    await pusher.aclose()


async def test_an_unreachable_pod_is_named_with_the_reason_and_tried_again():
    runtime, news = FakeRuntime(), []
    runtime.pod("10.0.0.1").error = PodError(
        PodErrorKind.UNREACHABLE, "connection failed (Connection refused)"
    )
    pusher = Pusher(runtime, news.append)
    known = await pusher.push(KEY, [instance(1)], "token", SwitchMessage(3, PLAIN), 0.05)
    assert known[instance(1)].why_not(3) == "connection failed (Connection refused)"
    runtime.pod("10.0.0.1").error = None
    await asyncio.sleep(0.5)
    assert pusher.confirmations(KEY)[instance(1)].confirms(3)
    assert news == [KEY]
    await pusher.aclose()


async def test_a_pod_ahead_makes_the_operator_learn_its_generation():
    runtime, news = FakeRuntime(), []
    runtime.pod("10.0.0.1").generation = 8
    pusher = Pusher(runtime, news.append)
    await pusher.push(KEY, [instance(1)], "token", SwitchMessage(3, PLAIN), 0.05)
    assert news == [KEY]
    message = plan(PLAIN, SwitchMessage(3, PLAIN), 3, pusher.observed_generation(KEY)).message
    assert message.generation == 9
    known = await pusher.push(KEY, [instance(1)], "token", message, 0.05)
    assert known[instance(1)].confirms(9)
    await pusher.aclose()


async def test_other_switches_under_the_same_generation_make_it_grow():
    runtime = FakeRuntime()
    runtime.pod("10.0.0.1").error = PodError(PodErrorKind.AHEAD, "other switches", 3)
    pusher = Pusher(runtime, lambda key: None)
    await pusher.push(KEY, [instance(1)], "token", SwitchMessage(3, PLAIN), 0.05)
    assert plan(PLAIN, SwitchMessage(3, PLAIN), 3, pusher.observed_generation(KEY)).message.generation > 3
    await pusher.aclose()


async def test_a_lost_config_map_is_made_from_what_the_pods_run():
    runtime = FakeRuntime()
    runtime.pod("10.0.0.1").generation = 5
    runtime.pod("10.0.0.2").error = PodError(PodErrorKind.UNREACHABLE, "gone")
    pusher = Pusher(runtime, lambda key: None)
    await pusher.learn(KEY, [instance(1), instance(2)], "token")
    assert pusher.observed_generation(KEY) == 5
    await pusher.aclose()


async def test_a_poll_finds_a_pod_that_fell_back_and_reads_only():
    runtime = FakeRuntime()
    pusher = Pusher(runtime, lambda key: None)
    message = SwitchMessage(3, PLAIN)
    await pusher.push(KEY, [instance(1)], "token", message, 1.0)
    assert not await pusher.refresh(KEY), "nothing changed"
    runtime.pod("10.0.0.1").generation = 2
    assert await pusher.refresh(KEY)
    assert len(runtime.pod("10.0.0.1").messages) == 1
    known = await pusher.push(KEY, [instance(1)], "token", message, 1.0)
    assert known[instance(1)].confirms(3)
    await pusher.aclose()


async def test_a_poll_tells_when_a_switch_changed_its_state():
    runtime = FakeRuntime()
    pusher = Pusher(runtime, lambda key: None)
    await pusher.push(KEY, [instance(1)], "token", SwitchMessage(3, PLAIN), 1.0)
    runtime.pod("10.0.0.1").states["fusedKernels"] = "inactive"
    assert await pusher.refresh(KEY)
    await pusher.aclose()


async def test_a_service_that_is_gone_is_not_talked_to():
    runtime = FakeRuntime()
    runtime.pod("10.0.0.1").error = PodError(PodErrorKind.UNREACHABLE, "gone")
    pusher = Pusher(runtime, lambda key: None)
    await pusher.push(KEY, [instance(1)], "token", SwitchMessage(3, PLAIN), 0.01)
    pusher.forget(KEY)
    assert pusher.confirmations(KEY) == {}
    assert pusher.observed_generation(KEY) == 0
    await pusher.aclose()
