"""How clients reach the pods, who the pods are, and the token of their admin port."""

from __future__ import annotations

import base64

from firsttoken_api.resources import InferenceService
from firsttoken_operator.cluster import SECRET, SERVICE, SERVICE_ACCOUNT, Body
from firsttoken_operator.desired.names import admin_secret_name, manifest, selector
from firsttoken_operator.desired.pod import API_PORT_NAME

TOKEN_KEY = "token"  # noqa: S105 - the name of the key, not a token
CLIENT_PORT = 80


def service(owner: InferenceService) -> Body:
    """The Service that clients use; the admin port is deliberately not in it."""
    return manifest(
        owner,
        SERVICE,
        owner.metadata.name,
        {
            "spec": {
                "type": "ClusterIP",
                "selector": selector(owner.metadata.name),
                "ports": [
                    {"name": "http", "port": CLIENT_PORT, "targetPort": API_PORT_NAME, "protocol": "TCP"}
                ],
            }
        },
    )


def url(owner: InferenceService) -> str:
    """Where clients inside the cluster reach the OpenAI-compatible API."""
    return f"http://{owner.metadata.name}.{owner.metadata.namespace}.svc/v1"


def service_account(owner: InferenceService) -> Body:
    """An identity without any rights and without a mounted token."""
    return manifest(owner, SERVICE_ACCOUNT, owner.metadata.name, {"automountServiceAccountToken": False})


def admin_secret(owner: InferenceService, token: str) -> Body:
    """The admin token's Secret; created once, never applied again."""
    return manifest(
        owner,
        SECRET,
        admin_secret_name(owner.metadata.name),
        {"type": "Opaque", "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()}},
    )


def read_token(secret: Body) -> str | None:
    """The token in the Secret, or None when the key is missing or empty."""
    try:
        text = base64.b64decode((secret.get("data") or {})[TOKEN_KEY]).decode().strip()
    except (KeyError, ValueError):
        return None
    return text or None
