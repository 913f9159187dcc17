"""When an object is written, and when it is left alone."""

from __future__ import annotations

import copy

import pytest
from tests.operator.fakes import FakeCluster, service_body

from firsttoken_api.resources import InferenceService
from firsttoken_operator.apply import Applier, NameTakenError
from firsttoken_operator.desired import access
from firsttoken_operator.drift import Verdict, covers, stamped, verdict

OWNER = InferenceService.model_validate(service_body())
DESIRED = stamped(access.service(OWNER))


def as_served(manifest):
    """As the API server gives it back: with defaults and bookkeeping."""
    live = copy.deepcopy(manifest)
    live["metadata"] |= {"uid": "u", "resourceVersion": "1", "creationTimestamp": "now"}
    live["spec"] |= {"clusterIP": "10.96.0.9", "sessionAffinity": "None"}
    return live


def test_what_is_as_asked_for_is_left_alone():
    assert verdict(DESIRED, as_served(DESIRED), OWNER.metadata.uid) is Verdict.KEEP


def test_what_is_missing_is_applied():
    assert verdict(DESIRED, None, OWNER.metadata.uid) is Verdict.APPLY


def test_what_somebody_changed_is_applied():
    live = as_served(DESIRED)
    live["spec"]["ports"][0]["port"] = 81
    assert verdict(DESIRED, live, OWNER.metadata.uid) is Verdict.APPLY


def test_a_field_that_is_no_longer_asked_for_is_applied_away():
    before = copy.deepcopy(access.service(OWNER))
    before["spec"]["type"] = "NodePort"
    before["spec"]["externalTrafficPolicy"] = "Local"
    live = as_served(stamped(before))
    live["spec"]["type"] = "ClusterIP"
    assert verdict(DESIRED, live, OWNER.metadata.uid) is Verdict.APPLY, "the digest tells"


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (None, Verdict.FOREIGN),
        (("Deployment", "apps/v1"), Verdict.FOREIGN),
        (("InferenceService", "serving.kserve.io/v1"), Verdict.FOREIGN),
        (("InferenceService", "firsttoken.dev/v1alpha1"), Verdict.OUTGOING),
    ],
)
def test_somebody_elses_object_is_never_touched(owner, expected):
    live = as_served(DESIRED)
    live["metadata"]["ownerReferences"] = []
    if owner is not None:
        kind, api_version = owner
        live["metadata"]["ownerReferences"] = [
            {"kind": kind, "apiVersion": api_version, "uid": "another", "controller": True}
        ]
    assert verdict(DESIRED, live, OWNER.metadata.uid) is expected


def test_an_object_on_its_way_out_is_waited_for():
    live = as_served(DESIRED)
    live["metadata"]["deletionTimestamp"] = "now"
    assert verdict(DESIRED, live, OWNER.metadata.uid) is Verdict.OUTGOING


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], [1], False),
        (None, [], True),
        (None, None, True),
        ({}, {"rollingUpdate": None}, True),
        ({"rollingUpdate": {}}, {"rollingUpdate": None}, False),
        ("1", "1000m", True),
        ("1Gi", "1024Mi", True),
        ("1Gi", "1G", False),
        ("a", "b", False),
        ([{"n": "x", "v": "1", "d": 0}], [{"n": "x", "v": "1"}], True),
    ],
)
def test_covers(live, desired, same):
    assert covers(live, desired) is same


async def test_an_apply_of_the_same_thing_twice_writes_once():
    cluster, applier = FakeCluster(), None
    applier = Applier(cluster)
    live = await applier.apply(OWNER, access.service(OWNER), None)
    await applier.apply(OWNER, access.service(OWNER), live)
    assert cluster.writes == [("apply", "Service", "smollm")]


async def test_a_dispute_with_another_controller_is_not_fought_for_ever():
    class Stubborn(FakeCluster):
        async def apply(self, manifest):
            applied = await super().apply(manifest)
            applied["spec"]["type"] = "LoadBalancer"
            return self.put(applied)

    cluster = Stubborn()
    applier = Applier(cluster)
    live = await applier.apply(OWNER, access.service(OWNER), None)
    for _ in range(5):
        live = await applier.apply(OWNER, access.service(OWNER), live)
    assert len(cluster.writes) == 1
    live["spec"]["ports"][0]["port"] = 81
    await applier.apply(OWNER, access.service(OWNER), cluster.put(live))
    assert len(cluster.writes) == 2, "a new change by somebody is put right again"


async def test_a_name_that_is_taken_is_said():
    cluster = FakeCluster()
    taken = cluster.put(
        {"kind": "Service", "metadata": {"name": "smollm", "namespace": "default"}, "spec": {}}
    )
    with pytest.raises(NameTakenError, match="does not belong to InferenceService smollm"):
        await Applier(cluster).apply(OWNER, access.service(OWNER), taken)
    assert cluster.writes == []
