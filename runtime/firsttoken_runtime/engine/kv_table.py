"""What the switch kvQuantization asks for, as a precision per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firsttoken_runtime.model.kv_pool import KvBudget, KvPrecision, KvTable


class KvTableError(ValueError):
    """The switch asks for what this model's KV cannot be; the text says what."""


def read_table(parameters: Mapping[str, Any], kv: KvBudget) -> KvTable:
    """The table of `precision` with the exceptions of `layers`.

    Raises KvTableError: a layer that the model has not got or that is listed twice, a head size that a
    precision cannot pack.
    """
    table = list(kv.shape.uniform(KvPrecision(parameters["precision"])))
    listed = set[int]()
    for entry in parameters["layers"]:
        layer = entry["layer"]
        if layer >= len(table):
            raise KvTableError(
                f"layers: there is no layer {layer}; this model has layers 0 to {len(table) - 1}"
            )
        if layer in listed:
            raise KvTableError(f"layers: layer {layer} is listed twice")
        listed.add(layer)
        table[layer] = KvPrecision(entry["precision"])
    if (obstacle := kv.obstacle(tuple(table))) is not None:
        raise KvTableError(obstacle)
    return tuple(table)
