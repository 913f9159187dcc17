"""The Kubernetes API as the operator and `firsttoken kill` use it: plain dicts in, plain dicts out.

`Cluster` is the seam: the reconciler, the tests' in-memory cluster and `KubeCluster` agree on it. Connection,
TLS, tokens and kubeconfig come from the official client's asyncio side; its generated models are not used,
because they cost memory and drop fields they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp

Body = dict[str, Any]

FIELD_MANAGER = "firsttoken"
GROUP = "firsttoken.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True)
class Kind:
    """A resource type: where it is served and what its manifests say."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)


INFERENCE_SERVICE = Kind(f"{GROUP}/{VERSION}", "InferenceService", "inferenceservices")
KILL_SWITCH = Kind(f"{GROUP}/{VERSION}", "KillSwitch", "killswitches", namespaced=False)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
POD = Kind("v1", "Pod", "pods")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
EVENT = Kind("v1", "Event", "events")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")

BY_KIND: Mapping[str, Kind] = {
    kind.kind: kind
    for kind in (
        INFERENCE_SERVICE, KILL_SWITCH, DEPLOYMENT, REPLICA_SET, POD, CONFIG_MAP, SECRET, SERVICE,
        SERVICE_ACCOUNT, EVENT, DISRUPTION_BUDGET, NETWORK_POLICY,
    )
}  # fmt: skip


class ClusterError(Exception):
    """The API server said no, or could not be asked. `status` is the HTTP status, 0 when there was none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ConflictError(ClusterError):
    """409: the object changed since it was read, or it exists already. Read again and try again."""


class ConnectError(ClusterError):
    """No usable credentials: neither a service account nor a kubeconfig."""


class Cluster(Protocol):
    """What the operator asks of the API server. Every method raises ClusterError when refused."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        """The object, or None when there is none."""

    async def list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> Sequence[Body]:
        """All objects with these labels; namespace None means all namespaces."""

    async def apply(self, manifest: Body) -> Body:
        """Server-side apply as field manager `firsttoken`, forcing ownership of the fields it names.

        With metadata.resourceVersion in the manifest it raises ConflictError unless that is the live one.
        """

    async def create(self, manifest: Body) -> Body:
        """Create; raises ConflictError when it exists."""

    async def replace_status(self, body: Body) -> Body:
        """Write `status` whole; raises ConflictError when body's resourceVersion is not the live one."""

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        """Delete exactly the object with this uid; nothing happens when it is gone."""


class KubeCluster:
    """`Cluster` over HTTP. Made by `connect`; close it with `aclose`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> KubeCluster:
        """Connect with the pod's service account, or else with kubectl's kubeconfig.

        A kubeconfig or context that is named goes first. Raises ConnectError with what to do.
        """
        return cls(await _api_client(kubeconfig, context))

    @property
    def configuration(self) -> Any:
        """The official client's Configuration, for kopf's own connection."""
        return self._client.configuration

    async def aclose(self) -> None:
        await self._client.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        try:
            return await self.request("GET", kind.path(namespace, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> Sequence[Body]:
        query = {"limit": "500"}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        items: list[Body] = []
        while True:
            page = await self.request("GET", kind.path(namespace), query=query)
            # List items carry neither apiVersion nor kind; put them back so that a body is a body.
            items += [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return items
            query["continue"] = token

    async def apply(self, manifest: Body) -> Body:
        kind, metadata = BY_KIND[manifest["kind"]], manifest["metadata"]
        return await self.request(
            "PATCH",
            kind.path(metadata.get("namespace"), metadata["name"]),
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=manifest,
            content_type="application/apply-patch+yaml",
        )

    async def create(self, manifest: Body) -> Body:
        kind, metadata = BY_KIND[manifest["kind"]], manifest["metadata"]
        return await self.request(
            "POST", kind.path(metadata.get("namespace")), query={"fieldManager": FIELD_MANAGER}, body=manifest
        )

    async def replace_status(self, body: Body) -> Body:
        kind, metadata = BY_KIND[body["kind"]], body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], "status")
        return await self.request("PUT", path, query={"fieldManager": FIELD_MANAGER}, body=body)

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        try:
            await self.request("DELETE", kind.path(namespace, name), body={"preconditions": {"uid": uid}})
        except ClusterError as error:
            if error.status not in (404, 409):
                raise

    async def served_plurals(self, group: str, version: str) -> frozenset[str]:
        """Plural names that the API server serves under group/version; empty when it serves none."""
        try:
            found = await self.request("GET", f"/apis/{group}/{version}")
        except ClusterError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(item["name"] for item in found["resources"])

    async def patch(self, kind: Kind, namespace: str | None, name: str, operations: Sequence[Body]) -> Body:
        """A JSON patch (RFC 6902); raises ClusterError (404) when there is no such object."""
        return await self.request(
            "PATCH",
            kind.path(namespace, name),
            query={"fieldManager": FIELD_MANAGER},
            body=list(operations),
            content_type="application/json-patch+json",
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Body:
        """One request; returns the JSON answer. Raises ClusterError with the server's own words."""
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {} if body is None else {"Content-Type": content_type}
        return _answer(*await self.exchange(method, target, body=body, headers=headers))

    async def exchange(
        self,
        method: str,
        target: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
    ) -> tuple[int, str]:
        """One request as it is; returns HTTP status and text. Raises ClusterError only without an answer."""
        sent = {"Accept": "application/json", **(headers or {})}
        try:
            args = await self._client.param_serialize(
                method, target, header_params=sent, body=body, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(*args, _request_timeout=timeout_seconds)
            return response.status, (await response.read()).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            words = str(error) or type(error).__name__
            raise ClusterError(0, f"API server not reachable: {words}") from error


def _answer(status: int, text: str) -> Body:
    try:
        body = json.loads(text) if text else {}
    except ValueError:
        body = {"message": text.strip()[:500]}
    if not isinstance(body, dict):
        body = {"value": body}
    if status < 400:
        return body
    message = str(body.get("message") or body.get("error") or f"HTTP {status}")
    raise (ConflictError if status == 409 else ClusterError)(status, message)


async def _api_client(kubeconfig: str | None, context: str | None) -> Any:
    from kubernetes.aio import client, config

    configuration = client.Configuration()
    # The operator serves one API server; a kill switch must not wait for a free connection.
    configuration.connection_pool_maxsize = 64
    try:
        if kubeconfig is not None or context is not None:
            raise config.ConfigException("asked for by name")
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
        except (config.ConfigException, OSError, KeyError, TypeError, ValueError) as error:
            raise ConnectError(
                0, f"no cluster to talk to: {error}; set KUBECONFIG, or run in a pod with a service account"
            ) from error
    return client.ApiClient(configuration)
