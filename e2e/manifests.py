"""InferenceServices and KillSwitches as text, for the tests of what the API server says to them."""

from __future__ import annotations

from typing import Any

import yaml

Spec = dict[str, Any]

# Starts no pod.
VALID: Spec = {
    "model": {"uri": "file:///models/some.gguf"},
    "accelerator": {"type": "cpu"},
    "replicas": 0,
}


def inference_service(spec: Spec, name: str = "kept") -> str:
    return _manifest("InferenceService", name, spec)


def kill_switch(spec: Spec, name: str = "global") -> str:
    return _manifest("KillSwitch", name, spec)


def _manifest(kind: str, name: str, spec: Spec) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "firsttoken.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
    )
