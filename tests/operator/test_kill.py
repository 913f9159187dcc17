"""`firsttoken kill` and `release`: the operator is dead, the API server and the pods are there."""

from __future__ import annotations

import json

import pytest
from tests.operator.fakes import FakeCluster, FakeRuntime, kill_switch_body, pod_body, service_body
from tests.operator.world import SETTINGS

from firsttoken_api.resources import InferenceService
from firsttoken_api.switches import SwitchMessage, parse_message, resolve
from firsttoken_operator import kill
from firsttoken_operator.cluster import ClusterError, KubeCluster
from firsttoken_operator.desired import access
from firsttoken_operator.desired.switches import read_switches, switches_config_map
from firsttoken_operator.drift import stamped
from firsttoken_operator.kill import KillOptions
from firsttoken_operator.reconcile import Reconciler
from firsttoken_operator.runtime_client import PodAddress, PodError
from firsttoken_operator.switches import Pusher
from firsttoken_operator.verify import Verifier

TOKEN = "the-token"


class FakeApiServer(FakeCluster):
    """The fake cluster with a pod proxy that, like the real one, does not pass Authorization on."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = FakeRuntime()
        self.hosts: dict[str, str] = {}
        self.tokens: list[str | None] = []

    async def patch(self, kind, namespace, name, operations):
        live = self.objects.get((kind.kind, namespace, name))
        if live is None:
            raise ClusterError(404, "not found")
        self._write("patch", live)
        (operation,) = operations
        *parents, last = operation["path"].strip("/").split("/")
        changed = json.loads(json.dumps(live))
        target = changed
        for parent in parents:
            target = target[parent]
        target[last] = operation["value"]
        return self.put(changed)

    async def exchange(self, method, target, *, body=None, headers=None, timeout_seconds=30.0):
        pod_name, route = target.split("/pods/")[1].split(":8001/proxy/admin/v1/")
        self.tokens.append((headers or {}).get("X-Firsttoken-Token"))
        address = PodAddress(self.hosts[pod_name], 8000, 8001)
        try:
            if route == "state":
                state = await self.runtime.state(address, "")
            else:
                state = await self.runtime.put_switches(address, "", parse_message(body))
        except PodError as error:
            answer = {"generation": error.generation, "error": {"message": str(error)}}
            return (409 if error.generation else 503), json.dumps(answer)
        switches = [{"name": item.name, "state": item.state} for item in state.switches]
        return 200, json.dumps({"generation": state.generation, "switches": switches})

    async def aclose(self) -> None:
        return None


@pytest.fixture
def api(monkeypatch):
    found = FakeApiServer()
    owner = InferenceService.model_validate(found.put(service_body()))
    found.put(stamped(switches_config_map(owner, SwitchMessage(4, resolve({}, {}, frozenset())))))
    found.put(access.admin_secret(owner, TOKEN))
    found.put(pod_body())
    found.hosts["smollm-a"] = "10.0.0.1"
    found.runtime.pod("10.0.0.1").generation = 4

    async def connect(kubeconfig=None, context=None):
        return found

    monkeypatch.setattr(KubeCluster, "connect", connect)
    return found


def run(capsys, **options):
    code = kill.run(KillOptions(json=True, **{"engaged": True, "timeout_seconds": 0.3, **options}))
    return code, json.loads(capsys.readouterr().out)


def written(api):
    return read_switches(api.named("ConfigMap", "smollm-switches"))


def test_a_kill_writes_the_switch_and_the_config_map_and_tells_the_pod(api, capsys):
    code, report = run(capsys, reason="incident 12")
    assert code == 0
    assert report["effective"] is True
    assert report["services"][0]["pods"][0]["confirmed"] is True
    spec = api.named("KillSwitch", "global", None)["spec"]
    assert (spec["engaged"], spec["reason"]) == (True, "incident 12")
    assert written(api).generation == 5
    assert api.runtime.pod("10.0.0.1").states["prefixCache"] == "killed"
    assert api.tokens == [TOKEN]


def test_a_kill_says_in_the_kill_switch_who_confirmed(api, capsys):
    run(capsys)
    status = api.named("KillSwitch", "global", None)["status"]
    assert status["podsConfirmed"] == "1/1"
    assert status["conditions"][0]["status"] == "True"


def test_a_release_restores_what_was(api, capsys):
    before = written(api).switches
    run(capsys)
    code, report = run(capsys, engaged=False)
    assert code == 0
    assert report["engaged"] is False
    assert written(api).switches == before
    assert written(api).generation == 6
    assert api.runtime.pod("10.0.0.1").states["prefixCache"] == "on"


def test_a_second_kill_of_the_same_changes_nothing_but_asks_again(api, capsys):
    run(capsys)
    code, _ = run(capsys)
    assert code == 0
    assert written(api).generation == 5


def test_a_kill_of_one_optimization_leaves_the_others(api, capsys):
    run(capsys, optimizations=("prefixCache",))
    states = api.runtime.pod("10.0.0.1").states
    assert (states["prefixCache"], states["chunkedPrefill"]) == ("killed", "on")


def test_a_narrower_kill_gives_back_where_it_no_longer_reaches(api, capsys):
    run(capsys)
    code, report = run(capsys, namespaces=("elsewhere",))
    assert code == 0
    assert report["services"] == [], "not concerned"
    assert api.runtime.pod("10.0.0.1").states["prefixCache"] == "on"


def test_a_pod_that_does_not_answer_is_named_and_the_command_fails(api, capsys):
    api.runtime.pod("10.0.0.1").error = PodError("unreachable", "dial tcp 10.0.0.1:8001: refused")
    code, report = run(capsys)
    assert code == 1
    (pod,) = report["services"][0]["pods"]
    assert pod["confirmed"] is False
    assert "refused" in pod["why"]
    assert written(api).switches["prefixCache"].cause == "killed", "it follows its ConfigMap"


def test_a_pod_that_is_ahead_gets_a_higher_generation(api, capsys):
    api.runtime.pod("10.0.0.1").generation = 40
    code, report = run(capsys)
    assert code == 0
    assert report["services"][0]["generation"] == 41


def test_a_lost_config_map_is_made_from_what_the_pods_run(api, capsys):
    api.runtime.pod("10.0.0.1").generation = 9
    api.remove("ConfigMap", "smollm-switches")
    code, report = run(capsys)
    assert code == 0
    assert report["services"][0]["generation"] == 10


def test_a_kill_goes_on_where_the_kill_switch_cannot_be_written(api, capsys):
    api.refuse["create", "KillSwitch"] = ClusterError(403, "you may not")
    code, report = run(capsys)
    assert code == 1
    assert "you may not" in report["warning"]
    assert api.runtime.pod("10.0.0.1").states["prefixCache"] == "killed"


def test_a_status_of_another_version_stops_no_kill(api, capsys):
    api.put({**api.named("InferenceService", "smollm"), "status": {"replicas": "many"}})
    api.put({**kill_switch_body(engaged=False), "status": {"pods": "all"}})
    code, told = run(capsys)
    assert (code, told["pods_confirmed"]) == (0, 1)


def test_an_unreachable_cluster_is_one_line(api, capsys, monkeypatch):
    async def patch(*_):
        raise ClusterError(0, "API server not reachable: refused")

    monkeypatch.setattr(api, "patch", patch)
    assert kill.run(KillOptions(engaged=True)) == 2
    assert capsys.readouterr().err == "error: API server not reachable: refused\n"


@pytest.mark.parametrize("selector", ["tier", "=gold", "a=b,c"])
def test_a_selector_that_is_none_is_said(api, capsys, selector):
    assert kill.run(KillOptions(engaged=True, selector=selector)) == 2
    assert "write KEY=VALUE" in capsys.readouterr().err
    assert api.writes == []


def test_a_selector_becomes_match_labels():
    spec = kill.kill_spec(KillOptions(engaged=True, selector="tier=gold, team=a"))
    assert spec["selector"] == {"matchLabels": {"tier": "gold", "team": "a"}}


def test_the_text_names_every_pod(api, capsys):
    kill.run(KillOptions(engaged=True, timeout_seconds=0.3))
    out = capsys.readouterr().out
    assert "default/smollm  generation 5" in out
    assert "smollm-a  confirmed after" in out
    assert "1 of 1 pods confirmed" in out


async def test_an_operator_that_comes_back_agrees(api, capsys):
    import asyncio

    await asyncio.to_thread(kill.run, KillOptions(engaged=True, json=True, timeout_seconds=0.3))
    before = dict(api.named("ConfigMap", "smollm-switches"))
    pusher, verifier = Pusher(api.runtime, lambda key: None), Verifier(api.runtime, lambda key: None)
    await Reconciler(api, pusher, verifier, SETTINGS).service(("default", "smollm"))
    assert api.named("ConfigMap", "smollm-switches") == before, "not even written"
    await pusher.aclose()
    await verifier.aclose()
