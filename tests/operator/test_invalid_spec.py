"""Specs that cannot be read: what runs is left alone, and the kill switch counts all the same."""

from __future__ import annotations

import logging

import pytest
from tests.operator.fakes import kill_switch_body, service_body
from tests.operator.test_kill import api, run, written  # noqa: F401
from tests.operator.world import KEY

from firsttoken_api.switches import Cause, SwitchMessage, resolve
from firsttoken_operator.cluster import ClusterError
from firsttoken_operator.invalid_spec import read_asked
from firsttoken_operator.kill_state import KillMemory

# A selector of a release to come.
BEYOND = {"matchExpressions": [{"key": "tier", "operator": "Above", "values": ["3"]}]}


@pytest.fixture
async def serving(serving):
    """A service with one pod that serves; chunkedPrefill configured, prefixCache rolled back."""
    serving.serve(optimizations={"chunkedPrefill": {"chunkSize": 64}}, rollback={"prefixCache": True})
    await serving.reconcile(2)
    serving.cluster.writes.clear()
    return serving


def spoil(world, **spec):
    body = world.cluster.named("InferenceService", "smollm")
    world.cluster.put({**body, "spec": {**body["spec"], "replicas": -1, **spec}})


def states(world):
    return dict(world.runtime.pod("10.0.0.1").states)


class TestInferenceService:
    async def test_a_kill_reaches_a_service_whose_spec_cannot_be_read(self, serving):
        before, switches = states(serving), serving.switches().switches
        spoil(serving)
        await serving.reconcile()
        assert states(serving) == before, "left alone"
        serving.cluster.put(kill_switch_body(reason="incident 12"))
        await serving.reconcile()
        assert states(serving)["chunkedPrefill"] == "killed"
        assert serving.condition("Ready") == ("False", "SpecInvalid")
        assert serving.status()["killSwitch"]["reason"] == "incident 12"
        assert serving.writes("Deployment", "Service") == []
        serving.cluster.put({**kill_switch_body(), "spec": {"engaged": False}})
        await serving.reconcile()
        assert states(serving) == before, "a release gives back what was"
        assert serving.switches().switches == switches
        assert "killSwitch" not in serving.status()

    async def test_the_kill_switch_counts_its_pods(self, serving):
        spoil(serving)
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        await serving.reconciler.kill_switch()
        status = serving.cluster.named("KillSwitch", "global", None)["status"]
        assert (status["podsConfirmed"], status["conditions"][0]["status"]) == ("1/1", "True")

    async def test_a_restarted_operator_kills_it_too(self, serving):
        spoil(serving)
        serving.start_operator()
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        assert states(serving)["chunkedPrefill"] == "killed"
        assert serving.reconciler.knows(KEY), "its pods are polled"

    async def test_a_roll_back_counts_as_well(self, serving):
        spoil(serving, rollback={"all": True})
        await serving.reconcile()
        assert states(serving)["chunkedPrefill"] == "rolledBack"

    async def test_a_service_that_never_ran_gets_nothing_and_holds_up_no_kill(self, serving):
        serving.cluster.put(service_body("broken", replicas=-1))
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        await serving.reconciler.service(("default", "broken"))
        assert {name for _, kind, name in serving.writes() if kind != "Event"} == {
            "smollm-switches",
            "smollm",
            "broken",
        }
        await serving.reconciler.kill_switch()
        status = serving.cluster.named("KillSwitch", "global", None)["status"]
        assert status["conditions"][0]["reason"] == "Engaged"

    async def test_somebody_elses_config_map_is_left_to_them_and_said(self, serving, caplog):
        body = service_body("broken", replicas=-1)
        serving.cluster.put(body)
        serving.cluster.put(
            {"kind": "ConfigMap", "metadata": {"name": "broken-switches", "namespace": "default"}, "data": {}}
        )
        await serving.reconciler.service(("default", "broken"))
        assert "broken-switches exists and does not belong" in caplog.text
        assert serving.cluster.named("ConfigMap", "broken-switches")["data"] == {}

    async def test_an_api_server_that_fails_is_an_error_to_try_again(self, serving):
        spoil(serving)
        serving.cluster.put(kill_switch_body())
        serving.cluster.refuse["apply", "ConfigMap"] = ClusterError(500, "etcd is down")
        with pytest.raises(ClusterError):
            await serving.reconciler.service(KEY)

    async def test_it_is_said_once(self, serving):
        spoil(serving)
        await serving.reconcile(3)
        assert [kind for _, kind, _ in serving.writes()] == ["InferenceService"]

    async def test_a_status_that_cannot_be_read_either_does_not_stop_it(self, serving):
        spoil(serving)
        body = serving.cluster.named("InferenceService", "smollm")
        serving.cluster.put({**body, "status": {"replicas": "many", "conditions": "none"}})
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        assert states(serving)["chunkedPrefill"] == "killed"

    async def test_corrected_it_is_as_it_was(self, serving):
        spoil(serving)
        await serving.reconcile()
        serving.serve(optimizations={"chunkedPrefill": {"chunkSize": 64}}, rollback={"prefixCache": True})
        await serving.reconcile(2)
        assert serving.condition("Ready") == ("True", "Serving")


class TestWhatCanBeRead:
    """Part by part; for the rest what was written last."""

    WRITTEN = SwitchMessage(
        4,
        resolve(
            {"chunkedPrefill": {"enabled": False, "chunkSize": 64}, "kvQuantization": {"enabled": True}},
            {"prefixCache": True},
            frozenset({"cudaGraphs"}),
        ),
    )

    def resolved(self, killed=frozenset(), written=WRITTEN, **spec):
        asked = read_asked(service_body(replicas=-1, **spec))
        assert "spec.replicas" in asked.invalid
        return asked.switches(killed, written)

    def test_good_parts_count_as_written_in_the_spec(self):
        found = self.resolved(
            optimizations={"chunkedPrefill": {"chunkSize": 128}}, rollback={"fusedKernels": True}
        )
        assert found == resolve({"chunkedPrefill": {"chunkSize": 128}}, {"fusedKernels": True}, frozenset())

    def test_one_bad_optimization_is_as_it_was_and_the_others_count(self):
        found = self.resolved(
            optimizations={"chunkedPrefill": {"chunkSize": 1}, "priorityScheduling": {"enabled": False}}
        )
        assert found["chunkedPrefill"] == self.WRITTEN.switches["chunkedPrefill"]
        assert not found["priorityScheduling"].enabled

    @pytest.mark.parametrize("bad", ["none", [], 1])
    def test_bad_optimizations_are_as_they_were(self, bad):
        found = self.resolved(optimizations=bad, rollback={"prefixCache": True})
        assert found["kvQuantization"].enabled
        assert found["prefixCache"].cause is Cause.ROLLED_BACK
        assert found["cudaGraphs"].enabled, "given back: its default"

    def test_bad_roll_backs_give_nothing_back(self):
        found = self.resolved(rollback=["all"])
        off = {name for name, setting in found.items() if setting.cause is Cause.ROLLED_BACK}
        assert off == {"prefixCache", "cudaGraphs"}

    def test_without_any_spec_and_without_a_config_map_the_defaults_count(self):
        body = {**service_body(), "spec": None}
        assert read_asked(body).switches(frozenset(), None) == resolve({}, {}, frozenset())

    @pytest.mark.parametrize("spec", [{}, {"optimizations": 1}, {"rollback": 1}, {"optimizations": None}])
    @pytest.mark.parametrize("last", [None, WRITTEN])
    def test_a_kill_wins_whatever_can_be_read(self, spec, last):
        found = self.resolved(frozenset({"chunkedPrefill"}), last, **spec)
        assert found["chunkedPrefill"].cause is Cause.KILLED


class TestKillSwitch:
    async def test_one_that_cannot_be_read_stops_no_service(self, serving):
        before = states(serving)
        serving.cluster.put(kill_switch_body(selector=BEYOND))
        serving.serve(optimizations={"chunkedPrefill": {"chunkSize": 32}}, rollback={"prefixCache": True})
        await serving.reconcile()
        assert serving.switches().switches["chunkedPrefill"].parameters == {"chunkSize": 32}
        assert states(serving) == before

    async def test_what_was_killed_stays_killed(self, serving):
        serving.cluster.put(kill_switch_body(reason="incident 12"))
        await serving.reconcile()
        serving.cluster.put(kill_switch_body(selector=BEYOND))
        await serving.reconcile(2)
        assert states(serving)["chunkedPrefill"] == "killed"
        assert serving.status()["killSwitch"]["reason"] == "incident 12"

    async def test_also_for_an_operator_that_has_just_started(self, serving):
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        serving.cluster.put(kill_switch_body(selector=BEYOND))
        serving.start_operator()
        await serving.reconcile(2)
        assert states(serving)["chunkedPrefill"] == "killed"
        assert serving.condition("SwitchesApplied") == ("True", "Confirmed")

    async def test_and_for_a_new_service(self, serving):
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        serving.cluster.put(kill_switch_body(selector=BEYOND))
        serving.cluster.put(service_body("second"))
        await serving.reconciler.service(("default", "second"))
        config_map = serving.cluster.named("ConfigMap", "second-switches")
        assert '"cause": "killed"' in config_map["data"]["switches.json"]

    async def test_it_is_said_once_in_its_status_in_an_event_and_in_the_log(self, serving, caplog):
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        await serving.reconciler.kill_switch()
        body = serving.cluster.named("KillSwitch", "global", None)
        serving.cluster.put({**body, "spec": {"engaged": True, "selector": BEYOND}})
        serving.cluster.writes.clear()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert await serving.reconciler.kill_switch() is None
        status = serving.cluster.named("KillSwitch", "global", None)["status"]
        (condition,) = status["conditions"]
        assert (condition["status"], condition["reason"]) == ("False", "SpecInvalid")
        assert "spec.selector.matchExpressions.0.operator" in condition["message"]
        assert "what was killed stays killed" in condition["message"]
        assert status["observedGeneration"] == 2
        assert "effectiveAt" not in status
        assert [kind for _, kind, _ in serving.writes()] == ["KillSwitch", "Event"]
        events = [body for (kind, _, _), body in serving.cluster.objects.items() if kind == "Event"]
        about = [event for event in events if event["involvedObject"]["kind"] == "KillSwitch"]
        assert [(event["type"], event["reason"]) for event in about][1:] == [("Warning", "SpecInvalid")]
        assert [record.message for record in caplog.records] == [f"KillSwitch global: {condition['message']}"]

    async def test_corrected_it_counts(self, serving):
        serving.cluster.put(kill_switch_body(selector=BEYOND))
        await serving.reconciler.kill_switch()
        await serving.reconcile()
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        await serving.reconciler.kill_switch()
        assert states(serving)["chunkedPrefill"] == "killed"
        status = serving.cluster.named("KillSwitch", "global", None)["status"]
        assert status["conditions"][0]["reason"] == "Engaged"

    async def test_released_nothing_else_of_it_has_to_be_readable(self, serving):
        serving.cluster.put(kill_switch_body())
        await serving.reconcile()
        serving.cluster.put(kill_switch_body(engaged=False, selector=BEYOND))
        await serving.reconcile()
        assert states(serving)["chunkedPrefill"] == "on"
        await serving.reconciler.kill_switch()
        status = serving.cluster.named("KillSwitch", "global", None)["status"]
        assert status["conditions"][0]["reason"] == "Released"

    @pytest.mark.parametrize(
        "spec", [None, {}, [], {"engaged": "perhaps"}, {"engaged": True, "optimizations": 3}]
    )
    def test_whatever_its_spec_is_the_last_one_counts(self, spec):
        memory = KillMemory()
        assert not memory.look({**kill_switch_body(), "spec": spec}).known
        assert memory.look(kill_switch_body()).killed("default", {}, None)
        assert memory.look({**kill_switch_body(), "spec": spec}).killed("default", {}, None)
        assert not memory.look(None).killed("default", {}, None), "deleted"
        assert not memory.look({**kill_switch_body(), "spec": spec}).killed("default", {}, None)


class TestKillByHand:
    """`firsttoken kill` with the operator dead."""

    def test_a_service_whose_spec_cannot_be_read_is_killed_and_given_back(self, api, capsys):  # noqa: F811
        before = written(api).switches
        body = api.named("InferenceService", "smollm")
        api.put({**body, "spec": {**body["spec"], "replicas": -1}})
        code, report = run(capsys)
        assert (code, report["pods_confirmed"]) == (0, 1)
        assert api.runtime.pod("10.0.0.1").states["prefixCache"] == "killed"
        assert run(capsys, engaged=False)[0] == 0
        assert written(api).switches == before

    def test_a_kill_switch_that_cannot_be_read_is_replaced_and_can_be_released(self, api, capsys):  # noqa: F811
        api.put(kill_switch_body(selector=BEYOND))
        assert run(capsys, engaged=False)[0] == 0
        api.put(kill_switch_body(selector=BEYOND))
        assert run(capsys)[0] == 0
        assert api.named("KillSwitch", "global", None)["spec"]["namespaces"] == []
        assert api.runtime.pod("10.0.0.1").states["prefixCache"] == "killed"
