"""Kubernetes Events: only when something changed, told from the status before and after."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime

from firsttoken_api.resources import (
    InferenceService,
    InferenceServiceStatus,
    KillSwitch,
    KillSwitchStatus,
)
from firsttoken_api.resources.base import ConditionStatus, Metadata
from firsttoken_api.resources.inference_service_status import EffectiveState
from firsttoken_operator.cluster import EVENT, Body, Kind
from firsttoken_operator.status import READY, SWITCHES_APPLIED, condition, stamp

UNKNOWN = EffectiveState.UNKNOWN.value
COMPONENT = "firsttoken-operator"


@dataclass(frozen=True)
class Notice:
    """One thing to tell. warning: Warning instead of Normal."""

    reason: str
    message: str
    warning: bool = False


def notices(service: InferenceService, after: InferenceServiceStatus) -> list[Notice]:
    """What changed between the status in `service` and `after`, worth telling a person."""
    before, found = service.status, []
    if after.failure is not None and (
        before.failure is None
        or (before.failure.reason, before.failure.message) != (after.failure.reason, after.failure.message)
    ):
        found.append(Notice(after.failure.reason, after.failure.message, warning=True))
    was, now = condition(before, READY), condition(after, READY)
    if now is not None and now.status == ConditionStatus.TRUE and (was is None or was.status != now.status):
        found.append(Notice("Serving", now.message))
    if (
        now is not None
        and now.reason == "GenerationFailed"
        and (was is None or was.reason != "GenerationFailed")
    ):
        found.append(Notice("GenerationFailed", now.message, warning=True))
    switched = condition(after, SWITCHES_APPLIED)
    old = condition(before, SWITCHES_APPLIED)
    if switched is not None and switched.status == ConditionStatus.TRUE:
        if (
            old is None
            or old.status != switched.status
            or before.switch_generation != after.switch_generation
        ):
            found.append(Notice("SwitchesApplied", f"{switched.message}{_changed(before, after)}"))
    elif switched is not None and switched.status == ConditionStatus.FALSE and _is_error(before, after):
        found.append(Notice("SwitchesNotApplied", switched.message, warning=True))
    return found


def _is_error(before: InferenceServiceStatus, after: InferenceServiceStatus) -> bool:
    """Whether pods newly fail to take the switches; a push under way is no news."""
    was, now = condition(before, "Degraded"), condition(after, "Degraded")
    reason = "SwitchesNotApplied"
    return now is not None and now.reason == reason and (was is None or was.reason != reason)


def _changed(before: InferenceServiceStatus, after: InferenceServiceStatus) -> str:
    old = {line.name: line.effective for line in before.optimizations}
    changes = [
        f"{line.name} {line.effective}"
        for line in after.optimizations
        if old.get(line.name, UNKNOWN) not in (UNKNOWN, line.effective)
    ]
    return ": " + ", ".join(changes) if changes else ""


def kill_notices(kill_switch: KillSwitch, after: KillSwitchStatus) -> list[Notice]:
    """What changed for the kill switch, worth telling a person."""
    was = next(iter(kill_switch.status.conditions), None)
    now = next(iter(after.conditions), None)
    # Being on its way is in the status; an Event for it would come with every use of the switch.
    if now is None or now.status != ConditionStatus.TRUE:
        return []
    if was is not None and (was.status, was.reason) == (now.status, now.reason):
        return []
    return [Notice(now.reason, now.message)]


def event_body(kind: Kind, about: Metadata, notice: Notice, now: datetime) -> Body:
    """The Event to create about the object with this metadata; a cluster-wide object's is in `default`."""
    moment, namespace = stamp(now), about.namespace or "default"
    involved: Body = {"apiVersion": kind.api_version, "kind": kind.kind, "name": about.name, "uid": about.uid}
    if about.namespace:
        involved["namespace"] = about.namespace
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{about.name}.{secrets.token_hex(8)}", "namespace": namespace},
        "involvedObject": involved,
        "type": "Warning" if notice.warning else "Normal",
        "reason": notice.reason,
        "message": notice.message[:1024],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
