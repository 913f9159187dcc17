"""What the API server itself says to a bad InferenceService or KillSwitch: at apply and at patch, in words.

No webhook takes part, and nothing here starts a model: the service is kept at 0 replicas.
"""

from __future__ import annotations

import copy
import json
import subprocess

import pytest

from e2e.kube import Cluster
from e2e.manifests import VALID, Spec, inference_service, kill_switch
from firsttoken_api.optimizations import NAMES

# What is wrong: the change to VALID, and what the answer must say: where, and what to write instead.
REFUSED: dict[str, tuple[Spec, tuple[str, ...]]] = {
    "negative chunk size": (
        {"optimizations": {"chunkedPrefill": {"chunkSize": -1}}},
        ("spec.optimizations.chunkedPrefill.chunkSize", "greater than or equal to 16"),
    ),
    "zero chunk size": (
        {"optimizations": {"chunkedPrefill": {"chunkSize": 0}}},
        ("spec.optimizations.chunkedPrefill.chunkSize", "greater than or equal to 16"),
    ),
    "chunk size as a word": (
        {"optimizations": {"chunkedPrefill": {"chunkSize": "large"}}},
        ("spec.optimizations.chunkedPrefill.chunkSize", "must be of type integer"),
    ),
    "negative prefix-cache cap": (
        {"optimizations": {"prefixCache": {"maxMemory": "-1Gi"}}},
        (
            "spec.optimizations.prefixCache.maxMemory",
            "write a size above zero such as 256Mi",
            "enabled: false",
        ),
    ),
    "zero prefix-cache cap": (
        {"optimizations": {"prefixCache": {"maxMemory": 0}}},
        ("spec.optimizations.prefixCache.maxMemory", "write a size above zero such as 256Mi"),
    ),
    "prefix-cache cap of no per cent": (
        {"optimizations": {"prefixCache": {"maxMemory": "0%"}}},
        ("spec.optimizations.prefixCache.maxMemory", "from 1% to 100%"),
    ),
    "prefix-cache cap above the pool": (
        {"optimizations": {"prefixCache": {"maxMemory": "101%"}}},
        ("spec.optimizations.prefixCache.maxMemory", "from 1% to 100%"),
    ),
    "prefix-cache cap in words": (
        {"optimizations": {"prefixCache": {"maxMemory": "half"}}},
        ("spec.optimizations.prefixCache.maxMemory", "write a size above zero such as 256Mi"),
    ),
    "unknown KV precision": (
        {"optimizations": {"kvQuantization": {"precision": "int2"}}},
        ("spec.optimizations.kvQuantization.precision", '"fp8", "int8", "int4"'),
    ),
    "unknown weight precision": (
        {"optimizations": {"weightQuantization": {"precision": "int4"}}},
        ("spec.optimizations.weightQuantization.precision", '"int8", "fp8"'),
    ),
    "one layer twice": (
        {
            "optimizations": {
                "kvQuantization": {
                    "layers": [{"layer": 3, "precision": "int8"}, {"layer": 3, "precision": "model"}]
                }
            }
        },
        ("spec.optimizations.kvQuantization.layers", "Duplicate value"),
    ),
    "no sequences": (
        {"optimizations": {"continuousBatching": {"maxSequences": 0}}},
        (
            "spec.optimizations.continuousBatching.maxSequences",
            "write a whole number from 1 to 1024, or auto",
        ),
    ),
    "sequences in words": (
        {"optimizations": {"continuousBatching": {"maxSequences": "many"}}},
        (
            "spec.optimizations.continuousBatching.maxSequences",
            "write a whole number from 1 to 1024, or auto",
        ),
    ),
    "no waiting time": (
        {"optimizations": {"priorityScheduling": {"maxWaitSeconds": 0}}},
        ("spec.optimizations.priorityScheduling.maxWaitSeconds", "greater than 0"),
    ),
    "a quoted boolean": (
        {"optimizations": {"prefixCache": {"enabled": "false"}}},
        ("spec.optimizations.prefixCache.enabled", "must be of type boolean"),
    ),
    "chunking without continuous batching": (
        {"optimizations": {"continuousBatching": {"enabled": False}, "chunkedPrefill": {"enabled": True}}},
        (
            "spec.optimizations.chunkedPrefill",
            "set continuousBatching.enabled: true, or chunkedPrefill.enabled: false",
        ),
    ),
    "priority without continuous batching": (
        {
            "optimizations": {
                "continuousBatching": {"enabled": False},
                "priorityScheduling": {"enabled": True},
            }
        },
        ("spec.optimizations.priorityScheduling", "or priorityScheduling.enabled: false"),
    ),
    "a chunk larger than a step": (
        {
            "optimizations": {
                "continuousBatching": {"maxBatchTokens": 256},
                "chunkedPrefill": {"chunkSize": 512},
            }
        },
        ("spec.optimizations.chunkedPrefill", "lower chunkSize or raise maxBatchTokens"),
    ),
    "sinks larger than the window": (
        {"optimizations": {"slidingWindow": {"window": 64, "sinkTokens": 64}}},
        ("spec.optimizations.slidingWindow", "sinkTokens must be smaller than slidingWindow.window"),
    ),
    "a fused path that is required and off": (
        {"optimizations": {"fusedKernels": {"enabled": False, "required": True}}},
        ("spec.optimizations.fusedKernels", "set enabled: true, or required: false"),
    ),
    "tensor parallelism on a CPU": (
        {"optimizations": {"tensorParallel": {"enabled": True, "degree": 2}}},
        ("spec.optimizations", "set accelerator.type to a GPU type"),
    ),
    "tensor parallelism over more GPUs than there are": (
        {
            "accelerator": {"type": "nvidia-h100-80gb", "count": 2},
            "optimizations": {"tensorParallel": {"enabled": True, "degree": 4}},
        },
        ("spec.optimizations", "raise accelerator.count or lower the degree"),
    ),
    "several CPUs as accelerators": (
        {"accelerator": {"type": "cpu", "count": 2}},
        ("spec.accelerator.count", "leave count out with type cpu"),
    ),
    "no accelerator at all": ({"accelerator": None}, ("spec.accelerator", "Required value")),
    "an accelerator in capitals": (
        {"accelerator": {"type": "H100 80GB"}},
        ("spec.accelerator.type", "write a type from the operator's catalogue"),
    ),
    "no model": ({"model": None}, ("spec.model", "Required value")),
    "a model uri without a scheme": (
        {"model": {"uri": "/models/some.gguf"}},
        ("spec.model.uri", "file:///path/in/image, pvc://claim/path, hf://org/name or oci://registry/image"),
    ),
    "an unknown scheme": ({"model": {"uri": "s3://bucket/model"}}, ("spec.model.uri", "pvc://claim/path")),
    "a file uri with two slashes": (
        {"model": {"uri": "file://models/some.gguf"}},
        ("spec.model.uri", "with three slashes: file:///models/name"),
    ),
    "a way out of the volume": (
        {"model": {"uri": "pvc://claim/../secrets"}},
        ("spec.model.uri", "write the path without '..'"),
    ),
    "no claim": ({"model": {"uri": "pvc:///path"}}, ("spec.model.uri", "write pvc://CLAIM/path")),
    "a model name without its organisation": (
        {"model": {"uri": "hf://SmolLM2"}},
        ("spec.model.uri", "write hf://ORG/NAME"),
    ),
    "a revision of a file": (
        {"model": {"revision": "main"}},
        ("spec.model.revision", "revision goes with hf:// and oci://"),
    ),
    "a token for a file": (
        {"model": {"tokenSecretRef": {"name": "token"}}},
        ("spec.model.tokenSecretRef", "file:// and pvc:// need no token"),
    ),
    "a negative model length": (
        {"model": {"maxLength": -5}},
        ("spec.model.maxLength", "greater than or equal to 16"),
    ),
    "a negative number of replicas": ({"replicas": -1}, ("spec.replicas", "greater than or equal to 0")),
    "replicas and autoscaling": (
        {"replicas": 3, "autoscaling": {"minReplicas": 1, "maxReplicas": 4}},
        ("spec.replicas", "remove spec.replicas, or remove spec.autoscaling"),
    ),
    "fewest replicas above most": (
        {"replicas": 1, "autoscaling": {"minReplicas": 5, "maxReplicas": 2}},
        ("spec.autoscaling.minReplicas", "lower the one or raise the other"),
    ),
    "a target without a unit": (
        {"slo": {"ttft": {"p50": "500"}}},
        ("spec.slo.ttft.p50", "write a duration above zero, such as 500ms or 2s"),
    ),
    "a target of nothing": (
        {"slo": {"ttft": {"p99": "0ms"}}},
        ("spec.slo.ttft.p99", "write a duration above zero"),
    ),
    "targets out of order": (
        {"slo": {"ttft": {"p50": "2s", "p99": "800ms"}}},
        ("spec.slo.ttft.p50", "p50 2s is above p99 800ms: p50 can be at most p99"),
    ),
    "no KV cache": ({"kvCache": {"memory": "0"}}, ("spec.kvCache.memory", "write a size above zero")),
    "a negative KV cache": (
        {"kvCache": {"memory": "-8Gi"}},
        ("spec.kvCache.memory", "write a size above zero"),
    ),
    "a rollout that can replace nothing": (
        {"rollout": {"maxSurge": 0, "maxUnavailable": 0}},
        ("spec.rollout.maxUnavailable", "set one of them to 1"),
    ),
    "an unknown rollout strategy": (
        {"rollout": {"strategy": "BlueGreen"}},
        ("spec.rollout.strategy", '"RollingUpdate", "Recreate"'),
    ),
    "no time to start": (
        {"startupTimeoutSeconds": 0},
        ("spec.startupTimeoutSeconds", "greater than or equal to 10"),
    ),
    "a rollback flag that does not exist": (
        {"rollback": {"chunkedPrefil": True}},
        ("spec.rollback", "unknown rollback flag chunkedPrefil; use one of: all, " + ", ".join(NAMES)),
    ),
    "a rollback flag among good ones": (
        {"rollback": {"all": True, "everything": True}},
        ("spec.rollback", "unknown rollback flag everything; use one of: all, "),
    ),
    "a quoted rollback": (
        {"rollback": {"chunkedPrefill": "true"}},
        ("spec.rollback.chunkedPrefill", "must be of type boolean"),
    ),
    "the operator's own label": (
        {"template": {"labels": {"firsttoken.dev/service": "other"}}},
        ("spec.template.labels", "set by the operator; use another prefix"),
    ),
}


def changed(base: Spec, change: Spec) -> Spec:
    """A JSON merge patch: None removes."""
    result = copy.deepcopy(base)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = changed(result.get(key, {}), value)
        else:
            result[key] = value
    return result


def spec_of(cluster: Cluster, namespace: str, name: str) -> Spec:
    found: Spec = cluster.get("ftis", name, "-n", namespace)["spec"]
    return found


def refused(answer: subprocess.CompletedProcess[str], words: tuple[str, ...]) -> bool:
    """Whether a command failed with all these words on stderr."""
    return answer.returncode != 0 and all(expected in answer.stderr for expected in words)


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_bad_input_is_refused_at_apply_in_words(cluster: Cluster, namespace: str, wrong: str) -> None:
    change, words = REFUSED[wrong]
    text = inference_service(changed(VALID, change), "refused")
    answer = cluster.apply_text(text, "-n", namespace, check=False)
    assert refused(answer, words), answer.stderr


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_bad_input_is_refused_at_patch_and_nothing_changes(
    cluster: Cluster, namespace: str, kept: str, wrong: str
) -> None:
    change, words = REFUSED[wrong]
    before = spec_of(cluster, namespace, kept)
    patch = json.dumps({"spec": change})
    answer = cluster.kubectl("patch", "ftis", kept, "-n", namespace, "--type=merge", "-p", patch, check=False)
    assert refused(answer, words), answer.stderr
    assert spec_of(cluster, namespace, kept) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"optimisations": {}}, "spec.optimisations"),
        ({"optimizations": {"chunkedPrefil": {"enabled": False}}}, "spec.optimizations.chunkedPrefil"),
        (
            {"optimizations": {"chunkedPrefill": {"chunksize": 128}}},
            "spec.optimizations.chunkedPrefill.chunksize",
        ),
        ({"model": {"url": "file:///x"}}, "spec.model.url"),
        ({"template": {"containers": []}}, "spec.template.containers"),
    ],
)
def test_an_unknown_field_is_refused_at_apply_and_named_at_patch(
    cluster: Cluster, namespace: str, kept: str, change: Spec, field: str
) -> None:
    text = inference_service(changed(VALID, change), "refused")
    applied = cluster.apply_text(text, "-n", namespace, check=False)
    assert refused(applied, (f'unknown field "{field}"',)), applied.stderr
    patched = cluster.kubectl(
        "patch", "ftis", kept, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": change})
    )
    assert f'unknown field "{field}"' in patched.stderr


@pytest.mark.parametrize("name", ["Upper", "1st", "a.b", "x" * 51])
def test_a_name_that_cannot_be_a_service_is_refused(cluster: Cluster, namespace: str, name: str) -> None:
    answer = cluster.apply_text(inference_service(VALID, name), "-n", namespace, check=False)
    assert answer.returncode != 0
    assert "metadata.name" in answer.stderr or "becomes the name of a Service" in answer.stderr


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("local", {"engaged": True}, "set metadata.name: global"),
        ("global", {}, "spec.engaged: Required value"),
        ("global", {"engaged": "yes"}, "must be of type boolean"),
        ("global", {"engaged": True, "optimizations": ["chunkedPrefil"]}, '"chunkedPrefill"'),
        ("global", {"engaged": True, "optimizations": ["prefixCache", "prefixCache"]}, "Duplicate value"),
        ("global", {"engaged": True, "scope": "all"}, 'unknown field "spec.scope"'),
    ],
)
def test_a_bad_kill_switch_is_refused(cluster: Cluster, name: str, spec: Spec, words: str) -> None:
    answer = cluster.apply_text(kill_switch(spec, name), "--dry-run=server", check=False)
    assert refused(answer, (words,)), answer.stderr
