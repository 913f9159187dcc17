"""The API server as `KubeCluster` talks to it, against a small one in this process."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from kubernetes.aio import client as official

from firsttoken_operator.cluster import (
    DEPLOYMENT,
    INFERENCE_SERVICE,
    KILL_SWITCH,
    POD,
    ClusterError,
    ConflictError,
    ConnectError,
    KubeCluster,
)
from firsttoken_operator.main import NEEDED, build_registry, connection, kopf_settings, wait_for_crds


class ApiServer:
    """What was asked, and what is answered: by method and path, else 404 in the API server's form."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict, str | None, object]] = []
        self.answers: dict[tuple[str, str], list[tuple[int, object]]] = {}

    def answer(self, method: str, path: str, *bodies: object, status: int = 200) -> None:
        self.answers.setdefault((method, path), []).extend((status, body) for body in bodies)

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.asked.append(
            (
                request.method,
                request.path,
                dict(request.query),
                request.headers.get("Content-Type") if text else None,
                json.loads(text) if text else None,
            )
        )
        queue = self.answers.get((request.method, request.path))
        status, body = (
            (queue.pop(0) if len(queue) > 1 else queue[0]) if queue else (404, {"message": "not found"})
        )
        return web.json_response(body, status=status)


@pytest.fixture
async def api():
    found = ApiServer()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = official.Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    configuration.api_key["BearerToken"] = "Bearer sesame"
    found.cluster = KubeCluster(official.ApiClient(configuration))
    yield found
    await found.cluster.aclose()
    await runner.cleanup()


def test_paths_of_kinds():
    assert DEPLOYMENT.path("ns", "x") == "/apis/apps/v1/namespaces/ns/deployments/x"
    assert POD.path(None) == "/api/v1/pods"
    assert (
        KILL_SWITCH.path(None, "global", "status")
        == "/apis/firsttoken.dev/v1alpha1/killswitches/global/status"
    )
    assert POD.path("a/b", "../x") == "/api/v1/namespaces/a%2Fb/pods/..%2Fx"


async def test_what_is_not_there_is_none(api):
    assert await api.cluster.get(POD, "ns", "x") is None


async def test_a_list_is_read_page_by_page_and_selects_by_labels(api):
    path = "/apis/apps/v1/namespaces/ns/deployments"
    api.answer(
        "GET",
        path,
        {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]},
        {"metadata": {}, "items": [{"metadata": {"name": "b"}}]},
    )
    found = await api.cluster.list(DEPLOYMENT, "ns", {"b": "2", "a": "1"})
    assert [(item["kind"], item["metadata"]["name"]) for item in found] == [
        ("Deployment", "a"),
        ("Deployment", "b"),
    ]
    assert api.asked[0][2]["labelSelector"] == "a=1,b=2"
    assert api.asked[1][2]["continue"] == "more"


async def test_an_apply_is_server_side_with_our_field_manager(api):
    path = "/apis/apps/v1/namespaces/ns/deployments/x"
    manifest = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x", "namespace": "ns"}}
    api.answer("PATCH", path, manifest)
    assert await api.cluster.apply({**manifest, "spec": {"strategy": {"rollingUpdate": None}}}) == manifest
    ((_, _, query, content_type, body),) = api.asked
    assert query == {"fieldManager": "firsttoken", "force": "true"}
    assert content_type == "application/apply-patch+yaml"
    assert body["spec"] == {"strategy": {"rollingUpdate": None}}, "null is sent: it takes the default away"


async def test_a_status_is_replaced_whole_through_its_subresource(api):
    path = "/apis/firsttoken.dev/v1alpha1/namespaces/ns/inferenceservices/x/status"
    body = {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": "InferenceService",
        "metadata": {"name": "x", "namespace": "ns", "resourceVersion": "7"},
        "status": {"replicas": 1},
    }
    api.answer("PUT", path, {"message": "the object has been modified"}, status=409)
    with pytest.raises(ConflictError, match="has been modified"):
        await api.cluster.replace_status(body)
    assert api.asked[0][4] == body


async def test_a_patch_is_a_list_of_operations(api):
    path = "/apis/firsttoken.dev/v1alpha1/killswitches/global"
    api.answer("PATCH", path, {"kind": "KillSwitch"})
    operations = [{"op": "replace", "path": "/spec/engaged", "value": False}]
    await api.cluster.patch(KILL_SWITCH, None, "global", operations)
    assert api.asked[0][3:] == ("application/json-patch+json", operations)


async def test_a_delete_is_of_exactly_this_object_and_forgives_its_absence(api):
    await api.cluster.delete(POD, "ns", "x", "the-uid")
    assert api.asked[0][4] == {"preconditions": {"uid": "the-uid"}}


async def test_a_refusal_is_in_the_api_servers_words(api):
    api.answer("GET", "/api/v1/namespaces/ns/pods/x", {"message": "pods is forbidden"}, status=403)
    with pytest.raises(ClusterError, match="pods is forbidden") as caught:
        await api.cluster.get(POD, "ns", "x")
    assert caught.value.status == 403


async def test_no_api_server_is_an_error_with_status_zero():
    configuration = official.Configuration()
    configuration.host = "http://127.0.0.1:1"
    cluster = KubeCluster(official.ApiClient(configuration))
    with pytest.raises(ClusterError, match="not reachable") as caught:
        await cluster.get(POD, "ns", "x")
    assert caught.value.status == 0
    await cluster.aclose()


async def test_no_credentials_say_what_to_do(tmp_path):
    with pytest.raises(ConnectError, match="set KUBECONFIG"):
        await KubeCluster.connect(str(tmp_path / "nothing"))


async def test_the_start_waits_for_the_crds_and_says_for_which(api, monkeypatch, caplog):
    from firsttoken_operator.health import Freshness, Health

    monkeypatch.setattr("firsttoken_operator.main.CRD_WAIT_SECONDS", 0.0)
    path = "/apis/firsttoken.dev/v1alpha1"
    served = [{"name": name} for name in sorted(NEEDED)]
    api.answer("GET", path, {"resources": served[:1]}, {"resources": served})
    health = Health(Freshness(lambda: 0.0))
    await wait_for_crds(api.cluster, health, ())
    assert health.waiting_for == ""
    assert "waiting for CRDs killswitches.firsttoken.dev to be served" in caplog.text


async def test_kopf_uses_the_same_credentials(api):
    found = await connection(api.cluster)
    assert found.server == api.cluster.configuration.host
    assert found.as_http_headers() == {"Authorization": "Bearer sesame"}


def test_kopf_keeps_nothing_in_the_objects():
    """No handler that would add a finalizer or an annotation, no Events of kopf's own, no peering."""
    registry = build_registry(None, None)
    assert list(registry._changing.get_all_handlers()) == []
    assert list(registry._spawning.get_all_handlers()) == []
    assert len(list(registry._watching.get_all_handlers())) == 5
    settings = kopf_settings()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.scanning.disabled is True
