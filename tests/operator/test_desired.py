"""Manifests: what is in them, and what may never change them."""

from __future__ import annotations

import json

import pytest
from tests.operator.fakes import service_body

from firsttoken_api.optimizations import CATALOGUE, NAMES
from firsttoken_api.resources import InferenceService
from firsttoken_api.switches import resolve
from firsttoken_operator.accelerators import BUILT_IN, AcceleratorError, parse_accelerators
from firsttoken_operator.desired import access, disruption, network, switches, workload
from firsttoken_operator.desired.pod import template_inputs
from firsttoken_operator.model_source import ModelSourceError, model_source
from firsttoken_operator.switches import SwitchMessage


def service(**spec) -> InferenceService:
    return InferenceService.model_validate(service_body(**spec))


def deployment(owner, live=None, image="runtime:1"):
    accelerator = BUILT_IN[owner.spec.accelerator.type]
    source = model_source(owner.spec.model.uri)
    pinned = workload.pinned_image(live, image)
    inputs = template_inputs(owner.metadata.name, owner.spec, source, accelerator, pinned)
    return workload.deployment(owner, inputs, "IfNotPresent", live)


def pod(owner, **more):
    return deployment(owner, **more)["spec"]["template"]["spec"]


SAMPLE_PARAMETERS = {
    "continuousBatching": {"maxSequences": 7, "maxBatchTokens": 999},
    "prefixCache": {"maxMemory": "10%"},
    "fusedKernels": {"required": True},
    "kvQuantization": {"precision": "int4", "layers": [{"layer": 0, "precision": "model"}]},
    "chunkedPrefill": {"chunkSize": 64},
    "priorityScheduling": {"ageingTokensPerSecond": 1.0, "maxWaitSeconds": 1.0},
    "slidingWindow": {"window": 64, "sinkTokens": 2},
    "speculativeDecoding": {"method": "draft", "tokens": 2},
    "weightQuantization": {"precision": "fp8"},
    "tensorParallel": {"degree": 1},
}
LIVE_CHANGES = [
    *({"optimizations": {entry.name: {"enabled": not entry.default}}} for entry in CATALOGUE),
    *({"optimizations": {name: {"enabled": True, **given}}} for name, given in SAMPLE_PARAMETERS.items()),
    *({"rollback": {name: True}} for name in ("all", *NAMES)),
    {"slo": {"ttft": {"p50": "100ms"}}},
    {"replicas": 3},
    {"replicas": 0},
    {"rollout": {"strategy": "Recreate"}},
    {"rollout": {"maxSurge": 1, "maxUnavailable": 0}},
]


@pytest.mark.parametrize("change", LIVE_CHANGES, ids=lambda change: json.dumps(change)[:60])
def test_no_live_field_ever_changes_the_pod_template(change):
    before, after = deployment(service()), deployment(service(**change))
    assert after["spec"]["template"] == before["spec"]["template"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "file:///models/other.gguf"}},
        {"model": {"uri": "file:///models/smollm2.gguf", "maxLength": 512}},
        {"kvCache": {"memory": "1Gi"}},
        {"startupTimeoutSeconds": 60},
        {"rollout": {"drainTimeoutSeconds": 5}},
        {"template": {"resources": {"requests": {"cpu": "2"}}}},
        {"accelerator": {"type": "nvidia-l4", "count": 1}},
    ],
)
def test_a_field_that_needs_new_pods_changes_the_template(change):
    assert deployment(service(**change))["spec"]["template"] != deployment(service())["spec"]["template"]


def test_a_newer_operator_keeps_the_template_of_what_runs(monkeypatch):
    owner = service()
    live = deployment(owner)
    monkeypatch.setattr("firsttoken_operator.desired.pod.PRE_STOP_SECONDS", 30)
    assert deployment(owner)["spec"]["template"] != live["spec"]["template"]
    kept = deployment(owner, live=live)
    assert kept["spec"]["template"] == live["spec"]["template"]
    assert kept["metadata"]["annotations"] == live["metadata"]["annotations"]
    changed = deployment(service(startupTimeoutSeconds=77), live=live)
    assert (
        changed["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 30
    )


def test_a_newer_runtime_image_waits_until_the_pin_is_removed():
    owner = service()
    live = deployment(owner, image="runtime:1")
    assert deployment(owner, live=live, image="runtime:2") == live
    del live["metadata"]["annotations"][workload.IMAGE_ANNOTATION]
    upgraded = deployment(owner, live=live, image="runtime:2")
    assert upgraded["spec"]["template"]["spec"]["containers"][0]["image"] == "runtime:2"


def test_an_image_in_the_template_goes_before_the_pin_and_does_not_move_it():
    found = deployment(service(template={"image": "mine:7"}))
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:7"
    assert found["metadata"]["annotations"][workload.IMAGE_ANNOTATION] == "runtime:1"


def test_a_pod_has_no_privilege():
    found = pod(service())
    container = found["containers"][0]
    assert found["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found["automountServiceAccountToken"] is False


def test_shared_memory_is_in_memory_and_sized():
    volumes = {volume["name"]: volume for volume in pod(service(template={"sharedMemory": "3Gi"}))["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert volumes["tmp"] == {"name": "tmp", "emptyDir": {}}


def test_the_start_up_probe_lasts_as_long_as_the_user_said():
    container = pod(service(startupTimeoutSeconds=901))["containers"][0]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 901
    assert probe["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


def test_a_stopping_pod_may_finish_its_answers():
    found = pod(service(rollout={"drainTimeoutSeconds": 120}))
    arguments = found["containers"][0]["args"]
    assert arguments[arguments.index("--drain-timeout") + 1] == "120"
    sleep = found["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert found["terminationGracePeriodSeconds"] > 120 + sleep


def test_the_last_words_of_a_container_reach_its_status():
    assert pod(service())["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_arguments_follow_the_seam():
    arguments = pod(service(kvCache={"memory": "512Mi"}))["containers"][0]["args"]
    assert arguments == [
        "serve", "--model", "/models/smollm2.gguf", "--served-name", "smollm2", "--host", "0.0.0.0",
        "--port", "8000", "--admin-port", "8001", "--admin-token-file", "/etc/firsttoken/admin/token",
        "--switches", "/etc/firsttoken/switches/switches.json", "--device", "cpu", "--drain-timeout", "60",
        "--kv-memory", "512Mi",
    ]  # fmt: skip


def test_a_gpu_type_asks_for_its_resource_on_its_nodes():
    found = pod(service(accelerator={"type": "nvidia-h100-80gb", "count": 2}))
    resources = found["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"
    assert found["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert "cuda" in found["containers"][0]["args"]


def test_a_written_limit_is_never_below_a_default_request():
    resources = pod(service(template={"resources": {"limits": {"memory": "1Gi"}}}))["containers"][0][
        "resources"
    ]
    assert resources == {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}


def test_a_claim_is_mounted_read_only():
    found = pod(service(model={"uri": "pvc://weights/llama/8b"}))
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in found[
        "volumes"
    ]
    mount = next(item for item in found["containers"][0]["volumeMounts"] if item["name"] == "model")
    assert mount == {"name": "model", "mountPath": "/models/weights", "readOnly": True}
    assert "/models/weights/llama/8b" in found["containers"][0]["args"]


def test_switches_and_token_are_mounted_as_directories_so_that_they_stay_live():
    for mount in pod(service())["containers"][0]["volumeMounts"]:
        assert "subPath" not in mount


def test_a_chat_template_comes_from_its_config_map():
    owner = service(
        model={"uri": "file:///m.gguf", "chatTemplateRef": {"name": "templates", "key": "chat.jinja"}}
    )
    arguments = pod(owner)["containers"][0]["args"]
    assert arguments[-2:] == ["--chat-template", "/etc/firsttoken/chat-template/chat.jinja"]


def test_no_gpu_is_needed_twice_for_a_roll_out_unless_asked_for():
    strategy = deployment(service())["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    recreate = deployment(service(rollout={"strategy": "Recreate"}))["spec"]["strategy"]
    assert recreate == {"type": "Recreate", "rollingUpdate": None}


def test_every_child_is_owned_without_blocking_deletion():
    owner = service(replicas=2)
    children = [
        deployment(owner),
        access.service(owner),
        access.service_account(owner),
        access.admin_secret(owner, "t"),
        network.network_policy(owner, "firsttoken"),
        disruption.disruption_budget(owner),
        switches.switches_config_map(owner, SwitchMessage(1, resolve({}, {}, frozenset()))),
    ]
    for child in children:
        (reference,) = child["metadata"]["ownerReferences"]
        assert reference["uid"] == owner.metadata.uid
        assert reference["controller"] is True
        assert "blockOwnerDeletion" not in reference
        assert "finalizers" not in child["metadata"]
        assert child["metadata"]["labels"]["firsttoken.dev/service"] == "smollm"


def test_a_budget_only_where_there_is_more_than_one_pod():
    assert disruption.disruption_budget(service()) is None
    assert disruption.disruption_budget(service(replicas=2))["spec"]["maxUnavailable"] == 1


def test_the_admin_port_is_open_to_the_operators_namespace_alone():
    rules = network.network_policy(service(), "operators")["spec"]["ingress"]
    by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in rules}
    assert by_port[8000] is None
    assert by_port[8001] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "operators"}}}
    ]
    outside = network.network_policy(service(), None)["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in outside] == [8000]


def test_the_service_does_not_publish_the_admin_port():
    ports = access.service(service())["spec"]["ports"]
    assert ports == [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]


def test_a_switch_message_survives_its_config_map():
    owner = service()
    message = SwitchMessage(
        7, resolve({"chunkedPrefill": {"chunkSize": 64}}, {"prefixCache": True}, frozenset())
    )
    config_map = switches.switches_config_map(owner, message)
    assert switches.read_switches(config_map) == message
    assert switches.written_generation(config_map) == 7


@pytest.mark.parametrize("text", ["", "{", "[]", '{"generation": "x"}', '{"generation": 9, "switches": 3}'])
def test_an_unreadable_config_map_is_none_and_its_generation_is_kept_where_it_can_be(text):
    config_map = {"data": {"switches.json": text}}
    assert switches.read_switches(config_map) is None
    assert switches.written_generation(config_map) == (9 if "9" in text else 0)


@pytest.mark.parametrize(
    ("uri", "path", "name"),
    [
        ("file:///models/a.gguf", "/models/a.gguf", "a"),
        ("file:///models/Qwen3-8B", "/models/Qwen3-8B", "Qwen3-8B"),
        ("pvc://claim", "/models/claim", "claim"),
        ("pvc://claim/x/y.gguf", "/models/claim/x/y.gguf", "y"),
    ],
)
def test_model_sources(uri, path, name):
    assert model_source(uri).path == path
    assert model_source(uri).default_name == name


@pytest.mark.parametrize(
    "uri", ["hf://org/name", "oci://x/y", "s3://a", "file://relative", "pvc:///x", "nonsense"]
)
def test_a_source_that_cannot_be_used_says_what_can(uri):
    with pytest.raises(ModelSourceError, match=r"file:///.*pvc://"):
        model_source(uri)


def test_a_path_cannot_leave_its_claim():
    with pytest.raises(ModelSourceError):
        model_source("pvc://claim/../../etc")


def test_the_catalogue_is_extended_and_overridden_by_a_file():
    found = parse_accelerators("my-gpu: {resource: example.com/gpu, nodeLabels: {a: b}}\ncpu: {}\n", "f")
    assert found["my-gpu"].resource == "example.com/gpu"
    assert found["cpu"].requests == {}
    assert found["nvidia-l4"] == BUILT_IN["nvidia-l4"]


@pytest.mark.parametrize(
    "text", ["[1]", "a: {resorce: x}", "a: {memoryBytes: -1}", "a: {memoryBytes: 1", "a: 3"]
)
def test_a_broken_catalogue_says_where(text):
    with pytest.raises(AcceleratorError, match="file"):
        parse_accelerators(text, "file")
