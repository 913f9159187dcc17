"""Who may reach which port of the pods."""

from __future__ import annotations

from firsttoken_api.resources import InferenceService
from firsttoken_operator.cluster import NETWORK_POLICY, Body
from firsttoken_operator.desired.names import manifest, selector
from firsttoken_operator.desired.pod import ADMIN_PORT, API_PORT


def network_policy(owner: InferenceService, operator_namespace: str | None) -> Body:
    """The API port is open to all, the admin port to the operator's namespace alone.

    operator_namespace: None when the operator runs outside the cluster; no pod may then reach the admin port.
    """
    ingress: list[Body] = [{"ports": [{"port": API_PORT, "protocol": "TCP"}]}]
    if operator_namespace:
        peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}}}
        ingress.append({"from": [peer], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]})
    return manifest(
        owner,
        NETWORK_POLICY,
        owner.metadata.name,
        {
            "spec": {
                "podSelector": {"matchLabels": selector(owner.metadata.name)},
                "policyTypes": ["Ingress"],
                "ingress": ingress,
            }
        },
    )
