"""Why a service does not run: one reason out of the small fixed list, in the container's own words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from firsttoken_api.resources.inference_service_status import FailureReason, FailureStatus
from firsttoken_operator.desired.pod import PRE_STOP_SECONDS, SHUTDOWN_MARGIN_SECONDS
from firsttoken_operator.observe import Exit, PodFacts, WorkloadFacts

_IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
    "SignatureValidationFailed",
}
_REFUSED_REASONS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "PreCreateHookError",
    "PreStartHookError",
}
_MEMORY_WORDS = ("out of memory", "cannot allocate memory", "outofmemoryerror")
_DRIVER_WORDS = ("driver version is insufficient", "driver on your system is too old", "driver too old")
_GPU_WORDS = ("gpu",)
# Exit codes of a container that the kubelet stopped: by SIGTERM or SIGKILL, or in good order.
_STOPPED = (0, 137, 143)
# Exit code of a runtime that was asked for something it cannot do; the line before it says what.
LOAD_FAILED = 2
_MESSAGE_LENGTH = 1000


def find_failure(
    workload: WorkloadFacts,
    pods: Sequence[PodFacts],
    previous: FailureStatus | None,
    startup_timeout_seconds: int,
    gpu_type: str | None,
    served: Set[str] = frozenset(),
) -> FailureStatus | None:
    """The first failure that keeps pods of the newest specification from serving, or None.

    previous: the failure in status so far; its text is kept where the kubelet alternates between two.
    served: uids of pods that have generated a token before.
    """
    if workload.refused:
        return _status(FailureReason.POD_REFUSED, workload.refused)
    stopping = any(pod.terminating for pod in pods)
    for pod in newest(workload, pods):
        if pod.ready:
            continue
        found = _waiting_failure(pod, previous, gpu_type, stopping)
        if found is None and pod.last_exit is not None:
            found = _exit_failure(pod, pod.last_exit, startup_timeout_seconds, pod.uid in served)
        if found is not None:
            return found
    if workload.deadline_exceeded:
        return _status(
            FailureReason.PROBE_TIMEOUT,
            "the pods did not become ready in time; look at their events and logs, or raise "
            "spec.startupTimeoutSeconds",
        )
    return None


def newest(workload: WorkloadFacts, pods: Iterable[PodFacts]) -> list[PodFacts]:
    """Pods of the newest specification that are to serve, by name."""
    return sorted(
        (
            pod
            for pod in pods
            if pod.counts and workload.newest_hash is not None and pod.template_hash == workload.newest_hash
        ),
        key=lambda pod: pod.name,
    )


def _waiting_failure(
    pod: PodFacts, previous: FailureStatus | None, gpu_type: str | None, stopping: bool
) -> FailureStatus | None:
    if pod.waiting in _IMAGE_REASONS:
        return _image_failure(pod, previous)
    if pod.waiting in _REFUSED_REASONS:
        return _status(FailureReason.POD_REFUSED, pod.waiting_message or str(pod.waiting), pod)
    # A pod of this service that is still stopping holds what the new one waits for: that is no failure.
    if pod.unschedulable is not None and not stopping:
        return _unschedulable(pod, pod.unschedulable, gpu_type)
    return None


def _image_failure(pod: PodFacts, previous: FailureStatus | None) -> FailureStatus:
    reason = FailureReason.IMAGE_PULL_FAILED
    if (
        pod.waiting == "ImagePullBackOff"
        and previous is not None
        and previous.reason == reason
        and previous.pod == pod.name
    ):
        return previous
    words = pod.waiting_message or "the image cannot be pulled"
    return _status(reason, f"{words}; check spec.template.image and imagePullSecrets", pod)


def _unschedulable(pod: PodFacts, words: str, gpu_type: str | None) -> FailureStatus:
    lower = words.lower()
    about_gpu = any(word in lower for word in _GPU_WORDS)
    about_nodes = gpu_type is not None and ("node affinity" in lower or "node selector" in lower)
    if about_gpu or about_nodes:
        wanted = gpu_type or "this GPU"
        advice = f"free a GPU, add a node with {wanted}, or choose another spec.accelerator.type"
        return _status(FailureReason.INSUFFICIENT_GPU, f"{words}; {advice}", pod)
    advice = "free or add CPU and memory, or lower spec.template.resources"
    if "persistentvolumeclaim" in lower:
        advice = "create or repair the claim, or correct spec.model.uri"
    return _status(FailureReason.INSUFFICIENT_RESOURCES, f"{words}; {advice}", pod)


def _exit_failure(
    pod: PodFacts, last: Exit, startup_timeout_seconds: int, served: bool
) -> FailureStatus | None:
    if last.code == 0 and pod.waiting != "CrashLoopBackOff":
        return None
    line = own_line(last.message)
    lower = last.message.lower()
    if last.reason == "OOMKilled":
        words = "the container was killed for memory"
        return _status(
            FailureReason.OUT_OF_MEMORY,
            f"{words}; raise spec.template.resources.limits.memory, or lower spec.kvCache.memory or "
            "spec.model.maxLength",
            pod,
        )
    if any(word in lower for word in _MEMORY_WORDS):
        return _status(
            FailureReason.OUT_OF_MEMORY, f"{line}; lower spec.kvCache.memory or spec.model.maxLength", pod
        )
    if any(word in lower for word in _DRIVER_WORDS):
        return _status(FailureReason.DRIVER_INSUFFICIENT, f"{line}; update the GPU driver of the node", pod)
    if last.code == LOAD_FAILED or (line.startswith("error:") and not served):
        return _status(FailureReason.MODEL_LOAD_FAILED, line or "the runtime gave no reason", pod)
    if _ran_out_of_time(last, startup_timeout_seconds):
        return _status(
            FailureReason.PROBE_TIMEOUT,
            f"the model was not loaded within {startup_timeout_seconds} s; raise spec.startupTimeoutSeconds, "
            "or look at the pod's log for what takes so long",
            pod,
        )
    words = line or f"exit code {last.code}{f' ({last.reason})' if last.reason else ''}"
    return _status(FailureReason.RUNTIME_CRASHED, f"the runtime ended: {words}", pod)


def _ran_out_of_time(last: Exit, startup_timeout_seconds: int) -> bool:
    """Whether the kubelet ended it because the startup probe never passed."""
    slack = PRE_STOP_SECONDS + SHUTDOWN_MARGIN_SECONDS + 90
    return (
        last.code in _STOPPED
        and last.ran_seconds is not None
        and startup_timeout_seconds - 5 <= last.ran_seconds <= startup_timeout_seconds + slack
    )


def own_line(message: str) -> str:
    """The one line of a container's last words that says it: the last `error:` line, or else the last one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1]


def _status(reason: FailureReason, message: str, pod: PodFacts | None = None) -> FailureStatus:
    text = " ".join(message.split())
    if len(text) > _MESSAGE_LENGTH:
        text = text[: _MESSAGE_LENGTH - 1] + "…"
    return FailureStatus(reason=reason.value, message=text, pod=pod.name if pod else None)
