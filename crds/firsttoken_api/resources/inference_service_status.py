"""The status of an InferenceService: what the operator sees, and what the pods confirmed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from firsttoken_api.resources.base import ApiModel, Conditions

_DURATION = "such as 812ms"


class FailureReason(StrEnum):
    """Why a service does not run. A small fixed list, so that alerts can match on it."""

    MODEL_SOURCE_UNSUPPORTED = "ModelSourceUnsupported"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    ACCELERATOR_UNKNOWN = "AcceleratorUnknown"
    INSUFFICIENT_GPU = "InsufficientGPU"
    INSUFFICIENT_RESOURCES = "InsufficientResources"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    DRIVER_INSUFFICIENT = "DriverInsufficient"
    PROBE_TIMEOUT = "ProbeTimeout"
    RUNTIME_CRASHED = "RuntimeCrashed"
    POD_REFUSED = "PodRefused"

    @property
    def meaning(self) -> str:
        """What happened and what to do, for the reference and the runbook."""
        return _MEANINGS[self]


_MEANINGS: dict[FailureReason, str] = {
    FailureReason.MODEL_SOURCE_UNSUPPORTED: (
        "This build cannot fetch from that kind of uri; use file:// or pvc://."
    ),
    FailureReason.MODEL_LOAD_FAILED: (
        "The runtime could not load the model; the message is its own last line."
    ),
    FailureReason.OUT_OF_MEMORY: (
        "The container was killed for memory, or the device has too little: raise template.resources, or "
        "lower kvCache.memory or model.maxLength."
    ),
    FailureReason.ACCELERATOR_UNKNOWN: (
        "accelerator.type is not in the operator's catalogue; the message lists what is."
    ),
    FailureReason.INSUFFICIENT_GPU: "No node has enough free GPUs of that type.",
    FailureReason.INSUFFICIENT_RESOURCES: (
        "No node has enough free CPU or memory, or none matches the node selectors and tolerations."
    ),
    FailureReason.IMAGE_PULL_FAILED: (
        "The runtime image could not be pulled; check its name and the pull secret."
    ),
    FailureReason.DRIVER_INSUFFICIENT: "The node's GPU driver is too old for the runtime image.",
    FailureReason.PROBE_TIMEOUT: "The pod did not become ready within startupTimeoutSeconds.",
    FailureReason.RUNTIME_CRASHED: (
        "The runtime ended after it had been serving; the message is its last line."
    ),
    FailureReason.POD_REFUSED: (
        "The API server refused the pod (quota, policy, a field it does not accept); the message is its "
        "answer."
    ),
}


class EffectiveState(StrEnum):
    """What the pods of a service say of one switch, taken together.

    on, off, inactive, rolledBack, killed: every pod says so. mixed: they differ. unknown: none has answered.
    """

    ON = "on"
    OFF = "off"
    INACTIVE = "inactive"
    ROLLED_BACK = "rolledBack"
    KILLED = "killed"
    MIXED = "mixed"
    UNKNOWN = "unknown"


class OptimizationStatus(ApiModel):
    name: Annotated[str, Field(max_length=63)] = Field(description="Name of the optimization.")
    desired: Annotated[str, Field(max_length=16)] = Field(
        description="on or off, after the kill switch, roll-back, configuration and default."
    )
    effective: Annotated[str, Field(max_length=16)] = Field(
        description="What the pods say: on, off, inactive (asked for, not possible), rolledBack, killed; "
        "mixed while pods differ, unknown while none has answered."
    )
    reason: Annotated[str, Field(max_length=4096)] | None = Field(
        default=None, description="Why it is not on, or not everywhere."
    )
    pods: Annotated[str, Field(max_length=16)] = Field(
        description="Pods that confirmed the desired generation, of all pods, such as 2/3."
    )
    not_confirmed: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=100)] = Field(
        default_factory=list,
        description="Pods that have not confirmed it (the first 100).",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


class SegmentStatus(ApiModel):
    """Means over the same window; they add up to the mean TTFT."""

    queue: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"From arrival to the start of prefill, {_DURATION}."
    )
    prefill: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"Computing the prompt, {_DURATION}."
    )
    decode: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"Sampling and detokenising the first token, {_DURATION}."
    )
    transport: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"Handing the first token over to the caller, {_DURATION}."
    )


class TtftStatus(ApiModel):
    """Time to first token, from the server receiving the request to the caller receiving the first token."""

    count: int = Field(default=0, ge=0, description="Requests in the window.")
    window_seconds: int | None = Field(default=None, ge=0, description="Length of the window.")
    p50: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"Median, {_DURATION}."
    )
    p95: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"95th percentile, {_DURATION}."
    )
    p99: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description=f"99th percentile, {_DURATION}."
    )
    segments: SegmentStatus | None = Field(
        default=None, description="Where the time goes: means of the four segments."
    )


class FailureStatus(ApiModel):
    reason: Annotated[str, Field(max_length=63)] = Field(
        description="One of " + ", ".join(reason.value for reason in FailureReason) + "."
    )
    message: Annotated[str, Field(max_length=32_768)] = Field(
        default="", description="In words, and what to do about it."
    )
    pod: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="The pod it was seen in."
    )


class KillSwitchView(ApiModel):
    """The kill switch as it concerns this service."""

    engaged: bool = Field(description="Whether the kill switch takes anything back from this service.")
    optimizations: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=64)] = Field(
        default_factory=list,
        description="What it takes back here.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    reason: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="spec.reason of the KillSwitch."
    )


class InferenceServiceStatus(ApiModel):
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status answers."
    )
    conditions: Conditions = Field(
        default_factory=list,
        description="Ready: every updated pod is ready and has answered a real generation. Progressing: pods "
        "are being started or replaced. Degraded: something is wrong, whether it serves or not. ModelReady: "
        "every pod has the model loaded. SwitchesApplied: every pod confirmed the switches.",
    )
    replicas: int | None = Field(default=None, ge=0, description="Pods there are.")
    updated_replicas: int | None = Field(default=None, ge=0, description="Pods of the newest specification.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Pods that serve.")
    ready_of_desired: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="Pods that serve, of those wanted, such as 1/2."
    )
    selector: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Label selector of the pods, for autoscalers."
    )
    url: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Where clients inside the cluster reach the OpenAI-compatible API."
    )
    switch_generation: int | None = Field(
        default=None, ge=0, description="Generation of the switches that the pods are to confirm."
    )
    optimizations: Annotated[list[OptimizationStatus], Field(max_length=64)] = Field(
        default_factory=list,
        description="One line per optimization: asked for, effective, why not, confirmed by how many pods.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    ttft: TtftStatus | None = Field(default=None, description="Time to first token, measured by the pods.")
    failure: FailureStatus | None = Field(default=None, description="Why it does not run, while it does not.")
    kill_switch: KillSwitchView | None = Field(
        default=None, description="What the kill switch takes back here."
    )
