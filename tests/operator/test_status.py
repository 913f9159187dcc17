"""Status: a table of situations, and what is said about each."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from tests.operator.fakes import pod_body, service_body

from firsttoken_api.resources import InferenceService
from firsttoken_api.resources.inference_service_status import FailureStatus, SegmentStatus, TtftStatus
from firsttoken_api.switches import SwitchMessage, resolve
from firsttoken_operator.observe import WorkloadFacts, pod_facts
from firsttoken_operator.runtime_client import PodError, PodErrorKind, PodState, SwitchState
from firsttoken_operator.status import Facts, compute_status, condition
from firsttoken_operator.switches import Confirmation
from firsttoken_operator.ttft import ttft_status
from firsttoken_operator.verify import Verification

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORKLOAD = WorkloadFacts(exists=True, settled=True, desired=1, replicas=1, updated=1, newest_hash="h1")


def service(status=None, **spec) -> InferenceService:
    return InferenceService.model_validate({**service_body(**spec), "status": status or {}})


def message(generation=3, rollback=None, killed=frozenset()) -> SwitchMessage:
    return SwitchMessage(generation, resolve({}, rollback or {}, killed))


def answer(sent: SwitchMessage, generation=None, **states) -> Confirmation:
    switches = tuple(
        SwitchState(name, states.get(name) or (setting.cause or ("on" if setting.enabled else "off")), None)
        for name, setting in sent.switches.items()
    )
    return Confirmation(PodState(sent.generation if generation is None else generation, switches, ready=True))


def facts(*pods, owner=None, verified=True, **change) -> Facts:
    pods = pods or (pod_body(),)
    sent = change.pop("message", message())
    found = [pod_facts(pod) for pod in pods]
    return Facts(
        service=owner or service(),
        workload=change.pop("workload", WORKLOAD),
        pods=found,
        message=sent,
        confirmations=change.pop("confirmations", {pod.uid: answer(sent) for pod in found}),
        verifications={pod.uid: Verification(verified) for pod in found},
        now=change.pop("now", NOW),
        **change,
    )


def words(status, name):
    found = condition(status, name)
    return found.status.value, found.reason


def test_a_service_that_serves():
    status = compute_status(facts())
    assert words(status, "Ready") == ("True", "Serving")
    assert words(status, "Progressing") == ("False", "Settled")
    assert words(status, "Degraded") == ("False", "AsExpected")
    assert words(status, "ModelReady") == ("True", "ModelLoaded")
    assert words(status, "SwitchesApplied") == ("True", "Confirmed")
    assert (status.ready_of_desired, status.replicas, status.updated_replicas) == ("1/1", 1, 1)
    assert status.url == "http://smollm.default.svc/v1"
    assert status.selector == "app.kubernetes.io/instance=smollm,app.kubernetes.io/name=firsttoken-runtime"
    assert status.failure is None
    assert {found.observed_generation for found in status.conditions} == {status.observed_generation} == {1}


LOADING = pod_body(ready=False, started=False)


@pytest.mark.parametrize(
    ("given", "ready", "progressing"),
    [
        (facts(workload=WorkloadFacts(exists=True, settled=False)), "Deploying", "True"),
        (facts(workload=WorkloadFacts()), "Deploying", "True"),
        (facts(workload=replace(WORKLOAD, newest_hash="h2")), "PodsMissing", "True"),
        (facts(LOADING), "PodsNotReady", "True"),
        (facts(verified=False), "Verifying", "True"),
        (facts(owner=service(replicas=2)), "PodsMissing", "True"),
        (facts(owner=service(replicas=0)), "ScaledToZero", "False"),
        (facts(pod_body(metadata={"deletionTimestamp": "x"})), "PodsMissing", "True"),
        (facts(pod_body(phase="Failed")), "PodsMissing", "True"),
    ],
)
def test_ready_is_false_unless_every_updated_pod_serves(given, ready, progressing):
    status = compute_status(given)
    assert words(status, "Ready") == ("False", ready)
    assert condition(status, "Progressing").status.value == progressing


def test_a_ready_pod_that_does_not_generate_does_not_make_the_service_ready():
    given = replace(facts(), verifications={"smollm-a-uid": Verification(False, "HTTP 500")})
    status = compute_status(given)
    assert words(status, "Ready") == ("False", "GenerationFailed")
    assert words(status, "Degraded") == ("True", "GenerationFailed")
    assert "HTTP 500" in condition(status, "Ready").message


@pytest.mark.parametrize(
    ("started_at", "error", "ready"),
    [
        ("2025-12-31T23:00:00Z", None, "True"),
        ("2026-01-01T00:00:01Z", None, "False"),
        ("2025-12-31T23:00:00Z", "HTTP 500", "False"),
    ],
)
def test_a_restart_of_the_operator_takes_ready_back_only_from_containers_it_does_not_know(
    started_at, error, ready
):
    pod = pod_body(state={"running": {"startedAt": started_at}})
    serving = compute_status(facts(pod))
    given = facts(pod, owner=service(status=serving.to_json()), now=NOW + timedelta(minutes=1))
    given = replace(given, verifications={"smollm-a-uid": Verification(False, error)})
    assert condition(compute_status(given), "Ready").status.value == ready


def test_ready_pods_of_the_former_specification_do_not_make_it_ready():
    old = pod_body("smollm-old", template_hash="h0")
    status = compute_status(facts(old, LOADING))
    assert words(status, "Ready") == ("False", "PodsNotReady")
    assert words(status, "Progressing") == ("True", "RollingOut")
    assert status.ready_replicas == 1


def test_the_failure_is_the_reason_everywhere():
    blocked = FailureStatus(reason="AcceleratorUnknown", message="use one of cpu")
    status = compute_status(facts(blocked=blocked))
    for name in ("Ready", "Progressing"):
        assert words(status, name) == ("False", "AcceleratorUnknown")
    assert words(status, "Degraded") == ("True", "AcceleratorUnknown")
    assert status.failure == blocked


def test_diagnostic_conditions_never_feed_ready():
    late = {"smollm-a-uid": Confirmation(None, PodError(PodErrorKind.UNREACHABLE, "no answer within 2 s"))}
    status = compute_status(facts(confirmations=late))
    assert words(status, "Ready") == ("True", "Serving")
    assert words(status, "SwitchesApplied") == ("False", "NotConfirmed")
    assert words(status, "Degraded") == ("True", "SwitchesNotApplied")
    assert "smollm-a: no answer within 2 s" in condition(status, "SwitchesApplied").message


def test_a_push_under_way_is_not_degraded():
    status = compute_status(facts(confirmations={}))
    assert words(status, "SwitchesApplied") == ("False", "NotConfirmed")
    assert words(status, "Degraded") == ("False", "AsExpected")


def test_without_a_pod_the_switches_are_unknown_and_not_applied():
    given = facts(LOADING)
    status = compute_status(given)
    assert words(status, "SwitchesApplied") == ("Unknown", "NoPods")
    assert {line.pods for line in status.optimizations} == {"0/0"}
    assert {line.effective for line in status.optimizations} == {"unknown"}


def test_autoscaling_is_said_not_to_be_there():
    owner = service(autoscaling={"minReplicas": 1, "maxReplicas": 4})
    status = compute_status(facts(owner=owner))
    assert words(status, "Ready") == ("True", "Serving")
    assert words(status, "Degraded") == ("True", "AutoscalingNotInThisBuild")


def line(status, name):
    return next(found for found in status.optimizations if found.name == name)


def test_an_optimization_that_is_rolled_back_says_by_which_flag():
    sent = message(rollback={"chunkedPrefill": True})
    status = compute_status(facts(owner=service(rollback={"chunkedPrefill": True}), message=sent))
    found = line(status, "chunkedPrefill")
    assert (found.desired, found.effective, found.pods) == ("off", "rolledBack", "1/1")
    assert found.reason == "spec.rollback.chunkedPrefill is true"
    status = compute_status(
        facts(owner=service(rollback={"all": True}), message=message(rollback={"all": True}))
    )
    assert line(status, "prefixCache").reason == "spec.rollback.all is true"


def test_a_killed_optimization_says_why():
    sent = message(killed=frozenset({"prefixCache"}))
    status = compute_status(facts(message=sent, killed=frozenset({"prefixCache"}), kill_reason="incident 12"))
    assert line(status, "prefixCache").effective == "killed"
    assert line(status, "prefixCache").reason == "kill switch: incident 12"
    assert status.kill_switch.optimizations == ["prefixCache"]


def test_an_inactive_optimization_is_in_the_pods_words():
    sent = message()
    state = PodState(3, (SwitchState("fusedKernels", "inactive", "no CUDA device"),))
    status = compute_status(facts(message=sent, confirmations={"smollm-a-uid": Confirmation(state)}))
    found = line(status, "fusedKernels")
    assert (found.desired, found.effective, found.reason) == ("on", "inactive", "no CUDA device")


def test_a_parameter_that_an_older_pod_ignores_is_shown_although_the_switch_is_on():
    words = "ignored, not in this build: overlap"
    state = PodState(3, (SwitchState("chunkedPrefill", "on", words),))
    status = compute_status(facts(message=message(), confirmations={"smollm-a-uid": Confirmation(state)}))
    found = line(status, "chunkedPrefill")
    assert (found.effective, found.reason) == ("on", words)


def test_pods_that_differ_are_mixed_and_the_late_one_is_named():
    pods = (pod_body("smollm-a"), pod_body("smollm-b", ip="10.0.0.2"))
    old, new = message(2), message(3, rollback={"chunkedPrefill": True})
    status = compute_status(
        facts(
            *pods,
            owner=service(replicas=2),
            message=new,
            confirmations={"smollm-a-uid": answer(new), "smollm-b-uid": answer(old)},
        )
    )
    found = line(status, "chunkedPrefill")
    assert (found.effective, found.pods, found.not_confirmed) == ("mixed", "1/2", ["smollm-b"])
    assert "smollm-b: runs generation 2, not 3" in condition(status, "SwitchesApplied").message


def test_a_pod_on_its_way_out_is_not_counted():
    stopping = pod_body("smollm-b", metadata={"deletionTimestamp": "x"})
    status = compute_status(facts(pod_body(), stopping))
    assert line(status, "prefixCache").pods == "1/1"
    assert status.replicas == 1


def test_the_same_facts_give_the_same_status_whatever_the_time():
    first = compute_status(facts())
    owner = service(status=first.to_json())
    assert compute_status(facts(owner=owner, now=NOW + timedelta(days=1))) == first


def test_a_condition_is_dated_by_its_last_transition():
    first = compute_status(facts(LOADING))
    later = NOW + timedelta(minutes=5)
    second = compute_status(facts(owner=service(status=first.to_json()), now=later))
    assert condition(second, "Ready").last_transition_time == "2026-01-01T00:05:00Z"
    assert condition(second, "Degraded").last_transition_time == "2026-01-01T00:00:00Z"


def ttft(count=10, p99=900.0, prefill=300.0):
    return PodState(
        3,
        ttft={
            "count": count,
            "window_seconds": 300,
            "p50_ms": p99 / 3,
            "p95_ms": p99 / 2,
            "p99_ms": p99,
            "segments_ms": {"queue": 10.0, "prefill": prefill, "decode": 1.0, "transport": 0.5},
        },
    )


def test_ttft_is_shown_with_its_segments():
    found = ttft_status([ttft()], None)
    assert (found.count, found.window_seconds, found.p50, found.p99) == (10, 300, "300ms", "900ms")
    assert found.segments == SegmentStatus(queue="10ms", prefill="300ms", decode="1ms", transport="0.5ms")


def test_ttft_of_several_pods_is_the_slowest_ones_and_the_mean_of_the_segments():
    found = ttft_status(
        [ttft(count=10, p99=900.0, prefill=100.0), ttft(count=30, p99=300.0, prefill=500.0)], None
    )
    assert (found.count, found.p99, found.segments.prefill) == (40, "900ms", "400ms")


def test_ttft_is_rewritten_only_when_it_changed_materially():
    shown = ttft_status([ttft()], None)
    assert ttft_status([ttft(count=11, p99=950.0)], shown) is shown
    assert ttft_status([ttft(count=11, p99=1200.0)], shown).p99 == "1200ms"
    assert ttft_status([ttft(prefill=500.0)], shown).segments.prefill == "500ms"


@pytest.mark.parametrize(
    ("shown", "now", "news"), [(2, 3, True), (10, 14, False), (10, 15, True), (15, 10, True)]
)
def test_many_more_or_fewer_requests_behind_the_same_figures_are_news(shown, now, news):
    previous = ttft_status([ttft(count=shown)], None)
    assert ttft_status([ttft(count=now)], previous).count == (now if news else shown)


@pytest.mark.parametrize("states", [[], [PodState(3)], [ttft(count=0)], [PodState(3, ttft={"count": "x"})]])
def test_no_requests_no_ttft(states):
    assert ttft_status(states, TtftStatus(count=3)) is None
