"""The status of the kill switch: who confirmed, who did not and why, since when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.operator.fakes import kill_switch_body

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.resources import KillSwitch
from firsttoken_operator.kill_status import PodReport, ServiceReport, kill_status

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ALL = frozenset(entry.name for entry in CATALOGUE if not entry.essential)
A, B = ("default", "a"), ("other", "b")
SERVICES = {A: {}, B: {"tier": "gold"}}


def report(*why_not, killed=ALL):
    pods = tuple(PodReport(f"pod-{number}", why) for number, why in enumerate(why_not))
    return ServiceReport(killed, pods)


def status(reports, *, before=None, generation=1, now=NOW, services=None, **spec):
    body = kill_switch_body(**spec)
    body["metadata"]["generation"] = generation
    body["status"] = before.to_json() if before else {}
    return kill_status(KillSwitch.model_validate(body), services or SERVICES, reports, now)


def effective(found):
    (condition,) = found.conditions
    return condition.status.value, condition.reason


def test_effective_once_every_pod_of_every_service_confirmed():
    found = status({A: report(None, None), B: report(None)})
    assert effective(found) == ("True", "Engaged")
    assert (found.pods_confirmed, found.services.confirmed, found.services.total) == ("3/3", 2, 2)
    assert found.engaged_at == found.effective_at == "2026-01-01T00:00:00.000Z"


def test_a_pod_that_did_not_confirm_is_named_with_the_reason():
    found = status({A: report(None, "no answer within 2 s"), B: report(None)})
    assert effective(found) == ("False", "NotConfirmed")
    assert found.effective_at is None
    (missing,) = found.not_confirmed
    assert (missing.namespace, missing.service, missing.pod, missing.why) == (
        "default",
        "a",
        "pod-1",
        "no answer within 2 s",
    )
    assert (found.pods_confirmed, found.services.confirmed) == ("2/3", 1)


def test_a_service_nobody_looked_at_keeps_it_from_being_effective():
    assert effective(status({A: report(None)})) == ("False", "NotConfirmed")


def test_confirmations_from_before_the_switch_do_not_count():
    found = status({A: report(None, killed=frozenset()), B: report(None)})
    assert effective(found) == ("False", "NotConfirmed")
    assert found.pods_confirmed == "1/2"


def test_services_without_a_pod_do_not_hold_it_up():
    assert effective(status({A: report(), B: report()})) == ("True", "Engaged")


def test_only_those_it_concerns_are_counted():
    found = status({A: report("late", killed=frozenset()), B: report(None)}, namespaces=["other"])
    assert effective(found) == ("True", "Engaged")
    assert found.services.total == 1
    found = status(
        {B: report(None, killed=frozenset({"prefixCache"}))},
        selector={"matchLabels": {"tier": "gold"}},
        optimizations=["prefixCache"],
    )
    assert found.pods_confirmed == "1/1"


def test_a_release_is_effective_when_every_pod_is_back_and_ends_the_engagement():
    engaged = status({A: report(None), B: report(None)})
    released = status(
        {A: report(None), B: report(None, killed=frozenset())},
        before=engaged,
        generation=2,
        engaged=False,
    )
    assert effective(released) == ("False", "NotConfirmed")
    assert (released.engaged_at, released.effective_at) == (None, None)
    done = status(
        {A: report(None, killed=frozenset()), B: report(None, killed=frozenset())},
        before=released,
        generation=2,
        engaged=False,
        now=NOW + timedelta(seconds=2),
    )
    assert effective(done) == ("True", "Released")
    assert done.effective_at == "2026-01-01T00:00:02.000Z"


def test_dates_stay_while_nothing_new_is_asked_for():
    first = status({A: report("late"), B: report(None)})
    second = status({A: report(None), B: report(None)}, before=first, now=NOW + timedelta(seconds=1))
    third = status({A: report(None), B: report(None)}, before=second, now=NOW + timedelta(days=1))
    assert (second.engaged_at, second.effective_at) == (
        "2026-01-01T00:00:00.000Z",
        "2026-01-01T00:00:01.000Z",
    )
    assert third == second


def test_a_new_engagement_has_a_new_date():
    first = status({A: report(None), B: report(None)})
    second = status(
        {A: report(None), B: report(None)}, before=first, generation=2, now=NOW + timedelta(minutes=1)
    )
    assert second.effective_at == "2026-01-01T00:01:00.000Z"
