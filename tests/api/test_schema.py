"""The generated CRDs: structural, described, bounded, from the catalogue, and as they lie in the repo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, Field

from firsttoken_api import generate
from firsttoken_api.optimizations import CATALOGUE, NAMES
from firsttoken_api.resources.crd import SchemaError, all_crds, structural_schema
from firsttoken_api.resources.inference_service_status import FailureReason

CRDS = all_crds()
Schema = dict[str, Any]


def schema_of(plural: str) -> Schema:
    found: Schema = CRDS[plural]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], f"{path}{mark}")


EVERYTHING = [(f"{plural}{path}", schema) for plural in CRDS for path, schema in walk(schema_of(plural))]


def test_what_lies_in_the_repository_is_what_the_models_give() -> None:
    assert generate.drift() == [], "run `make generate`"


def test_drift_is_seen_and_written_away(tmp_path: Path) -> None:
    everything = sorted(generate.generated_files())
    assert sorted(generate.drift(tmp_path)) == everything
    assert sorted(generate.write(tmp_path)) == everything
    assert generate.drift(tmp_path) == []
    (tmp_path / "crds/killswitches.yaml").write_text("edited by hand")
    assert generate.drift(tmp_path) == ["crds/killswitches.yaml"]


def test_the_yaml_is_the_crd() -> None:
    for plural, crd in CRDS.items():
        assert yaml.safe_load(generate.generated_files()[f"crds/{plural}.yaml"]) == crd


def test_the_crds_are_small_enough_for_client_side_apply() -> None:
    for path, text in generate.generated_files().items():
        if path.startswith("crds/"):
            assert len(text) < 100_000, path


@pytest.mark.parametrize(("path", "schema"), EVERYTHING, ids=[path for path, _ in EVERYTHING])
def test_the_schema_is_structural(path: str, schema: Schema) -> None:
    assert not {"$ref", "$defs", "title", "const", "allOf", "oneOf", "not"} & set(schema)
    if schema.get("x-kubernetes-int-or-string"):
        assert schema["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        assert "type" not in schema
        assert "maxLength" in schema
    else:
        assert "anyOf" not in schema
        assert schema["type"] in {"object", "array", "string", "integer", "number", "boolean"}
    assert not ("properties" in schema and "additionalProperties" in schema)
    assert schema.get("default", "") is not None
    assert isinstance(schema.get("exclusiveMinimum", True), bool)


@pytest.mark.parametrize(("path", "schema"), EVERYTHING, ids=[path for path, _ in EVERYTHING])
def test_everything_is_bounded(path: str, schema: Schema) -> None:
    """Bounds keep objects small and rules within the API server's cost limit."""
    if schema.get("type") == "array":
        assert "maxItems" in schema
        assert schema["x-kubernetes-list-type"] in {"atomic", "set", "map"}
    if schema.get("type") == "object" and "additionalProperties" in schema:
        assert "maxProperties" in schema
    if schema.get("type") == "integer":
        assert "minimum" in schema
    if schema.get("type") == "string" and not path.endswith((".apiVersion", ".kind")):
        assert "maxLength" in schema or "enum" in schema or schema.get("format") == "date-time"


def test_every_field_is_described() -> None:
    undescribed = [
        path
        for path, schema in EVERYTHING
        if "description" not in schema
        and not path.endswith(("[]", "{}", ".apiVersion", ".kind"))
        and ".metadata" not in path
    ]
    assert undescribed == []


def test_only_pass_through_fields_of_the_pod_keep_unknown_fields() -> None:
    kept = {path for path, schema in EVERYTHING if schema.get("x-kubernetes-preserve-unknown-fields")}
    assert kept == {
        "inferenceservices.spec.template.affinity",
        "inferenceservices.spec.template.env[].valueFrom",
    }


def test_every_optimization_has_its_field_and_every_parameter_its_default_in_words() -> None:
    fields = schema_of("inferenceservices")["properties"]["spec"]["properties"]["optimizations"]["properties"]
    assert list(fields) == list(NAMES)
    for entry in CATALOGUE:
        assert set(fields[entry.name]["properties"]) == {"enabled", *entry.defaults}
        assert entry.summary in fields[entry.name]["description"]
        for parameter, value in {"enabled": entry.default, **entry.defaults}.items():
            words = str(value).lower() if isinstance(value, bool) else str(value)
            described = fields[entry.name]["properties"][parameter]["description"]
            assert value == [] or f"Default: {words}." in described


def test_the_catalogues_defaults_fit_the_schema() -> None:
    fields = schema_of("inferenceservices")["properties"]["spec"]["properties"]["optimizations"]["properties"]
    for entry in CATALOGUE:
        # JSON Schema of today writes exclusiveMinimum as a number; nothing here needs it.
        schema = _without(fields[entry.name], "exclusiveMinimum")
        jsonschema.validate({"enabled": entry.default, **entry.defaults}, schema)
        entry.settings.model_validate({"enabled": entry.default, **entry.defaults})


def _without(schema: Any, key: str) -> Any:
    if isinstance(schema, dict):
        return {name: _without(value, key) for name, value in schema.items() if name != key}
    return schema


def test_rules_have_a_message_that_is_more_than_the_rule() -> None:
    for path, schema in EVERYTHING:
        for rule in schema.get("x-kubernetes-validations", []):
            assert len(rule["message"]) > 15, path
            assert rule["message"] != rule["rule"]
            field = rule.get("fieldPath", "").removeprefix(".")
            assert not field or field in schema["properties"], path


def test_kinds_names_columns_and_subresources() -> None:
    service, switch = CRDS["inferenceservices"]["spec"], CRDS["killswitches"]["spec"]
    assert service["scope"] == "Namespaced"
    assert service["names"]["shortNames"] == ["ftis"]
    assert service["names"]["categories"] == ["firsttoken"]
    columns = [column["name"] for column in service["versions"][0]["additionalPrinterColumns"]]
    assert columns[:6] == ["Model", "Ready", "Reason", "TTFT P99", "Replicas", "Age"]
    scale = service["versions"][0]["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.replicas"
    assert scale["labelSelectorPath"] == ".status.selector"
    assert switch["scope"] == "Cluster"
    assert switch["versions"][0]["subresources"] == {"status": {}}


def test_printer_columns_point_at_fields_that_exist() -> None:
    for plural, crd in CRDS.items():
        for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]:
            if column["jsonPath"].startswith((".metadata", ".status.conditions")):
                continue
            schema = schema_of(plural)
            for part in column["jsonPath"].strip(".").split("."):
                schema = schema["properties"][part]


def test_integer_or_word_gets_a_rule_in_words() -> None:
    class Thing(BaseModel):
        size: Annotated[int, Field(ge=2, le=9)] | Literal["auto"] | None = Field(None, description="Size.")

    size = structural_schema(Thing)["properties"]["size"]
    assert size["x-kubernetes-int-or-string"] is True
    assert size["x-kubernetes-validations"][0]["message"] == "write a whole number from 2 to 9, or auto"


def test_what_has_no_structural_form_is_an_error_that_names_the_place() -> None:
    class Thing(BaseModel):
        either: list[int] | bool

    with pytest.raises(SchemaError, match=r"Thing\.either"):
        structural_schema(Thing)


def test_the_reference_describes_every_field_and_every_failure() -> None:
    pages = {path: text for path, text in generate.generated_files().items() if path.startswith("docs/")}
    for name in NAMES:
        assert f"`{name}`" in pages["docs/reference/optimizations.md"]
        assert f"`optimizations.{name}.enabled`" in pages["docs/reference/inferenceservice.md"]
    for reason in FailureReason:
        assert f"`{reason.value}`" in pages["docs/reference/inferenceservice.md"]
    assert "`engaged` (required)" in pages["docs/reference/killswitch.md"]
