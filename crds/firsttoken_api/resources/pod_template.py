"""Pod overrides: the small part of a pod that an InferenceService may set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from firsttoken_api.fields import Bytes, ResourceQuantity, Rule, rules
from firsttoken_api.resources.base import ApiModel, LabelValue, ObjectName

# Objects of the Kubernetes API that are passed on as they are, and checked when the pod is made.
_PASSED_ON: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


class Resources(ApiModel):
    requests: dict[str, ResourceQuantity] = Field(
        default_factory=dict,
        description="What the pod is guaranteed, such as cpu: 2, memory: 4Gi.",
        json_schema_extra={"maxProperties": 16},
    )
    limits: dict[str, ResourceQuantity] = Field(
        default_factory=dict,
        description="What the pod may use at most. GPUs are set from spec.accelerator, not here.",
        json_schema_extra={"maxProperties": 16},
    )


class EnvVar(ApiModel):
    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the variable.")
    value: Annotated[str, Field(max_length=32_768)] | None = Field(default=None, description="Its value.")
    value_from: dict[str, Any] | None = Field(
        default=None,
        description="Source of the value, as in a pod (secretKeyRef, ...).",
        json_schema_extra=_PASSED_ON,
    )


class Toleration(ApiModel):
    key: Annotated[str, Field(max_length=316)] | None = Field(default=None, description="Key of the taint.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="Exists or Equal. Default: Equal."
    )
    value: LabelValue | None = Field(default=None, description="Value of the taint, with Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Default: all of them."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, description="With NoExecute: how long to stay."
    )


class LocalReference(ApiModel):
    name: ObjectName = Field(description="Name of the Secret, in the namespace of the InferenceService.")


class PodTemplate(ApiModel):
    """Only what is here can be set; the rest of the pod is the operator's."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.labels) || self.labels.all(key, !key.startsWith('firsttoken.dev/') && "
                "!key.startsWith('app.kubernetes.io/'))",
                "labels under firsttoken.dev/ and app.kubernetes.io/ are set by the operator; use another "
                "prefix",
                field=".labels",
            )
        )
    )

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Runtime image. Default: the one the operator was installed with."
    )
    labels: dict[str, LabelValue] = Field(
        default_factory=dict,
        description="More labels for the pods.",
        json_schema_extra={"maxProperties": 32},
    )
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict,
        description="More annotations for the pods.",
        json_schema_extra={"maxProperties": 32},
    )
    resources: Resources | None = Field(
        default=None, description="CPU and memory of the container. Default: by the accelerator."
    )
    shared_memory: Bytes | None = Field(
        default=None, description="Size of /dev/shm, which counts as memory of the pod. Default: 1Gi."
    )
    env: Annotated[list[EnvVar], Field(max_length=64)] = Field(
        default_factory=list,
        description="More environment variables.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        description="Labels a node must have, besides those of the accelerator.",
        json_schema_extra={"maxProperties": 32},
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(
        default_factory=list,
        description="Taints to tolerate, besides those of the accelerator.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    affinity: dict[str, Any] | None = Field(
        default=None, description="Affinity, as in a pod.", json_schema_extra=_PASSED_ON
    )
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass of the pods.")
    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the pods. Default: one made for this service, without any rights.",
    )
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = Field(
        default_factory=list,
        description="Secrets for pulling the image.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
