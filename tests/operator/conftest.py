"""The reconciler in a world of its own."""

from __future__ import annotations

import pytest
from tests.operator.fakes import pod_body
from tests.operator.world import World


@pytest.fixture
async def world():
    found = World()
    yield found
    await found.verifier.aclose()
    await found.pusher.aclose()


@pytest.fixture
async def serving(world):
    """A service with one pod that serves."""
    world.serve()
    await world.reconcile()
    world.run_pods(pod_body())
    await world.reconcile(3)
    world.cluster.writes.clear()
    world.news.clear()
    return world
