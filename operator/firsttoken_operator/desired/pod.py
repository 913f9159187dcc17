"""The pod of a service: arguments, probes, volumes, security. Nothing here reads a live field.

Live fields (`spec.optimizations`, `spec.rollback`) reach the pod through the switches ConfigMap only, so that
no switch can ever change the pod template and restart a pod. `TemplateInputs` is all that this module sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken_api.resources.inference_service import InferenceServiceSpec
from firsttoken_api.resources.pod_template import PodTemplate
from firsttoken_operator.accelerators import CPU, Accelerator
from firsttoken_operator.cluster import Body
from firsttoken_operator.desired.names import admin_secret_name, labels, switches_name
from firsttoken_operator.model_source import ModelSource

API_PORT, ADMIN_PORT = 8000, 8001
API_PORT_NAME, ADMIN_PORT_NAME = "http", "admin"
CONTAINER = "runtime"

SWITCHES_DIRECTORY = "/etc/firsttoken/switches"
ADMIN_DIRECTORY = "/etc/firsttoken/admin"
TEMPLATE_DIRECTORY = "/etc/firsttoken/chat-template"

# Between "no longer an endpoint" and SIGTERM, so that no new request meets a closed door.
PRE_STOP_SECONDS = 5
# What a drained runtime may take to end after its last answer.
SHUTDOWN_MARGIN_SECONDS = 15
PROBE_SECONDS = 2


@dataclass(frozen=True)
class TemplateInputs:
    """Everything that the pod template is made from.

    service: name of the InferenceService. image: the runtime image that the service is pinned to.
    """

    service: str
    served_name: str
    source: ModelSource
    accelerator_type: str
    accelerator_count: int
    accelerator: Accelerator
    max_length: int | None
    kv_memory: str | None
    chat_template: tuple[str, str] | None
    drain_timeout_seconds: int
    startup_timeout_seconds: int
    image: str
    template: PodTemplate

    @property
    def uses_gpu(self) -> bool:
        return self.accelerator.resource is not None


def template_inputs(
    service: str, spec: InferenceServiceSpec, source: ModelSource, accelerator: Accelerator, image: str
) -> TemplateInputs:
    reference = spec.model.chat_template_ref
    memory = spec.kv_cache.memory if spec.kv_cache else None
    return TemplateInputs(
        service=service,
        served_name=spec.model.served_name or source.default_name,
        source=source,
        accelerator_type=spec.accelerator.type,
        accelerator_count=spec.accelerator.count,
        accelerator=accelerator,
        max_length=spec.model.max_length,
        kv_memory=None if memory is None else str(memory),
        chat_template=(reference.name, reference.key) if reference else None,
        drain_timeout_seconds=spec.rollout.drain_timeout_seconds,
        startup_timeout_seconds=spec.startup_timeout_seconds,
        image=image,
        template=spec.template or PodTemplate.model_validate({}),
    )


def pod_template(inputs: TemplateInputs, pull_policy: str) -> Body:
    """The pod template of the Deployment."""
    template = inputs.template
    metadata: Body = {"labels": {**template.labels, **labels(inputs.service)}}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    spec: Body = {
        "serviceAccountName": template.service_account_name or inputs.service,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS
        + inputs.drain_timeout_seconds
        + SHUTDOWN_MARGIN_SECONDS,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(inputs, pull_policy)],
        "volumes": _volumes(inputs),
        # Replicas on one node fall together; ScheduleAnyway, so that it never keeps a pod from starting.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": inputs.service}},
            }
        ],
        **_placement(inputs),
    }
    return {"metadata": metadata, "spec": spec}


def arguments(inputs: TemplateInputs) -> list[str]:
    """Command line of the runtime."""
    found = [
        "serve",
        "--model", inputs.source.path,
        "--served-name", inputs.served_name,
        "--host", "0.0.0.0",  # the pod's own network namespace
        "--port", str(API_PORT),
        "--admin-port", str(ADMIN_PORT),
        "--admin-token-file", f"{ADMIN_DIRECTORY}/token",
        "--switches", f"{SWITCHES_DIRECTORY}/switches.json",
        "--device", "cuda" if inputs.uses_gpu else CPU,
        "--drain-timeout", str(inputs.drain_timeout_seconds),
    ]  # fmt: skip
    if inputs.max_length is not None:
        found += ["--max-model-len", str(inputs.max_length)]
    if inputs.kv_memory is not None:
        found += ["--kv-memory", inputs.kv_memory]
    if inputs.chat_template is not None:
        found += ["--chat-template", f"{TEMPLATE_DIRECTORY}/{inputs.chat_template[1]}"]
    return found


def _container(inputs: TemplateInputs, pull_policy: str) -> Body:
    container: Body = {
        "name": CONTAINER,
        "image": inputs.template.image or inputs.image,
        "imagePullPolicy": pull_policy,
        "args": arguments(inputs),
        "ports": [
            {"name": API_PORT_NAME, "containerPort": API_PORT, "protocol": "TCP"},
            {"name": ADMIN_PORT_NAME, "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "env": _environment(inputs),
        "resources": _resources(inputs),
        "startupProbe": _probe(
            "/ready", PROBE_SECONDS, math.ceil(inputs.startup_timeout_seconds / PROBE_SECONDS)
        ),
        "readinessProbe": _probe("/ready", PROBE_SECONDS, 2),
        # Slow to give up: a runtime under load must not be killed for answering late.
        "livenessProbe": _probe("/health", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        # The last log lines of a container that failed become its message, and so the service's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(inputs),
    }
    return container


def _probe(path: str, period_seconds: int, failures: int) -> Body:
    return {
        "httpGet": {"path": path, "port": API_PORT_NAME, "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def _environment(inputs: TemplateInputs) -> list[Body]:
    # Libraries write caches under HOME; the root file system is read-only and /tmp is the pod's own.
    found: list[Body] = [{"name": "HOME", "value": "/tmp"}]  # noqa: S108
    given = [variable.to_json() for variable in inputs.template.env]
    names = {variable["name"] for variable in given}
    return [variable for variable in found if variable["name"] not in names] + given


def _resources(inputs: TemplateInputs) -> Body:
    written = inputs.template.resources
    requests = {key: str(value) for key, value in (written.requests if written else {}).items()}
    limits = {key: str(value) for key, value in (written.limits if written else {}).items()}
    defaults = {
        key: value
        for key, value in inputs.accelerator.requests.items()
        # A request above the written limit would be refused by the API server.
        if key not in limits
    }
    requests = {**defaults, **requests}
    if inputs.accelerator.resource is not None:
        count = str(inputs.accelerator_count)
        requests[inputs.accelerator.resource] = count
        limits[inputs.accelerator.resource] = count
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _volumes(inputs: TemplateInputs) -> list[Body]:
    found: list[Body] = [
        {"name": "switches", "configMap": {"name": switches_name(inputs.service)}},
        {"name": "admin", "secret": {"secretName": admin_secret_name(inputs.service)}},
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": str(inputs.template.shared_memory or "1Gi")},
        },
    ]
    if inputs.source.claim is not None:
        claim = {"claimName": inputs.source.claim, "readOnly": True}
        found.append({"name": "model", "persistentVolumeClaim": claim})
    if inputs.chat_template is not None:
        found.append({"name": "chat-template", "configMap": {"name": inputs.chat_template[0]}})
    return found


def _mounts(inputs: TemplateInputs) -> list[Body]:
    # Whole directories and no subPath: only those follow a changed ConfigMap.
    found: list[Body] = [
        {"name": "switches", "mountPath": SWITCHES_DIRECTORY, "readOnly": True},
        {"name": "admin", "mountPath": ADMIN_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    if inputs.source.claim is not None:
        found.append({"name": "model", "mountPath": inputs.source.mount, "readOnly": True})
    if inputs.chat_template is not None:
        found.append({"name": "chat-template", "mountPath": TEMPLATE_DIRECTORY, "readOnly": True})
    return found


def _placement(inputs: TemplateInputs) -> Body:
    template, accelerator = inputs.template, inputs.accelerator
    node_selector: Mapping[str, str] = {**template.node_selector, **accelerator.node_labels}
    tolerations: list[Any] = [
        *accelerator.tolerations,
        *(toleration.to_json() for toleration in template.tolerations),
    ]
    found: Body = {
        "nodeSelector": dict(node_selector),
        "tolerations": tolerations,
        "affinity": template.affinity,
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "imagePullSecrets": [secret.to_json() for secret in template.image_pull_secrets],
    }
    return {key: value for key, value in found.items() if value}
