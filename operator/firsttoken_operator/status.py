"""Pure: from facts to the status of an InferenceService.

Ready is the aggregate and is fed by pods and generations alone; the diagnostic conditions never feed it.
Every reason is one CamelCase word, every message a sentence that says what to do where something can be done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.resources import Condition, InferenceService, InferenceServiceStatus
from firsttoken_api.resources.base import ConditionStatus
from firsttoken_api.resources.inference_service_status import (
    EffectiveState,
    FailureStatus,
    KillSwitchView,
    OptimizationStatus,
)
from firsttoken_api.switches import Cause, Setting, SwitchMessage
from firsttoken_operator.desired.access import url
from firsttoken_operator.desired.names import selector_text
from firsttoken_operator.desired.workload import wanted_replicas
from firsttoken_operator.failure import find_failure, newest
from firsttoken_operator.observe import PodFacts, WorkloadFacts, parse_time
from firsttoken_operator.switches import Confirmation
from firsttoken_operator.ttft import ttft_status
from firsttoken_operator.verify import Verification

READY, PROGRESSING, DEGRADED = "Ready", "Progressing", "Degraded"
MODEL_READY, SWITCHES_APPLIED = "ModelReady", "SwitchesApplied"
NAMES_SHOWN = 100


@dataclass(frozen=True)
class Facts:
    """All that the status of one service is computed from.

    blocked: why the workload was not even written (unknown accelerator, model source, name taken).
    confirmations and verifications: by pod uid. served: uids of pods that have generated before.
    message: the switches that the pods are to run.
    """

    service: InferenceService
    workload: WorkloadFacts = field(default_factory=WorkloadFacts)
    pods: Sequence[PodFacts] = ()
    message: SwitchMessage | None = None
    confirmations: Mapping[str, Confirmation] = field(default_factory=dict)
    verifications: Mapping[str, Verification] = field(default_factory=dict)
    blocked: FailureStatus | None = None
    killed: frozenset[str] = frozenset()
    kill_reason: str | None = None
    gpu_type: str | None = None
    served: frozenset[str] = frozenset()
    now: datetime = datetime(1970, 1, 1, tzinfo=UTC)

    @property
    def desired(self) -> int:
        return wanted_replicas(self.service.spec)

    def newest_pods(self) -> list[PodFacts]:
        return newest(self.workload, self.pods)

    def switched_pods(self) -> list[PodFacts]:
        """Pods that have to confirm the switches: those that serve or could serve at any moment."""
        return sorted((pod for pod in self.pods if pod.counts and pod.started), key=lambda pod: pod.name)

    def confirmed(self, pod: PodFacts) -> bool:
        known = self.confirmations.get(pod.uid)
        return known is not None and self.message is not None and known.confirms(self.message.generation)

    def verified(self, pod: PodFacts) -> bool:
        """Whether this very container has generated a token.

        After a restart of the operator a container that ran when Ready last turned True was verified then;
        it is verified again all the same, and only a failure takes Ready back.
        """
        known = self.verifications.get(pod.uid, Verification())
        if known.answered or known.error is not None:
            return known.answered
        was = condition(self.service.status, READY)
        if was is None or was.status != ConditionStatus.TRUE or pod.container_started_at is None:
            return False
        since = parse_time(was.last_transition_time)
        return since is not None and pod.container_started_at < since


@dataclass(frozen=True)
class Finding:
    """A condition without its dates."""

    status: ConditionStatus
    reason: str
    message: str


def _true(reason: str, message: str) -> Finding:
    return Finding(ConditionStatus.TRUE, reason, message)


def _false(reason: str, message: str) -> Finding:
    return Finding(ConditionStatus.FALSE, reason, message)


def compute_status(facts: Facts) -> InferenceServiceStatus:
    """The whole status; equal facts give an equal status, whatever the time."""
    service, workload, previous = facts.service, facts.workload, facts.service.status
    failure = facts.blocked or find_failure(
        workload,
        facts.pods,
        previous.failure,
        service.spec.startup_timeout_seconds,
        facts.gpu_type,
        facts.served,
    )
    ready = _ready(facts, failure)
    findings = {
        READY: ready,
        PROGRESSING: _progressing(facts, failure, ready),
        DEGRADED: _degraded(facts, failure),
        MODEL_READY: _model_ready(facts, failure),
        SWITCHES_APPLIED: _switches_applied(facts),
    }
    ready_pods = sum(pod.ready for pod in facts.pods if pod.counts)
    return InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        conditions=conditions(findings, previous.conditions, service.metadata.generation, facts.now),
        replicas=sum(pod.counts for pod in facts.pods),
        updated_replicas=len(facts.newest_pods()),
        ready_replicas=ready_pods,
        ready_of_desired=f"{ready_pods}/{facts.desired}",
        selector=selector_text(service.metadata.name),
        url=url(service),
        switch_generation=facts.message.generation if facts.message else None,
        optimizations=_optimizations(facts),
        ttft=ttft_status(
            [
                known.state
                for pod in facts.switched_pods()
                if (known := facts.confirmations.get(pod.uid)) is not None and known.state is not None
            ],
            previous.ttft,
        ),
        failure=failure,
        kill_switch=KillSwitchView(
            engaged=bool(facts.killed), optimizations=sorted(facts.killed), reason=facts.kill_reason
        )
        if facts.killed
        else None,
    )


def conditions(
    findings: Mapping[str, Finding], previous: Sequence[Condition], generation: int, now: datetime
) -> list[Condition]:
    """Conditions with dates: lastTransitionTime moves only when the status does."""
    before = {condition.type: condition for condition in previous}
    found = []
    for name, finding in findings.items():
        old = before.get(name)
        since = old.last_transition_time if old and old.status == finding.status else stamp(now)
        found.append(
            Condition(
                type=name,
                status=finding.status,
                reason=finding.reason,
                message=finding.message,
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return found


def stamp(moment: datetime) -> str:
    """A time as the API server writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(status: InferenceServiceStatus, name: str) -> Condition | None:
    return next((found for found in status.conditions if found.type == name), None)


def _ready(facts: Facts, failure: FailureStatus | None) -> Finding:
    if failure is not None:
        return _false(failure.reason, failure.message)
    if facts.desired == 0:
        return _false("ScaledToZero", "nothing serves: spec.replicas is 0; set it to 1 or more")
    pods, workload = facts.newest_pods(), facts.workload
    if not workload.exists or not workload.settled or workload.newest_hash is None:
        return _false("Deploying", "the Deployment is being written")
    if len(pods) < facts.desired:
        return _false("PodsMissing", f"{len(pods)} of {facts.desired} pods of the newest specification exist")
    waiting = [pod for pod in pods if not pod.ready]
    if waiting:
        words = _pod_words(waiting[0])
        return _false("PodsNotReady", f"{len(pods) - len(waiting)} of {facts.desired} pods ready; {words}")
    failed = [pod for pod in pods if not facts.verified(pod)]
    if failed:
        error = facts.verifications.get(failed[0].uid, Verification()).error
        if error is None:
            return _false("Verifying", f"{failed[0].name} is asked for its first token")
        return _false(
            "GenerationFailed",
            f"{failed[0].name} is up but does not generate: {error}; look at its log",
        )
    return _true("Serving", f"{len(pods)} of {facts.desired} pods ready, each has generated a token")


def _progressing(facts: Facts, failure: FailureStatus | None, ready: Finding) -> Finding:
    if failure is not None:
        return _false(failure.reason, "stands still: " + failure.message)
    if ready.status == ConditionStatus.TRUE:
        old = [pod for pod in facts.pods if pod.counts and pod.template_hash != facts.workload.newest_hash]
        if old:
            return _true("RollingOut", f"{len(old)} pods of the former specification are being stopped")
        return _false("Settled", "every pod runs the newest specification")
    if ready.reason in ("ScaledToZero", "GenerationFailed"):
        return _false(ready.reason, ready.message)
    if len([pod for pod in facts.pods if pod.counts]) > len(facts.newest_pods()):
        return _true("RollingOut", ready.message)
    return _true(ready.reason, ready.message)


def _degraded(facts: Facts, failure: FailureStatus | None) -> Finding:
    if failure is not None:
        return _true(failure.reason, failure.message)
    for pod in facts.newest_pods():
        error = facts.verifications.get(pod.uid, Verification()).error
        if pod.ready and error is not None and not facts.verified(pod):
            return _true("GenerationFailed", f"{pod.name} does not generate: {error}")
    unreachable = [
        pod
        for pod in facts.switched_pods()
        if not facts.confirmed(pod) and (known := facts.confirmations.get(pod.uid)) and known.error
    ]
    if unreachable:
        return _true("SwitchesNotApplied", _switch_words(facts, unreachable))
    if facts.service.spec.autoscaling is not None:
        return _true(
            "AutoscalingNotInThisBuild",
            f"spec.autoscaling is accepted but not in this build: {facts.desired} replicas (minReplicas) "
            "run; set spec.replicas instead to choose",
        )
    return _false("AsExpected", "nothing is wrong")


def _model_ready(facts: Facts, failure: FailureStatus | None) -> Finding:
    pods = facts.newest_pods()
    loaded = [pod for pod in pods if pod.ready]
    if pods and len(loaded) == len(pods):
        return _true("ModelLoaded", "every pod has the model loaded")
    if failure is not None:
        return _false(failure.reason, failure.message)
    if not pods:
        return _false("NoPods", "no pod of the newest specification runs")
    waiting = next(pod for pod in pods if not pod.ready)
    return _false(
        "ModelLoading", f"{len(loaded)} of {len(pods)} pods have the model loaded; {_pod_words(waiting)}"
    )


def _switches_applied(facts: Facts) -> Finding:
    pods = facts.switched_pods()
    if facts.message is None:
        return Finding(ConditionStatus.UNKNOWN, "NotWritten", "the switches are not written yet")
    generation = facts.message.generation
    if not pods:
        return Finding(
            ConditionStatus.UNKNOWN,
            "NoPods",
            f"no pod runs; the next one comes up with generation {generation}",
        )
    missing = [pod for pod in pods if not facts.confirmed(pod)]
    if missing:
        return _false("NotConfirmed", _switch_words(facts, missing))
    return _true("Confirmed", f"{len(pods)} of {len(pods)} pods run generation {generation}")


def _switch_words(facts: Facts, missing: Sequence[PodFacts]) -> str:
    assert facts.message is not None
    generation, total = facts.message.generation, len(facts.switched_pods())
    shown = "; ".join(
        f"{pod.name}: {facts.confirmations.get(pod.uid, Confirmation()).why_not(generation)}"
        for pod in missing[:5]
    )
    more = f"; and {len(missing) - 5} more" if len(missing) > 5 else ""
    return f"{total - len(missing)} of {total} pods run generation {generation}; {shown}{more}"


def _pod_words(pod: PodFacts) -> str:
    if pod.unschedulable is not None:
        return f"{pod.name} waits for a node"
    if pod.running and not pod.started:
        return f"{pod.name} is loading the model"
    if pod.running:
        return f"{pod.name} runs but is not ready"
    return f"{pod.name} is starting{f' ({pod.waiting})' if pod.waiting else ''}"


def _optimizations(facts: Facts) -> list[OptimizationStatus]:
    if facts.message is None:
        return []
    pods = facts.switched_pods()
    missing = [pod.name for pod in pods if not facts.confirmed(pod)]
    confirmed = f"{len(pods) - len(missing)}/{len(pods)}"
    return [
        _optimization(facts, entry.name, facts.message.switches[entry.name], confirmed, missing[:NAMES_SHOWN])
        for entry in CATALOGUE
        if entry.name in facts.message.switches
    ]


def _optimization(
    facts: Facts, name: str, setting: Setting, confirmed: str, missing: list[str]
) -> OptimizationStatus:
    answers = []
    for pod in facts.switched_pods():
        state = facts.confirmations.get(pod.uid, Confirmation()).state
        found = state.states().get(name) if state is not None else None
        if found is not None:
            answers.append(found)
    states = {answer.state for answer in answers}
    effective = EffectiveState.UNKNOWN.value
    if len(states) == 1:
        effective = states.pop()
    elif states:
        effective = EffectiveState.MIXED.value
    return OptimizationStatus(
        name=name,
        desired="on" if setting.enabled else "off",
        effective=effective,
        reason=_reason(facts, name, setting, [answer.reason for answer in answers]),
        pods=confirmed,
        not_confirmed=missing,
    )


def _reason(facts: Facts, name: str, setting: Setting, answers: Sequence[str | None]) -> str | None:
    if setting.cause is Cause.KILLED:
        return f"kill switch{f': {facts.kill_reason}' if facts.kill_reason else ''}"
    if setting.cause is Cause.ROLLED_BACK:
        flag = name if facts.service.spec.rollback.get(name) else "all"
        return f"spec.rollback.{flag} is true"
    # Also of a switch that is on: a pod of an older release names the parameters that it ignores.
    return next((answer for answer in answers if answer), None)
