"""GPUs for the scheduler's eyes: pods that ask for one are scheduled and started, without a device."""

from __future__ import annotations

import json

from .console import ClusterError, step
from .node import kubectl
from .places import Places

RESOURCE = "nvidia.com/gpu"
LABEL = "nvidia.com/gpu.product"


def fake_gpu(where: Places, count: int, product: str, node_name: str) -> None:
    """Announces `count` GPUs of this product on the node; 0 takes resource and label back."""
    if count < 0:
        raise ClusterError(f"fake-gpu: the number of GPUs is {count}; say 0 or more")
    amount = str(count) if count else None  # null deletes the key in a merge patch
    status = {"status": {"capacity": {RESOURCE: amount}, "allocatable": {RESOURCE: amount}}}
    labels = {"metadata": {"labels": {LABEL: product if count else None}}}
    with step(f"announcing {count} GPUs of type {product}" if count else "taking the announced GPUs back"):
        target = ("patch", "node", node_name, "--type=merge")
        kubectl(where, *target, "-p", json.dumps(labels), why="labelling the node")
        kubectl(where, *target, "--subresource=status", "-p", json.dumps(status), why="announcing GPUs")
