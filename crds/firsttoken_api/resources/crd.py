"""CRD manifests from the pydantic models: a structural OpenAPI v3 schema as the API server demands it."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel

from firsttoken_api.fields import INT_OR_STRING, Rule, rules
from firsttoken_api.resources.base import CATEGORY, GROUP, VERSION
from firsttoken_api.resources.inference_service import InferenceService
from firsttoken_api.resources.kill_switch import KillSwitch

Schema = dict[str, Any]
LONGEST_NAME = 50


class SchemaError(TypeError):
    """A model that has no structural schema; the text names the place."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's JSON schema in the API server's dialect.

    References are inlined, titles dropped, `null` alternatives dropped (a field that is left out is None),
    and `int | "auto"` becomes int-or-string with a rule in words. Raises SchemaError for what has no such
    form.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    definitions = schema.pop("$defs", {})
    return _convert(schema, definitions, model.__name__)


def _convert(schema: Schema, definitions: dict[str, Schema], where: str) -> Schema:
    found = _resolve_alternatives(_inline(schema, definitions), definitions, where)
    for dropped in ("title", "$defs"):
        found.pop(dropped, None)
    if found.get("default", ...) is None:
        del found["default"]
    if "const" in found:
        found["enum"] = [found.pop("const")]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in found:
            found[bound], found[exclusive] = found[exclusive], True
    if "properties" in found:
        found.pop("additionalProperties", None)
        found["properties"] = {
            name: _convert(child, definitions, f"{where}.{name}")
            for name, child in found["properties"].items()
        }
    elif isinstance(found.get("additionalProperties"), dict):
        found["additionalProperties"] = _convert(found["additionalProperties"], definitions, f"{where}.*")
    else:
        found.pop("additionalProperties", None)
    if "items" in found:
        found["items"] = _convert(found["items"], definitions, f"{where}[]")
    if "type" not in found and not found.get("x-kubernetes-int-or-string"):
        raise SchemaError(f"{where}: no type in {found}")
    return {key: found[key] for key in sorted(found, key=_reading_order)}


_FIRST = ("description", "type", "format", "enum", "default")


def _reading_order(key: str) -> tuple[int, str]:
    """Keys in the order a person reads a schema: what it is, then bounds, then rules, children last."""
    late = ("required", "properties", "items", "additionalProperties", "x-kubernetes-validations")
    return (_FIRST.index(key) if key in _FIRST else 90 + late.index(key) if key in late else 50, key)


def _inline(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    found = copy.deepcopy(schema)
    while "$ref" in found:
        target = definitions[found.pop("$ref").rsplit("/", 1)[-1]]
        found = {**copy.deepcopy(target), **found}
    return found


def _resolve_alternatives(schema: Schema, definitions: dict[str, Schema], where: str) -> Schema:
    alternatives = schema.get("anyOf")
    if alternatives is None or schema.get("x-kubernetes-int-or-string"):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    real = [_inline(item, definitions) for item in alternatives if item != {"type": "null"}]
    if len(real) == 1:
        return _resolve_alternatives({**real[0], **rest}, definitions, where)
    numbers = [item for item in real if item.get("type") == "integer"]
    words = [item["const"] for item in real if "const" in item]
    if len(numbers) == 1 and len(words) == 1 and len(real) == 2:
        return {**_integer_or_word(numbers[0], words[0]), **rest}
    raise SchemaError(f"{where}: no structural form for {alternatives}")


def _integer_or_word(number: Schema, word: str) -> Schema:
    low, high = number["minimum"], number["maximum"]
    rule = Rule(
        f"type(self) == int ? (self >= {low} && self <= {high}) : self == '{word}'",
        f"write a whole number from {low} to {high}, or {word}",
    )
    return {**INT_OR_STRING, "maxLength": 16, **rules(rule)}


def _column(name: str, path: str, kind: str = "string", priority: int = 0, description: str = "") -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    if description:
        column["description"] = description
    if priority:
        column["priority"] = priority
    return column


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


def _resource_schema(model: type[BaseModel]) -> Schema:
    """The whole object's schema.

    Metadata belongs to the API server, except that the name's length is bounded: names derived from it must
    stay below 63 characters, and the API server refuses a rule on a string of any length.
    """
    schema = structural_schema(model)
    properties = schema["properties"]
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    properties["metadata"] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": LONGEST_NAME}},
    }
    schema["required"] = ["spec"]
    return schema


def _crd(
    model: type[BaseModel],
    *,
    plural: str,
    scope: str,
    short_name: str,
    columns: list[Schema],
    subresources: Schema,
) -> Schema:
    kind = model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "labels": {"app.kubernetes.io/part-of": "firsttoken"},
        },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": [CATEGORY],
            },
            "scope": scope,
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": columns,
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": _resource_schema(model)},
                }
            ],
        },
    }


def inference_service_crd() -> Schema:
    return _crd(
        InferenceService,
        plural="inferenceservices",
        scope="Namespaced",
        short_name="ftis",
        columns=[
            _column("Model", ".spec.model.uri"),
            _column("Ready", _condition("Ready", "status")),
            _column("Reason", _condition("Ready", "reason")),
            _column("TTFT P99", ".status.ttft.p99", description="Time to first token, 99th percentile"),
            _column("Replicas", ".status.readyOfDesired", description="Ready pods of those wanted"),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("URL", ".status.url", priority=1),
            _column("Accelerator", ".spec.accelerator.type", priority=1),
            _column("Switches", _condition("SwitchesApplied", "status"), priority=1),
        ],
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    )


def kill_switch_crd() -> Schema:
    return _crd(
        KillSwitch,
        plural="killswitches",
        scope="Cluster",
        short_name="ftks",
        columns=[
            _column("Engaged", ".spec.engaged", "boolean"),
            _column("Effective", _condition("Effective", "status")),
            _column("Pods", ".status.podsConfirmed", description="Pods that confirmed, of all it concerns"),
            _column("Since", ".status.engagedAt", "date"),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("Why", ".spec.reason", priority=1),
        ],
        subresources={"status": {}},
    )


def all_crds() -> dict[str, Schema]:
    """Every CRD, by its plural name."""
    return {"inferenceservices": inference_service_crd(), "killswitches": kill_switch_crd()}
