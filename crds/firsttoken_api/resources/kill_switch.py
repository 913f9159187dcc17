"""KillSwitch: takes optimizations back everywhere in one action. There is one, named `global`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from firsttoken_api.fields import Rule, rules
from firsttoken_api.optimizations import CATALOGUE, NAMES
from firsttoken_api.resources.base import ApiModel, Conditions, LabelValue, Metadata, ObjectName

KILL_SWITCH_NAME = "global"

_ESSENTIAL = ", ".join(entry.name for entry in CATALOGUE if entry.essential)


class SelectorExpression(ApiModel):
    key: Annotated[str, Field(min_length=1, max_length=316)] = Field(description="Label key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How values are compared.")
    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(
        default_factory=list,
        description="Values, for In and NotIn.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        present = self.key in labels
        match self.operator:
            case "In":
                return present and labels[self.key] in self.values
            case "NotIn":
                return not present or labels[self.key] not in self.values
            case "Exists":
                return present
            case "DoesNotExist":
                return not present


class LabelSelector(ApiModel):
    match_labels: dict[str, LabelValue] = Field(
        default_factory=dict,
        description="Labels the InferenceService must have.",
        json_schema_extra={"maxProperties": 32},
    )
    match_expressions: Annotated[list[SelectorExpression], Field(max_length=32)] = Field(
        default_factory=list,
        description="Expressions that must all hold for the labels of the InferenceService.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            expression.matches(labels) for expression in self.match_expressions
        )


class KillSwitchSpec(ApiModel):
    engaged: bool = Field(
        description="true takes the optimizations back, live, in every service it concerns; false gives them "
        "back."
    )
    optimizations: Annotated[list[str], Field(max_length=len(NAMES))] = Field(
        default_factory=list,
        description=f"What to take back. Empty: every optimization except the essential ones ({_ESSENTIAL}).",
        json_schema_extra={
            "x-kubernetes-list-type": "set",
            "items": {"type": "string", "enum": list(NAMES)},
        },
    )
    namespaces: Annotated[list[Annotated[str, Field(min_length=1, max_length=63)]], Field(max_length=256)] = (
        Field(
            default_factory=list,
            description="Only services in these namespaces. Empty: all namespaces.",
            json_schema_extra={"x-kubernetes-list-type": "set"},
        )
    )
    selector: LabelSelector | None = Field(
        default=None, description="Only services whose labels match. Left out: all services."
    )
    reason: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Why, for whoever looks next; shown in every service's status."
    )

    def concerns(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether a service in `namespace` with `labels` falls under this switch (engaged or not)."""
        return (not self.namespaces or namespace in self.namespaces) and (
            self.selector is None or self.selector.matches(labels)
        )


class Confirmation(ApiModel):
    """How many have confirmed, of how many."""

    confirmed: int = Field(default=0, ge=0, description="How many confirmed.")
    total: int = Field(default=0, ge=0, description="Of how many.")


class NotConfirmed(ApiModel):
    namespace: ObjectName = Field(description="Namespace of the pod.")
    pod: ObjectName = Field(description="Name of the pod.")
    service: ObjectName | None = Field(default=None, description="Its InferenceService.")
    why: Annotated[str, Field(max_length=4096)] = Field(description="Why it has not confirmed, in words.")


class KillSwitchStatus(ApiModel):
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status answers."
    )
    conditions: Conditions = Field(
        default_factory=list, description="Effective: every pod it concerns confirmed what spec asks for."
    )
    services: Confirmation | None = Field(default=None, description="Services whose pods have all confirmed.")
    pods: Confirmation | None = Field(default=None, description="Pods that have confirmed.")
    pods_confirmed: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="Pods that have confirmed, of all it concerns, such as 3/3."
    )
    not_confirmed: Annotated[list[NotConfirmed], Field(max_length=100)] = Field(
        default_factory=list,
        description="Pods that have not confirmed, and why (the first 100).",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    engaged_at: str | None = Field(
        default=None,
        description="When the operator or the command line saw it engaged.",
        json_schema_extra={"format": "date-time"},
    )
    effective_at: str | None = Field(
        default=None, description="When the last pod confirmed.", json_schema_extra={"format": "date-time"}
    )


class KillSwitch(ApiModel):
    """Takes optimizations back in all services, live, in one action. There is one, named global."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                f"self.metadata.name == '{KILL_SWITCH_NAME}'",
                f"there is one kill switch and its name is {KILL_SWITCH_NAME}: set metadata.name: "
                f"{KILL_SWITCH_NAME}",
            )
        )
    )

    api_version: str = "firsttoken.dev/v1alpha1"
    kind: str = "KillSwitch"
    metadata: Metadata
    spec: KillSwitchSpec = Field(description="What is taken back, and where.")
    status: KillSwitchStatus = Field(
        default_factory=KillSwitchStatus, description="Who has confirmed. Written by the operator."
    )
