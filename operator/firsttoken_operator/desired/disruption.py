"""How many pods a node drain may take at once."""

from __future__ import annotations

from firsttoken_api.resources import InferenceService
from firsttoken_operator.cluster import DISRUPTION_BUDGET, Body
from firsttoken_operator.desired.names import manifest, selector
from firsttoken_operator.desired.workload import wanted_replicas


def disruption_budget(owner: InferenceService) -> Body | None:
    """One pod at a time; None with a single replica, where a budget would only block node drains."""
    if wanted_replicas(owner.spec) < 2:
        return None
    return manifest(
        owner,
        DISRUPTION_BUDGET,
        owner.metadata.name,
        {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(owner.metadata.name)}}},
    )
