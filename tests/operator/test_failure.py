"""Why a service does not run, from pods as the API server shows them."""

from __future__ import annotations

import pytest
from tests.operator.fakes import pod_body

from firsttoken_api.resources.inference_service_status import FailureStatus
from firsttoken_operator.failure import find_failure, own_line
from firsttoken_operator.observe import WorkloadFacts, pod_facts, workload_facts

WORKLOAD = WorkloadFacts(exists=True, settled=True, desired=1, newest_hash="h1")


def failure(*pods, workload=WORKLOAD, previous=None, timeout=1800, gpu=None):
    return find_failure(workload, [pod_facts(pod) for pod in pods], previous, timeout, gpu)


def crashed(code, message="", reason="Error", ran=5, waiting="CrashLoopBackOff", **more):
    start, end = "2026-01-01T00:00:00Z", f"2026-01-01T{ran // 3600:02}:{ran // 60 % 60:02}:{ran % 60:02}Z"
    terminated = {
        "exitCode": code,
        "reason": reason,
        "message": message,
        "startedAt": start,
        "finishedAt": end,
    }
    state = (
        {"waiting": {"reason": waiting, "message": "back-off 10s restarting"}} if waiting else {"running": {}}
    )
    return pod_body(
        ready=False, started=False, state=state, lastState={"terminated": terminated}, restartCount=1, **more
    )


def unscheduled(words, **more):
    conditions = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words},
    ]
    return pod_body(ready=False, started=False, conditions=conditions, state={}, phase="Pending", **more)


def waiting(reason, message=""):
    return pod_body(ready=False, started=False, state={"waiting": {"reason": reason, "message": message}})


def test_a_pod_that_serves_is_no_failure():
    assert failure(pod_body()) is None


def test_a_pod_that_is_loading_is_no_failure():
    assert failure(pod_body(ready=False, started=False)) is None


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        (
            crashed(2, "INFO loading\nerror: /models/x.gguf: file is truncated at 17 of 90 bytes\n"),
            "ModelLoadFailed",
            "error: /models/x.gguf: file is truncated at 17 of 90 bytes",
        ),
        (crashed(1, "error: architecture 'mamba'"), "ModelLoadFailed", "architecture 'mamba'"),
        (crashed(2, "error: bad", waiting=None), "ModelLoadFailed", "error: bad"),
        (crashed(137, reason="OOMKilled"), "OutOfMemory", "killed for memory"),
        (crashed(1, "torch.OutOfMemoryError: CUDA out of memory"), "OutOfMemory", "CUDA out of memory"),
        (
            crashed(1, "CUDA driver version is insufficient for CUDA runtime version"),
            "DriverInsufficient",
            "update the GPU driver",
        ),
        (crashed(139, "Segmentation fault"), "RuntimeCrashed", "Segmentation fault"),
        (crashed(139, ""), "RuntimeCrashed", "exit code 139"),
        (crashed(0, "", reason="Completed"), "RuntimeCrashed", "exit code 0"),
        (crashed(137, ran=1815), "ProbeTimeout", "not loaded within 1800 s"),
        (crashed(0, ran=1815), "ProbeTimeout", "raise spec.startupTimeoutSeconds"),
        (waiting("ErrImagePull", "manifest unknown"), "ImagePullFailed", "manifest unknown"),
        (waiting("InvalidImageName", "couldn't parse"), "ImagePullFailed", "couldn't parse"),
        (waiting("ErrImageNeverPull", "not present"), "ImagePullFailed", "not present"),
        (waiting("CreateContainerConfigError", "secret not found"), "PodRefused", "secret not found"),
        (unscheduled("3 Insufficient nvidia.com/gpu."), "InsufficientGPU", "free a GPU"),
        (unscheduled("0/3 nodes are available: 3 Insufficient memory."), "InsufficientResources", "memory"),
        (unscheduled('persistentvolumeclaim "w"'), "InsufficientResources", "correct spec.model.uri"),
    ],
)  # fmt: skip
def test_each_way_to_fail_has_its_reason_and_its_words(pod, reason, words):
    found = failure(pod)
    assert found is not None
    assert found.reason == reason
    assert words in found.message
    assert found.pod == "smollm-a"


def test_no_node_of_the_type_is_a_gpu_shortage_only_where_a_gpu_is_asked_for():
    pod = unscheduled("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")
    found = failure(pod, gpu="nvidia-h200")
    assert found.reason == "InsufficientGPU"
    assert "add a node with nvidia-h200" in found.message
    assert failure(pod, gpu=None).reason == "InsufficientResources"


def test_waiting_for_the_gpu_of_the_pod_that_is_stopping_is_no_failure():
    stopping = pod_body("smollm-old", template_hash="h0", metadata={"deletionTimestamp": "now"})
    assert failure(stopping, unscheduled("Insufficient nvidia.com/gpu"), gpu="nvidia-h200") is None


def test_a_crash_stays_the_failure_while_the_next_try_is_loading():
    assert failure(crashed(2, "error: bad", waiting=None)).reason == "ModelLoadFailed"


def test_a_crash_is_forgotten_once_the_pod_serves():
    pod = crashed(2, "error: bad", waiting=None)
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    assert failure(pod) is None


def test_a_crash_after_hours_of_serving_is_no_probe_timeout():
    assert failure(crashed(137, ran=7200)).reason == "RuntimeCrashed"


def test_the_kubelets_two_ways_to_say_an_image_is_missing_do_not_alternate():
    first = failure(waiting("ErrImagePull", "manifest unknown"))
    again = failure(waiting("ImagePullBackOff", 'Back-off pulling image "x"'), previous=first)
    assert again == first


def test_an_end_after_it_had_served_is_no_failure_to_load_unless_it_says_so():
    def found(pod):
        return find_failure(WORKLOAD, [pod_facts(pod)], None, 1800, False, {"smollm-a-uid"})

    assert found(crashed(1, "error: the engine process was ended by SIGSEGV")).reason == "RuntimeCrashed"
    assert found(crashed(2, "error: --model /models/x: no such file")).reason == "ModelLoadFailed"


def test_pods_of_a_former_specification_are_not_to_blame():
    assert failure(crashed(2, "error: bad", template_hash="h0")) is None


def test_a_pod_that_the_api_server_refuses_is_quoted():
    facts = workload_facts(
        {
            "metadata": {"generation": 1, "uid": "d"},
            "status": {
                "observedGeneration": 1,
                "conditions": [
                    {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"},
                ],
            },
        },
        [],
    )
    assert failure(workload=facts) == FailureStatus(reason="PodRefused", message="exceeded quota: gpus")


def test_a_roll_out_that_the_deployment_gave_up_is_a_probe_timeout():
    facts = WorkloadFacts(exists=True, settled=True, newest_hash="h1", deadline_exceeded=True)
    assert failure(workload=facts).reason == "ProbeTimeout"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("error: a\ntrailing noise", "error: a"),
        ("error: a\nerror: b\n", "error: b"),
    ],
)
def test_the_one_line_that_says_it(message, line):
    assert own_line(message) == line


def test_a_novel_for_a_message_is_cut():
    assert len(failure(crashed(2, "error: " + "x" * 5000)).message) <= 1000
