"""From events to keys: what is looked at, and what is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from tests.operator.fakes import FakeClock, FakeCluster, FakeRuntime, kill_switch_body, service_body
from tests.operator.world import SETTINGS

from firsttoken_operator.cluster import ClusterError
from firsttoken_operator.dispatch import Dispatcher
from firsttoken_operator.health import STALE_SECONDS, Freshness, Health, start_servers
from firsttoken_operator.metrics import CountingCluster, OperatorMetrics
from firsttoken_operator.settings import SettingsError, read_settings

KEY = ("default", "smollm")


@pytest.fixture
async def world():
    clock, cluster, metrics = FakeClock(), FakeCluster(), OperatorMetrics()
    health = Health(Freshness(clock.time))
    dispatcher = Dispatcher(CountingCluster(cluster, metrics), FakeRuntime(), SETTINGS, metrics, health)
    looked = []
    dispatcher.reconciler.service = _recorder(looked)
    dispatcher.clock, dispatcher.fake, dispatcher.looked = clock, cluster, looked
    dispatcher.health, dispatcher.metrics = health, metrics
    yield dispatcher
    await dispatcher.aclose()


def _recorder(looked):
    async def reconcile(key):
        looked.append(key)

    return reconcile


async def settle(dispatcher):
    await dispatcher.services.idle()
    await dispatcher.kill.idle()


async def test_a_status_write_of_our_own_is_not_looked_at_again(world):
    body = service_body()
    world.saw_service(body, deleted=False)
    await settle(world)
    world.saw_service({**body, "status": {"replicas": 1}}, deleted=False)
    await settle(world)
    assert world.looked == [KEY]


@pytest.mark.parametrize(
    "change", [{"generation": 2}, {"labels": {"a": "b"}}, {"deletionTimestamp": "now"}, {"uid": "another"}]
)
async def test_what_can_change_the_outcome_is_looked_at(world, change):
    body = service_body()
    world.saw_service(body, deleted=False)
    await settle(world)
    world.saw_service({**body, "metadata": {**body["metadata"], **change}}, deleted=False)
    await settle(world)
    assert world.looked == [KEY, KEY]


async def test_a_child_leads_to_its_service_and_a_stranger_to_none(world):
    world.saw_child("default", "smollm")
    world.saw_child("default", None)
    await settle(world)
    assert world.looked == [KEY]


async def test_the_kill_switch_has_every_service_looked_at_but_its_status_does_not(world):
    for name in ("a", "b"):
        world.saw_service(service_body(name), deleted=False)
    await settle(world)
    world.looked.clear()
    body = kill_switch_body()
    world.saw_kill_switch(body, deleted=False)
    await settle(world)
    assert sorted(world.looked) == [("default", "a"), ("default", "b")]
    world.saw_kill_switch({**body, "status": {"podsConfirmed": "0/0"}}, deleted=False)
    await settle(world)
    assert len(world.looked) == 2
    world.saw_kill_switch(body, deleted=True)
    await settle(world)
    assert len(world.looked) == 4


async def test_a_status_that_another_operator_writes_is_not_fought_over(world):
    body = world.fake.put(kill_switch_body())
    world.saw_kill_switch(body, deleted=False)
    await settle(world)
    writes = len(world.fake.writes)
    for count in range(5):
        theirs = {**body, "status": {"podsConfirmed": f"{count}/9"}}
        world.fake.put(theirs)
        world.saw_kill_switch(theirs, deleted=False)
        await settle(world)
    assert len(world.fake.writes) == writes


async def test_a_resync_looks_at_every_service_whatever_the_watch_said(world):
    world.fake.put(service_body("a"))
    world.fake.put(service_body("b"))
    await world.resync()
    await settle(world)
    assert sorted(world.looked) == [("default", "a"), ("default", "b")]
    assert world.health.listed_once


async def test_a_watch_that_missed_a_change_for_long_makes_the_operator_unhealthy(world):
    body = world.fake.put(service_body())
    world.saw_service(body, deleted=False)
    await world.resync()
    assert world.health.alive() == (True, "ok")
    changed = {**body, "spec": {**body["spec"], "replicas": 2}}
    world.fake.put(changed)
    await world.resync()
    world.clock.advance(STALE_SECONDS + 1)
    assert not world.health.alive()[0]
    world.saw_service({**changed, "metadata": {**body["metadata"], "generation": 2}}, deleted=False)
    assert world.health.alive() == (True, "ok")


async def test_a_watch_that_missed_a_deletion_is_noticed_too(world):
    body = world.fake.put(service_body())
    world.saw_service(body, deleted=False)
    world.fake.remove("InferenceService", "smollm")
    await world.resync()
    world.clock.advance(STALE_SECONDS + 1)
    assert not world.health.alive()[0]


async def test_a_dead_api_server_does_not_make_the_operator_unhealthy(world, monkeypatch):
    async def fail(*_):
        raise ClusterError(0, "connection refused")

    monkeypatch.setattr(world.fake, "list", fail)
    with pytest.raises(ClusterError):
        await world.resync()
    world.clock.advance(10 * STALE_SECONDS)
    assert world.health.alive() == (True, "ok")
    errors = world.metrics.registry.get_sample_value("firsttoken_operator_api_errors_total", {"status": "0"})
    assert errors == 1.0


async def test_ready_only_after_the_crds_and_the_first_list(world):
    assert world.health.ready()[0] is False
    world.health.waiting_for = ""
    assert "first list" in world.health.ready()[1]
    await world.resync()
    assert world.health.ready() == (True, "ok")


async def test_probes_and_metrics_are_served(world):
    servers = await start_servers(world.health, world.metrics, "127.0.0.1", 0, 0)
    probes, scrape = (runner.addresses[0][1] for runner in servers)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{probes}/healthz") as answer:
            assert answer.status == 200
        async with session.get(f"http://127.0.0.1:{probes}/readyz") as answer:
            assert answer.status == 503
            assert "waiting for" in await answer.text()
        async with session.get(f"http://127.0.0.1:{scrape}/metrics") as answer:
            assert "firsttoken_operator_watch_lag_seconds 0.0" in await answer.text()
    for server in servers:
        await server.cleanup()


def test_settings_come_from_the_environment():
    found = read_settings(
        {
            "FIRSTTOKEN_RUNTIME_IMAGE": "runtime:1",
            "FIRSTTOKEN_WATCH_NAMESPACES": "b, a,",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "POD_NAMESPACE": "system",
        }
    )
    assert found.namespaces == ("a", "b")
    assert found.bind_host == "0.0.0.0"
    assert found.operator_namespace == "system"
    assert "cpu" in found.accelerators


def test_outside_a_cluster_nothing_listens_beyond_loopback():
    assert read_settings({"FIRSTTOKEN_RUNTIME_IMAGE": "runtime:1"}).bind_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FIRSTTOKEN_RUNTIME_IMAGE": ""}, "FIRSTTOKEN_RUNTIME_IMAGE is not set"),
        ({"FIRSTTOKEN_RUNTIME_PULL_POLICY": "Sometimes"}, "use one of IfNotPresent, Always, Never"),
        ({"FIRSTTOKEN_WATCH_NAMESPACES": "Bad_Name"}, "is no namespace"),
        ({"FIRSTTOKEN_METRICS_PORT": "http"}, "write a port"),
        ({"FIRSTTOKEN_ACCELERATORS": "/nowhere.yaml"}, "cannot be read"),
    ],
)
def test_settings_that_make_no_sense_name_the_variable(change, words):
    with pytest.raises(SettingsError, match=words):
        read_settings({"FIRSTTOKEN_RUNTIME_IMAGE": "runtime:1", **change})


async def test_a_service_is_polled_until_it_is_gone():
    cluster, runtime, metrics = FakeCluster(), FakeRuntime(), OperatorMetrics()
    settings = replace(SETTINGS, poll_seconds=0.02)
    dispatcher = Dispatcher(cluster, runtime, settings, metrics, Health(Freshness(FakeClock().time)))
    polled = []

    async def poll(key):
        polled.append(key)
        return False

    dispatcher.reconciler.poll = poll
    cluster.put(service_body())
    dispatcher.saw_service(service_body(), deleted=False)
    await asyncio.sleep(0.2)
    assert len(polled) >= 2
    cluster.remove("InferenceService", "smollm")
    dispatcher.saw_service(service_body(), deleted=True)
    await dispatcher.services.idle()
    count = len(polled)
    await asyncio.sleep(0.1)
    assert len(polled) == count
    await dispatcher.aclose()
