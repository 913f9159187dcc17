"""Accelerator types: which resource a pod asks for and which nodes have it, with the figures for planning.

The built-in catalogue is extended and overridden by the YAML file named in FIRSTTOKEN_ACCELERATORS:

    nvidia-h100-80gb:
      resource: nvidia.com/gpu
      nodeLabels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      requests: {cpu: "4", memory: 32Gi}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

CPU = "cpu"


class AcceleratorError(ValueError):
    """A catalogue file that cannot be used; the text says where and what would be right."""


class Accelerator(BaseModel):
    """One accelerator type.

    resource: extended resource that a pod asks for; None for cpu.
    memory_bytes: of one device. tera_flops: dense, 16 bit. bandwidth_bytes_per_second: of its memory.
    requests: what a container asks for where spec.template.resources says nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    resource: str | None = None
    node_labels: dict[str, str] = Field(default_factory=dict)
    tolerations: list[dict[str, Any]] = Field(default_factory=list)
    requests: dict[str, str] = Field(default_factory=dict)
    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    tera_flops: Annotated[float, Field(gt=0)] | None = None
    bandwidth_bytes_per_second: Annotated[float, Field(gt=0)] | None = None


def _nvidia(product: str, memory_gb: int, tera_flops: float, terabytes_per_second: float) -> Accelerator:
    return Accelerator(
        resource="nvidia.com/gpu",
        node_labels={"nvidia.com/gpu.product": product},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        requests={"cpu": "4", "memory": "16Gi"},
        memory_bytes=memory_gb * 10**9,
        tera_flops=tera_flops,
        bandwidth_bytes_per_second=terabytes_per_second * 1e12,
    )


# Products as NVIDIA's GPU feature discovery labels nodes; figures from the vendor's data sheets.
BUILT_IN: Mapping[str, Accelerator] = {
    CPU: Accelerator(requests={"cpu": "1", "memory": "2Gi"}),
    "nvidia-t4": _nvidia("Tesla-T4", 16, 65, 0.32),
    "nvidia-l4": _nvidia("NVIDIA-L4", 24, 121, 0.3),
    "nvidia-a10": _nvidia("NVIDIA-A10", 24, 125, 0.6),
    "nvidia-l40s": _nvidia("NVIDIA-L40S", 48, 362, 0.864),
    "nvidia-a100-40gb": _nvidia("NVIDIA-A100-SXM4-40GB", 40, 312, 1.555),
    "nvidia-a100-80gb": _nvidia("NVIDIA-A100-SXM4-80GB", 80, 312, 2.039),
    "nvidia-h100-80gb": _nvidia("NVIDIA-H100-80GB-HBM3", 80, 989, 3.35),
    "nvidia-h200": _nvidia("NVIDIA-H200", 141, 989, 4.8),
    "nvidia-b200": _nvidia("NVIDIA-B200", 180, 2250, 8.0),
}


def parse_accelerators(text: str, where: str) -> dict[str, Accelerator]:
    """The built-in catalogue with the entries of a YAML text on top. Raises AcceleratorError."""
    try:
        entries = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise AcceleratorError(f"{where}: not YAML: {error}") from None
    if not isinstance(entries, dict):
        raise AcceleratorError(
            f"{where}: write a mapping of type names to entries, such as nvidia-l4: {{...}}"
        )
    found = dict(BUILT_IN)
    for name, entry in entries.items():
        try:
            found[str(name)] = Accelerator.model_validate(entry or {})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise AcceleratorError(f"{where}: {name}.{field}: {first['msg']}") from None
    return found


def load_accelerators(path: str | None) -> dict[str, Accelerator]:
    """The catalogue: built-in, or with the file's entries on top. Raises AcceleratorError."""
    if not path:
        return dict(BUILT_IN)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AcceleratorError(f"{path}: cannot be read: {error}") from None
    return parse_accelerators(text, path)
