"""What the chart promises: rights without a wildcard, a locked-down pod, one operator, CRDs that stay."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from firsttoken_api.resources.crd import all_crds
from firsttoken_operator.accelerators import BUILT_IN, parse_accelerators
from firsttoken_operator.desired.names import labels
from firsttoken_operator.desired.pod import API_PORT_NAME
from firsttoken_operator.settings import read_settings

CHART = Path(__file__).resolve().parents[2] / "helm" / "firsttoken"
Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]
Helm = Callable[..., subprocess.CompletedProcess[str]]
DEPLOYMENT = ("Deployment", "firsttoken-system/firsttoken")


def container(manifests: Manifests, key: tuple[str, str] = DEPLOYMENT) -> dict[str, Any]:
    (only,) = manifests[key]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def environment(manifests: Manifests) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(manifests)["env"]}


def rules(manifests: Manifests, kind: str, name: str) -> dict[str, set[str]]:
    """Verbs by group/resource."""
    found: dict[str, set[str]] = {}
    for rule in manifests[kind, name]["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return found


def test_lint_is_clean(helm: Helm) -> None:
    answer = helm("lint", "--strict", str(CHART))
    assert answer.returncode == 0, answer.stdout


def test_the_crds_are_the_generated_ones_and_are_kept(render: Render) -> None:
    manifests = render(crds=True)
    for plural, crd in all_crds().items():
        installed = manifests["CustomResourceDefinition", f"{plural}.firsttoken.dev"]
        assert installed["spec"] == crd["spec"]
        assert installed["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_crds_can_be_left_out(render: Render) -> None:
    assert not [
        kind for kind, _ in render({"crds": {"enabled": False}}, crds=True) if kind.startswith("Custom")
    ]


def test_the_pod_is_locked_down(render: Render) -> None:
    pod = render()[DEPLOYMENT]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (operator,) = pod["containers"]
    assert operator["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert operator["resources"]["limits"]["memory"] == "256Mi"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_there_is_never_more_than_one_operator(render: Render, helm: Helm) -> None:
    spec = render()[DEPLOYMENT]["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}
    assert render({"replicaCount": 0})[DEPLOYMENT]["spec"]["replicas"] == 0
    assert "maximum" in helm("template", str(CHART), values={"replicaCount": 2}).stderr


def test_no_right_has_a_wildcard(render: Render) -> None:
    for values in ({}, {"watchNamespaces": ["a", "b"]}):
        for (kind, name), manifest in render(values).items():
            if kind in ("Role", "ClusterRole"):
                assert "*" not in json.dumps(manifest["rules"]), name


def test_the_operator_has_the_rights_it_needs_and_no_others(render: Render) -> None:
    assert rules(render(), "ClusterRole", "firsttoken") == {
        "firsttoken.dev/inferenceservices": {"get", "list", "watch"},
        "firsttoken.dev/inferenceservices/status": {"update"},
        "firsttoken.dev/killswitches": {"get", "list", "watch"},
        "firsttoken.dev/killswitches/status": {"update"},
        "apps/deployments": {"get", "list", "watch", "create", "patch"},
        "apps/replicasets": {"list"},
        "/pods": {"list", "watch"},
        "/configmaps": {"get", "list", "watch", "create", "patch"},
        "/services": {"get", "create", "patch"},
        "/serviceaccounts": {"get", "create", "patch"},
        "/secrets": {"get", "create", "patch"},
        "/events": {"create"},
        "networking.k8s.io/networkpolicies": {"get", "create", "patch"},
        "policy/poddisruptionbudgets": {"get", "create", "patch", "delete"},
    }


def test_with_namespaces_the_rights_end_there(render: Render) -> None:
    everywhere = rules(render(), "ClusterRole", "firsttoken")
    manifests = render({"watchNamespaces": ["team-a", "team-b"]})
    cluster_wide = rules(manifests, "ClusterRole", "firsttoken")
    assert set(cluster_wide) == {"firsttoken.dev/killswitches", "firsttoken.dev/killswitches/status"}
    for namespace in ("team-a", "team-b"):
        inside = rules(manifests, "Role", f"{namespace}/firsttoken")
        assert cluster_wide | inside == everywhere
        binding = manifests["RoleBinding", f"{namespace}/firsttoken"]
        assert binding["roleRef"]["name"] == "firsttoken"
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "firsttoken", "namespace": "firsttoken-system"}
        ]
    assert rules(manifests, "Role", "default/firsttoken-events") == {"/events": {"create"}}
    assert environment(manifests)["FIRSTTOKEN_WATCH_NAMESPACES"] == "team-a,team-b"


def test_only_people_and_the_kill_command_reach_through_to_pods(render: Render) -> None:
    manifests = render()
    assert rules(manifests, "ClusterRole", "firsttoken-kill") == {
        "firsttoken.dev/killswitches": {"get", "create", "patch"},
        "firsttoken.dev/killswitches/status": {"update"},
        "firsttoken.dev/inferenceservices": {"list"},
        "/configmaps": {"get", "create", "patch"},
        "/secrets": {"get"},
        "/pods": {"list"},
        "/pods/proxy": {"get", "update"},
    }
    bound = {
        manifest["roleRef"]["name"]
        for (kind, _), manifest in manifests.items()
        if kind.endswith("RoleBinding")
    }
    assert bound == {"firsttoken"}, "nobody is given the kill role by the chart"
    labels = manifests["ClusterRole", "firsttoken-edit"]["metadata"]["labels"]
    assert labels["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert "firsttoken.dev/killswitches" not in rules(manifests, "ClusterRole", "firsttoken-edit")


def test_roles_can_be_left_to_others(render: Render) -> None:
    manifests = render({"rbac": {"create": False, "aggregate": False, "killRole": False}})
    assert not [key for key in manifests if "Role" in key[0]]


def test_the_operator_is_told_its_configuration(render: Render) -> None:
    manifests = render(
        {
            "runtime": {"image": "images.test/runtime:7", "pullPolicy": "Always"},
            "watchNamespaces": ["team-b", "team-a"],
            "logLevel": "DEBUG",
        }
    )
    told = environment(manifests)
    assert environment(render())["FIRSTTOKEN_WATCH_NAMESPACES"] == ""
    by_name = {entry["name"]: entry for entry in container(manifests)["env"]}
    assert by_name["POD_NAMESPACE"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    settings = read_settings({**told, "FIRSTTOKEN_ACCELERATORS": ""})
    assert (settings.runtime_image, settings.pull_policy) == ("images.test/runtime:7", "Always")
    assert settings.namespaces == ("team-a", "team-b")
    assert settings.log_level == "DEBUG"
    folder, _, file = told["FIRSTTOKEN_ACCELERATORS"].rpartition("/")
    assert folder in [mount["mountPath"] for mount in container(manifests)["volumeMounts"]]
    assert file in manifests["ConfigMap", "firsttoken-system/firsttoken"]["data"]


def test_accelerators_reach_the_operator_as_it_reads_them(render: Render) -> None:
    card = {
        "resource": "example.com/gpu",
        "nodeLabels": {"example.com/product": "card"},
        "tolerations": [{"key": "example.com/gpu", "operator": "Exists"}],
        "requests": {"cpu": "4", "memory": "16Gi"},
        "memoryBytes": 48_000_000_000,
        "teraFlops": 300.5,
        "bandwidthBytesPerSecond": 1_000_000_000_000,
    }
    plain, with_card = render(), render({"accelerators": {"example-card": card}})
    text = with_card["ConfigMap", "firsttoken-system/firsttoken"]["data"]["accelerators.yaml"]
    assert yaml.safe_load(text) == {"example-card": card}
    found = parse_accelerators(text, "accelerators.yaml")
    assert found["example-card"].memory_bytes == 48_000_000_000
    assert set(found) == {*BUILT_IN, "example-card"}
    checksums = [
        manifests[DEPLOYMENT]["spec"]["template"]["metadata"]["annotations"]["checksum/accelerators"]
        for manifests in (plain, with_card)
    ]
    assert checksums[0] != checksums[1], "a changed catalogue restarts the operator"


def test_image_by_tag_by_digest_and_by_default(render: Render) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(render())["image"] == f"firsttoken-operator:{version}"
    assert environment(render())["FIRSTTOKEN_RUNTIME_IMAGE"] == f"firsttoken-runtime:{version}"
    tagged = {"image": {"repository": "localhost/op", "tag": "abc"}}
    assert container(render(tagged))["image"] == "localhost/op:abc"
    digest = "sha256:" + "0" * 64
    assert (
        container(render({"image": {**tagged["image"], "digest": digest}}))["image"]
        == f"localhost/op@{digest}"
    )


def test_probes_and_ports(render: Render) -> None:
    operator = container(render())
    ports = {port["name"]: port["containerPort"] for port in operator["ports"]}
    assert ports == {"metrics": 8080, "health": 8081}
    assert operator["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert operator["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    service = render()["Service", "firsttoken-system/firsttoken-metrics"]
    pod_labels = render()[DEPLOYMENT]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pod_labels.items()


def test_selectors_stay_the_same_over_versions(render: Render) -> None:
    selector = render()[DEPLOYMENT]["spec"]["selector"]["matchLabels"]
    assert selector == {
        "app.kubernetes.io/name": "firsttoken-operator",
        "app.kubernetes.io/instance": "firsttoken",
    }


def test_names_follow_the_release(render: Render) -> None:
    assert ("Deployment", "firsttoken-system/eu-firsttoken") in render(release="eu")
    assert ("Deployment", "firsttoken-system/other") in render({"fullnameOverride": "other"})


def test_monitors_and_network_policy_are_there_when_asked_for(render: Render, helm: Helm) -> None:
    asked = {
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True},
        },
        "networkPolicy": {"enabled": True},
    }
    kinds = {kind for kind, _ in render()}
    manifests = render(asked)
    assert {kind for kind, _ in manifests} - kinds == {"ServiceMonitor", "PodMonitor", "NetworkPolicy"}
    monitor = manifests["ServiceMonitor", "firsttoken-system/firsttoken"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = manifests["Service", "firsttoken-system/firsttoken-metrics"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    pods = manifests["PodMonitor", "firsttoken-system/firsttoken-runtime"]["spec"]
    assert pods["selector"]["matchLabels"].items() <= labels("any").items(), "it must find the model pods"
    assert pods["podMetricsEndpoints"][0]["port"] == API_PORT_NAME
    wrong = {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}}
    assert "needs metrics.service.enabled=true" in helm("template", str(CHART), values=wrong).stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"watchNamespace": "a"}, "additional properties 'watchNamespace' not allowed"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"digest": "sha256:short"}}, "digest"),
        ({"accelerators": {"x": {"memoryBytes": -1}}}, "memoryBytes"),
        ({"accelerators": {"x": {"memory": "80Gi"}}}, "additional properties 'memory' not allowed"),
        ({"accelerators": {"x": {"requests": {"memory": "-1Gi"}}}}, "memory"),
        ({"serviceAccount": {"create": False}}, "name the ServiceAccount to use"),
        ({"serviceAccount": {"name": "The_Account"}}, "serviceAccount"),
        ({"image": {"repository": "registry.test/operator:1"}}, "repository"),
        ({"image": {"tag": "a tag"}}, "tag"),
        ({"runtime": {"image": "registry.test/runtime:1 "}}, "runtime"),
        ({"resources": {"request": {"cpu": "1"}}}, "additional properties 'request' not allowed"),
        ({"resources": {"limits": {"memory": "much"}}}, "memory"),
        ({"podLabels": {"app.kubernetes.io/name": "other"}}, "podLabels"),
        ({"priorityClassName": "Very High"}, "priorityClassName"),
    ],
)
def test_wrong_values_are_refused(helm: Helm, values: dict[str, Any], words: str) -> None:
    answer = helm("template", str(CHART), values=values)
    assert answer.returncode != 0
    assert words in answer.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"repository": "registry.test:5000/team/operator", "tag": "1.0_rc.1"}},
        {"runtime": {"image": "registry.test:5000/runtime:1"}},
        {"runtime": {"image": "team/runtime@sha256:" + "0" * 64}},
        {"resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": 0.5}}},
        {"podLabels": {"team": "chat"}, "priorityClassName": "system-cluster-critical"},
    ],
)
def test_right_values_are_taken(render: Render, values: dict[str, Any]) -> None:
    assert DEPLOYMENT in render(values)


def test_every_value_is_described_in_the_readme_and_has_a_schema() -> None:
    readme = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    for name in values:
        assert re.search(rf"`{name}[`.]", readme), f"{name} is not in the chart's README"

    def bounded(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        for name, value in values.items():
            known = schema.get("properties", {})
            assert name in known, f"{where}{name} has no schema"
            if value and isinstance(value, dict) and "properties" in known[name]:
                assert known[name]["additionalProperties"] is False, f"{where}{name} takes anything"
                bounded(value, known[name], f"{where}{name}.")

    bounded(values, schema, "")


def test_the_notes_say_what_to_do_next(helm: Helm) -> None:
    def notes(**values: Any) -> str:
        answer = helm(
            "install", "firsttoken", str(CHART), "--dry-run=client", "--namespace", "firsttoken-system",
            values={"crds": {"enabled": True}, **values},
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.partition("NOTES:")[2]

    said = notes(watchNamespaces=["team-a"], runtime={"image": "images.test/runtime:7"})
    assert "watches the namespaces team-a" in said
    assert "kubectl apply --namespace team-a -f examples/smollm2.yaml" in said
    assert "images.test/runtime:7" in said
    assert "firsttoken-kill" in said
    for example in re.findall(r"examples/\S+", said):
        assert example == "examples/" or (CHART.parents[1] / example).is_file()
    assert "rbac.create" not in said
    plain = notes(rbac={"create": False, "killRole": False})
    assert "watches all namespaces" in plain
    assert "rbac.create is false" in plain
    assert "firsttoken-kill" not in plain
