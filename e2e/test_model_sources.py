"""Models from a volume: a good one serves, a bad one says in one line what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from e2e.demo_model import model_path
from e2e.kube import Cluster, condition, wait_for, wait_ready

VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {name}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  persistentVolumeReclaimPolicy: Retain
  claimRef: {{namespace: {namespace}, name: models}}
  hostPath: {{path: {path}, type: Directory}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: models
  namespace: {namespace}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: {name}
  resources: {{requests: {{storage: 1Gi}}}}
"""

SERVICE = """
apiVersion: firsttoken.dev/v1alpha1
kind: InferenceService
metadata:
  name: {name}
spec:
  model: {{uri: "pvc://models/{path}", servedName: {name}}}
  accelerator: {{type: cpu}}
  kvCache: {{memory: 128Mi}}
  template:
    resources:
      requests: {{cpu: 100m, memory: 512Mi}}
"""


@pytest.fixture(scope="module")
def claim(cluster: Cluster, namespace: str) -> Iterator[None]:
    """A claim `models` on a directory of the node with a good model and three bad ones."""
    directory = Path(cluster.volumes) / namespace
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shutil.copy(model_path(), directory / "good.gguf")
    _truncated(directory / "truncated.gguf", directory / "good.gguf")
    _tiny_llama(directory / "other-architecture", 64)
    config = json.loads((directory / "other-architecture" / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (directory / "other-architecture" / "config.json").write_text(json.dumps(config))
    _tiny_llama(directory / "other-tokenizer", 200)
    cluster.apply_text(VOLUME.format(name=namespace, namespace=namespace, path=directory))
    yield
    cluster.kubectl("delete", "pvc", "models", "-n", namespace, "--wait=false")
    cluster.kubectl("delete", "pv", namespace, "--wait=false")
    shutil.rmtree(directory, ignore_errors=True)


def _truncated(target: Path, source: Path) -> None:
    with source.open("rb") as whole:
        target.write_bytes(whole.read(50_000_000))


def _tiny_llama(target: Path, words: int) -> None:
    """A random model with a vocabulary of 64, and a tokenizer of `words` words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    vocabulary = {f"word{number}": number for number in range(words)}
    Tokenizer(WordLevel(vocabulary, unk_token="word0")).save(str(target / "tokenizer.json"))


def test_a_model_on_a_claim_serves(cluster: Cluster, namespace: str, claim: None) -> None:
    cluster.apply_text(SERVICE.format(name="good", path="good.gguf"), "-n", namespace)
    wait_ready(cluster, namespace, "good")
    with cluster.port_forward(namespace, "service/good", 80) as url:
        body = {"model": "good", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("truncated", "truncated.gguf", ("truncated.gguf", "50000000")),
        ("architecture", "other-architecture", ("mamba", "llama")),
        ("tokenizer", "other-tokenizer", ("tokenizer", "199", "64")),
        ("absent", "nowhere.gguf", ("nowhere.gguf",)),
    ],
)
def test_a_bad_model_ends_the_pod_with_one_line_that_the_status_repeats(
    cluster: Cluster, namespace: str, claim: None, name: str, path: str, words: tuple[str, ...]
) -> None:
    cluster.apply_text(SERVICE.format(name=name, path=path), "-n", namespace)

    def failed() -> str | None:
        ready = condition(cluster.get("ftis", name, "-n", namespace), "Ready")
        return str(ready["message"]) if ready.get("reason") == "ModelLoadFailed" else None

    try:
        message = wait_for(f"{name} to say ModelLoadFailed", failed, 60, 0.5)
    finally:
        cluster.kubectl("delete", "ftis", name, "-n", namespace, "--timeout=60s")
    assert "Traceback" not in message
    for word in words:
        assert word.lower() in message.lower().replace(",", ""), message
