"""Pure: from what the services report to the status of the KillSwitch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from firsttoken_api.resources import KillSwitch, KillSwitchStatus
from firsttoken_api.resources.base import ConditionStatus
from firsttoken_api.resources.kill_switch import Confirmation, NotConfirmed
from firsttoken_operator.status import Facts, Finding, conditions
from firsttoken_operator.switches import Confirmation as PodConfirmation
from firsttoken_operator.switches import ServiceKey, killed_here

EFFECTIVE = "Effective"
PODS_SHOWN = 100


@dataclass(frozen=True)
class PodReport:
    """One pod that serves. why_not: None when it confirmed the switches of the last reconcile."""

    pod: str
    why_not: str | None


@dataclass(frozen=True)
class ServiceReport:
    """What the last reconcile of one service did. killed: what it understood the kill switch to take back."""

    killed: frozenset[str]
    pods: tuple[PodReport, ...]


def service_report(facts: Facts) -> ServiceReport:
    """What the kill switch needs to know of one service."""
    generation = facts.message.generation if facts.message else 0
    return ServiceReport(
        killed=facts.killed,
        pods=tuple(
            PodReport(
                pod.name,
                None
                if facts.confirmed(pod)
                else facts.confirmations.get(pod.uid, PodConfirmation()).why_not(generation),
            )
            for pod in facts.switched_pods()
        ),
    )


def kill_status(
    kill_switch: KillSwitch,
    services: Mapping[ServiceKey, Mapping[str, str]],
    reports: Mapping[ServiceKey, ServiceReport],
    now: datetime,
) -> KillSwitchStatus:
    """The status; services: labels of every InferenceService there is, reports: of those reconciled."""
    concerned = {
        key: killed_here(kill_switch, key[0], labels)
        for key, labels in services.items()
        if kill_switch.spec.concerns(key[0], labels)
    }
    missing: list[NotConfirmed] = []
    confirmed_services = confirmed_pods = pods = 0
    for key, killed in sorted(concerned.items()):
        report = reports.get(key)
        if report is None or report.killed != killed:
            waiting = report.pods if report is not None else ()
            pods += len(waiting)
            missing += [_missing(key, pod.pod, "its switches are being written") for pod in waiting]
            if not waiting:
                # Nothing is known of its pods yet; without this line the switch could look effective.
                missing.append(_missing(key, key[1], "the service has not been looked at yet"))
            continue
        late = [pod for pod in report.pods if pod.why_not is not None]
        pods += len(report.pods)
        confirmed_pods += len(report.pods) - len(late)
        confirmed_services += not late
        missing += [_missing(key, pod.pod, pod.why_not or "") for pod in late]
    finding = _effective(kill_switch.spec.engaged, missing, len(concerned), pods)
    return _dated(
        kill_switch,
        finding,
        now,
        services=Confirmation(confirmed=confirmed_services, total=len(concerned)),
        pods=Confirmation(confirmed=confirmed_pods, total=pods),
        not_confirmed=missing[:PODS_SHOWN],
    )


def fine_stamp(moment: datetime) -> str:
    """A time to the millisecond: how long a kill switch took is the difference of two of them."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _missing(key: ServiceKey, pod: str, why: str) -> NotConfirmed:
    return NotConfirmed(namespace=key[0], service=key[1], pod=pod, why=why[:1024])


def _effective(engaged: bool, missing: Sequence[NotConfirmed], services: int, pods: int) -> Finding:
    what = "taken back" if engaged else "given back"
    if missing:
        first = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return Finding(
            ConditionStatus.FALSE,
            "NotConfirmed",
            f"not yet {what} in {first.namespace}/{first.pod}: {first.why}{more}",
        )
    reason = "Engaged" if engaged else "Released"
    return Finding(ConditionStatus.TRUE, reason, f"{what} in {pods} pods of {services} services")


def _dated(
    kill_switch: KillSwitch,
    finding: Finding,
    now: datetime,
    *,
    services: Confirmation,
    pods: Confirmation,
    not_confirmed: Sequence[NotConfirmed],
) -> KillSwitchStatus:
    before, engaged = kill_switch.status, kill_switch.spec.engaged
    was_engaged = before.engaged_at is not None
    same_asked = before.observed_generation == kill_switch.metadata.generation and was_engaged == engaged
    effective = finding.status == ConditionStatus.TRUE
    effective_at = before.effective_at if same_asked else None
    if effective and effective_at is None:
        effective_at = fine_stamp(now)
    return KillSwitchStatus(
        observed_generation=kill_switch.metadata.generation,
        conditions=conditions({EFFECTIVE: finding}, before.conditions, kill_switch.metadata.generation, now),
        services=services,
        pods=pods,
        pods_confirmed=f"{pods.confirmed}/{pods.total}",
        not_confirmed=list(not_confirmed),
        engaged_at=(before.engaged_at or fine_stamp(now)) if engaged else None,
        effective_at=effective_at if effective or same_asked else None,
    )
