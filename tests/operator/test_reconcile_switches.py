"""Reconcile, the switches: from spec, rollback and kill switch to every pod, under one rising generation."""

from __future__ import annotations

import pytest
from tests.operator.fakes import kill_switch_body, pod_body, service_body
from tests.operator.world import KEY

from firsttoken_operator.cluster import ClusterError
from firsttoken_operator.runtime_client import PodError, PodErrorKind


async def test_a_rollback_reaches_the_pod_and_touches_nothing_but_the_config_map(serving):
    serving.serve(rollback={"chunkedPrefill": True})
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").states["chunkedPrefill"] == "rolledBack"
    assert serving.switches().generation == 2
    assert {kind for _, kind, _ in serving.writes()} == {"ConfigMap", "InferenceService", "Event"}
    line = next(item for item in serving.status()["optimizations"] if item["name"] == "chunkedPrefill")
    assert (line["effective"], line["pods"]) == ("rolledBack", "1/1")
    serving.serve()
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").states["chunkedPrefill"] == "on"
    assert serving.switches().generation == 3


async def test_the_config_map_is_written_before_any_pod_is_told(serving):
    serving.runtime.pod("10.0.0.1").error = PodError(PodErrorKind.UNREACHABLE, "no answer within 2 s")
    serving.serve(rollback={"all": True})
    await serving.reconcile()
    assert serving.switches().switches["prefixCache"].cause == "rolledBack"
    assert serving.condition("SwitchesApplied") == ("False", "NotConfirmed")
    assert serving.condition("Degraded") == ("True", "SwitchesNotApplied")
    line = next(item for item in serving.status()["optimizations"] if item["name"] == "prefixCache")
    assert line["notConfirmed"] == ["smollm-a"]
    assert serving.condition("Ready") == ("True", "Serving")


async def test_a_deleted_config_map_comes_back_with_a_higher_generation(serving):
    serving.serve(rollback={"prefixCache": True})
    await serving.reconcile()
    serving.cluster.remove("ConfigMap", "smollm-switches")
    serving.start_operator()
    await serving.reconcile()
    assert serving.switches().generation == 3
    assert serving.condition("SwitchesApplied") == ("True", "Confirmed")


async def test_a_config_map_edited_by_hand_is_put_right_under_a_new_generation(serving):
    config_map = serving.cluster.named("ConfigMap", "smollm-switches")
    config_map["data"]["switches.json"] = '{"generation": 1, "switches": {"prefixCache": {"enabled": false}}}'
    serving.cluster.put(config_map)
    await serving.reconcile()
    assert serving.switches().generation == 2
    assert serving.switches().switches["prefixCache"].enabled


async def test_a_concurrent_write_of_the_config_map_is_noticed_and_read_again(serving, monkeypatch):
    real_get = serving.cluster.get
    seen = []

    async def get(kind, namespace, name):
        found = await real_get(kind, namespace, name)
        if kind.kind == "ConfigMap" and not seen:
            seen.append(name)
            serving.cluster.put(serving.cluster.named("ConfigMap", name))
        return found

    monkeypatch.setattr(serving.cluster, "get", get)
    serving.serve(rollback={"all": True})
    assert await serving.reconciler.service(KEY) is not None
    assert await serving.reconciler.service(KEY) is None
    assert serving.switches().generation == 2


async def test_the_kill_switch_reaches_the_pod_and_a_release_restores_what_was(serving):
    serving.serve(rollback={"prefixCache": True}, optimizations={"chunkedPrefill": {"chunkSize": 64}})
    await serving.reconcile()
    before = dict(serving.runtime.pod("10.0.0.1").states)
    parameters = serving.switches().switches
    serving.cluster.put(kill_switch_body(reason="incident 12"))
    await serving.reconcile()
    states = serving.runtime.pod("10.0.0.1").states
    assert states["continuousBatching"] == "on", "essential"
    assert {state for name, state in states.items() if name != "continuousBatching"} == {"killed"}
    assert serving.status()["killSwitch"]["reason"] == "incident 12"
    released = kill_switch_body()
    released["spec"]["engaged"] = False
    serving.cluster.put(released)
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.1").states == before
    assert serving.switches().switches == parameters
    assert "killSwitch" not in serving.status()


async def test_a_pod_that_starts_while_the_kill_switch_is_engaged_finds_it_in_its_config_map(world):
    world.cluster.put(kill_switch_body())
    world.serve()
    await world.reconcile()
    assert world.switches().switches["prefixCache"].cause == "killed"


async def test_the_kill_switchs_status_counts_confirmed_pods(serving):
    serving.cluster.put(kill_switch_body())
    await serving.reconciler.kill_switch()
    status = serving.cluster.named("KillSwitch", "global", None)["status"]
    assert status["conditions"][0]["status"] == "False"
    await serving.reconcile()
    assert serving.kill_news > 0
    await serving.reconciler.kill_switch()
    status = serving.cluster.named("KillSwitch", "global", None)["status"]
    assert status["conditions"][0]["status"] == "True"
    assert status["podsConfirmed"] == "1/1"
    assert status["effectiveAt"] == "2026-01-01T00:00:00.000Z"
    events = [body["reason"] for (kind, _, _), body in serving.cluster.objects.items() if kind == "Event"]
    assert events[-1] == "Engaged"
    serving.cluster.writes.clear()
    await serving.reconciler.kill_switch()
    assert serving.writes() == []


async def test_a_restarted_operator_does_not_take_an_effective_kill_switch_back(serving):
    serving.cluster.put(kill_switch_body())
    await serving.reconcile()
    await serving.reconciler.kill_switch()
    serving.cluster.writes.clear()
    serving.start_operator()
    await serving.reconciler.kill_switch()
    await serving.reconcile()
    await serving.reconciler.kill_switch()
    assert serving.writes("KillSwitch") == []


async def test_a_service_that_cannot_be_looked_at_does_not_hold_up_the_kill_switchs_status(serving):
    serving.cluster.put(service_body("broken"))
    serving.cluster.put(kill_switch_body())
    await serving.reconciler.kill_switch()
    await serving.reconcile()
    serving.cluster.refuse["apply", "ConfigMap"] = ClusterError(403, "no ConfigMaps for you")
    before = serving.kill_news
    with pytest.raises(ClusterError):
        await serving.reconciler.service(("default", "broken"))
    assert serving.kill_news == before + 1
    await serving.reconciler.kill_switch()
    status = serving.cluster.named("KillSwitch", "global", None)["status"]
    assert status["podsConfirmed"] == "1/1"
    assert [missing["service"] for missing in status["notConfirmed"]] == ["broken"]


async def test_without_a_kill_switch_nothing_is_written_about_it(serving):
    await serving.reconciler.kill_switch()
    assert serving.writes() == []


async def test_a_draining_pod_is_told_too_but_not_counted(serving):
    stopping = pod_body("smollm-old", ip="10.0.0.9", metadata={"deletionTimestamp": "now"})
    serving.run_pods(pod_body(), stopping)
    serving.cluster.put(kill_switch_body())
    await serving.reconcile()
    assert serving.runtime.pod("10.0.0.9").states["prefixCache"] == "killed"
    assert serving.status()["replicas"] == 1
