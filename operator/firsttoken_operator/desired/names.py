"""Names, labels and ownership of everything that belongs to one InferenceService."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from firsttoken_api.resources import InferenceService
from firsttoken_operator.cluster import INFERENCE_SERVICE, Body, Kind

SERVICE_LABEL = "firsttoken.dev/service"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "firsttoken-operator"

# sha256 of the manifest as it was last applied: tells "nothing to do" from "apply" without a write.
APPLIED_ANNOTATION = "firsttoken.dev/applied"


def switches_name(service: str) -> str:
    return f"{service}-switches"


def admin_secret_name(service: str) -> str:
    return f"{service}-admin"


def selector(service: str) -> dict[str, str]:
    """Labels that find the pods; immutable, so only what never changes."""
    return {"app.kubernetes.io/name": "firsttoken-runtime", "app.kubernetes.io/instance": service}


def labels(service: str) -> dict[str, str]:
    return {
        **selector(service),
        "app.kubernetes.io/component": "server",
        "app.kubernetes.io/part-of": "firsttoken",
        MANAGED_BY_LABEL: MANAGED_BY,
        SERVICE_LABEL: service,
    }


def selector_text(service: str) -> str:
    """The selector as `kubectl -l` and /scale take it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector(service).items()))


def owner_reference(service: InferenceService) -> dict[str, Any]:
    """Owner reference without blockOwnerDeletion: deleting the service never waits for the operator."""
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.kind,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
    }


def manifest(
    service: InferenceService,
    kind: Kind,
    name: str,
    content: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
) -> Body:
    """A manifest owned by the service. `content` is everything beside apiVersion, kind and metadata."""
    metadata: Body = {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": labels(service.metadata.name),
        "ownerReferences": [owner_reference(service)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **content}


def digest(value: Any) -> str:
    """Short stable hash of JSON data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
