"""InferenceService and KillSwitch as the operator reads and writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from firsttoken_api.resources import Condition, InferenceService, InferenceServiceStatus, KillSwitch
from firsttoken_api.resources.base import ConditionStatus
from firsttoken_api.resources.inference_service_status import (
    EffectiveState,
    FailureReason,
    FailureStatus,
    OptimizationStatus,
    SegmentStatus,
    TtftStatus,
)
from firsttoken_api.resources.kill_switch import KillSwitchSpec
from firsttoken_api.switches import State, resolve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def service(**spec: Any) -> InferenceService:
    return InferenceService.model_validate(
        {
            "apiVersion": "firsttoken.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "team-a", "generation": 4, "managedFields": []},
            "spec": {"model": {"uri": "file:///m.gguf"}, "accelerator": {"type": "cpu"}, **spec},
        }
    )


def test_a_minimal_service_has_the_defaults_of_the_schema() -> None:
    spec = service().spec
    assert spec.replicas == 1
    assert spec.accelerator.count == 1
    assert spec.rollout.to_json() == {
        "strategy": "RollingUpdate",
        "maxSurge": 0,
        "maxUnavailable": 1,
        "drainTimeoutSeconds": 60,
    }
    assert spec.written_optimizations() == {}
    assert spec.rollback == {}


def test_what_is_written_goes_to_the_switches_as_it_is_written() -> None:
    written = {"chunkedPrefill": {"enabled": True, "chunkSize": 256}, "prefixCache": {"maxMemory": "25%"}}
    spec = service(optimizations=written, rollback={"prefixCache": True}).spec
    assert spec.written_optimizations() == written
    resolved = resolve(spec.written_optimizations(), spec.rollback, frozenset())
    assert resolved["chunkedPrefill"].parameters["chunkSize"] == 256
    assert resolved["prefixCache"].enabled is False


def test_fields_of_a_newer_version_are_left_aside() -> None:
    assert service(somethingNew={"a": 1}).spec.replicas == 1


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": -1},
        {"kvCache": {"memory": "0"}},
        {"slo": {"ttft": {"p50": "fast"}}},
        {"optimizations": {"chunkedPrefill": {"chunkSize": 1}}},
        {"optimizations": {"prefixCache": {"maxMemory": "200%"}}},
        {"rollout": {"strategy": "BlueGreen"}},
    ],
)
def test_bounds_hold_in_python_as_well(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        service(**spec)


def test_status_goes_over_the_wire_in_camel_case_without_nulls() -> None:
    status = InferenceServiceStatus(
        observed_generation=4,
        conditions=[
            Condition(
                type="Ready",
                status=ConditionStatus.TRUE,
                reason="Serving",
                last_transition_time="2026-01-01T00:00:00Z",
                observed_generation=4,
            )
        ],
        ready_of_desired="1/1",
        optimizations=[
            OptimizationStatus(name="prefixCache", desired="off", effective="rolledBack", pods="1/1")
        ],
        ttft=TtftStatus(count=3, p99="812ms", segments=SegmentStatus(queue="1ms")),
        failure=FailureStatus(reason=FailureReason.PROBE_TIMEOUT, message="m"),
    )
    wire = status.to_json()
    assert wire["observedGeneration"] == 4
    assert wire["conditions"][0]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert wire["optimizations"][0] == {
        "name": "prefixCache",
        "desired": "off",
        "effective": "rolledBack",
        "pods": "1/1",
        "notConfirmed": [],
    }
    assert wire["ttft"] == {"count": 3, "p99": "812ms", "segments": {"queue": "1ms"}}
    assert wire["failure"]["reason"] == "ProbeTimeout"
    assert "url" not in wire
    assert InferenceServiceStatus.model_validate(wire) == status


def test_every_state_of_a_pod_is_a_state_of_a_service() -> None:
    assert {state.value for state in State} < {state.value for state in EffectiveState}


def test_every_failure_reason_has_a_meaning() -> None:
    for reason in FailureReason:
        assert reason.meaning.endswith(".")


@pytest.mark.parametrize(
    ("spec", "namespace", "labels", "concerned"),
    [
        ({}, "a", {}, True),
        ({"namespaces": ["a", "b"]}, "a", {}, True),
        ({"namespaces": ["b"]}, "a", {}, False),
        ({"selector": {}}, "a", {}, True),
        ({"selector": {"matchLabels": {"tier": "test"}}}, "a", {"tier": "test", "x": "y"}, True),
        ({"selector": {"matchLabels": {"tier": "test"}}}, "a", {}, False),
        ({"namespaces": ["b"], "selector": {"matchLabels": {"tier": "test"}}}, "a", {"tier": "test"}, False),
    ],
)
def test_whom_a_kill_switch_concerns(
    spec: dict[str, Any], namespace: str, labels: dict[str, str], concerned: bool
) -> None:
    switch = KillSwitch.model_validate({"metadata": {"name": "global"}, "spec": {"engaged": True, **spec}})
    assert switch.spec.concerns(namespace, labels) is concerned


@given(
    st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
    st.lists(st.sampled_from("xyz"), max_size=2),
    st.none() | st.sampled_from("xyz"),
)
def test_expressions_mean_what_kubernetes_means(operator: str, values: list[str], label: str | None) -> None:
    spec = KillSwitchSpec.model_validate(
        {
            "engaged": True,
            "selector": {"matchExpressions": [{"key": "k", "operator": operator, "values": values}]},
        }
    )
    expected = {
        "In": label is not None and label in values,
        "NotIn": label is None or label not in values,
        "Exists": label is not None,
        "DoesNotExist": label is None,
    }[operator]
    assert spec.concerns("n", {} if label is None else {"k": label}) is expected


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_read(path: Path) -> None:
    kinds = {"InferenceService": InferenceService, "KillSwitch": KillSwitch}
    read = [
        kinds[document["kind"]].model_validate(document)
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] in kinds
    ]
    assert read
