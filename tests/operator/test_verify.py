"""Verification: one real token, and the pod is told that nobody asked for it."""

from __future__ import annotations

import base64

from tests.operator.fakes import pod_body


async def test_the_verification_goes_with_the_token_of_the_admin_port(world):
    world.serve()
    await world.reconcile()
    world.run_pods(pod_body())
    await world.reconcile(2)
    token = world.cluster.named("Secret", "smollm-admin")["data"]["token"]
    pod = world.runtime.pod("10.0.0.1")
    assert (pod.generated, pod.verified_with) == (1, base64.b64decode(token).decode())
