"""What every custom resource shares: naming, metadata, conditions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "firsttoken.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "firsttoken"

# The name of a namespaced object, and the value of a label.
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
LabelValue = Annotated[str, Field(max_length=63)]


class ApiModel(BaseModel):
    """camelCase outside, snake_case inside; frozen; fields this version does not know are left aside."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=to_camel,
        populate_by_name=True,
        protected_namespaces=(),
    )

    def to_json(self) -> dict[str, Any]:
        """As it goes over the wire: camelCase, without what is not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Metadata(ApiModel):
    """The part of object metadata that is read here."""

    name: str
    namespace: str | None = None
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One condition, as every Kubernetes object has them."""

    type: str = Field(min_length=1, max_length=316, description="What the condition is about, such as Ready.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: str = Field(min_length=1, max_length=1024, description="Why, as one CamelCase word.")
    message: str = Field(default="", max_length=32768, description="Why, in words, and what to do about it.")
    last_transition_time: str = Field(
        description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation this condition was computed from."
    )


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]
