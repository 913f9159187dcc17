"""Apply: only what is to be changed, and no fight with a controller that insists on something else."""

from __future__ import annotations

import pytest
from tests.operator.fakes import FakeCluster, service_body

from firsttoken_api.resources import InferenceService
from firsttoken_api.switches import SwitchMessage, resolve
from firsttoken_operator.apply import Applier
from firsttoken_operator.cluster import CONFIG_MAP
from firsttoken_operator.desired.switches import SWITCHES_KEY, switches_config_map

OWNER = InferenceService.model_validate(service_body())


class InsistentCluster(FakeCluster):
    """A webhook sets its own label back whatever is applied."""

    def put(self, body):
        body["metadata"].setdefault("labels", {})["app.kubernetes.io/managed-by"] = "somebody-else"
        return super().put(body)


@pytest.fixture
def cluster():
    return InsistentCluster()


async def applied(applier, cluster, generation):
    live = await cluster.get(CONFIG_MAP, "default", "smollm-switches")
    message = SwitchMessage(generation, resolve({}, {}, frozenset()))
    return await applier.apply(OWNER, switches_config_map(OWNER, message), live)


async def test_what_a_webhook_insists_on_is_not_written_for_ever(cluster):
    applier = Applier(cluster)
    for _ in range(3):
        await applied(applier, cluster, 1)
    assert len(cluster.writes) == 1


async def test_a_new_content_is_written_all_the_same(cluster):
    applier = Applier(cluster)
    await applied(applier, cluster, 1)
    live = await applied(applier, cluster, 2)
    assert '"generation": 2' in live["data"][SWITCHES_KEY]
    assert len(cluster.writes) == 2
