"""The Deployment, and the rules by which its pods may be replaced.

Three things never replace a pod: a live field (it is not in `TemplateInputs`), a newer operator (the pod
template is kept as long as its inputs are the same), and a newer runtime image (the service stays pinned to
the image it was created with; remove the annotation `firsttoken.dev/runtime-image` to take the newest).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from firsttoken_api.resources import InferenceService
from firsttoken_api.resources.inference_service import InferenceServiceSpec
from firsttoken_operator.cluster import DEPLOYMENT, Body
from firsttoken_operator.desired.names import digest, manifest, selector
from firsttoken_operator.desired.pod import TemplateInputs, pod_template

IMAGE_ANNOTATION = "firsttoken.dev/runtime-image"
INPUTS_ANNOTATION = "firsttoken.dev/template-inputs"
TEMPLATE_ANNOTATION = "firsttoken.dev/template"
# Beyond the time a pod may take to start: for scheduling, pulling the image, stopping the old pod.
PROGRESS_MARGIN_SECONDS = 600


def wanted_replicas(spec: InferenceServiceSpec) -> int:
    """Pods asked for. Without an autoscaler in this build, `autoscaling` runs its smallest number."""
    return spec.autoscaling.min_replicas if spec.autoscaling else spec.replicas


def pinned_image(live: Body | None, newest: str) -> str:
    """The runtime image of this service: the one it was created with, or the newest for a new one."""
    return annotations_of(live).get(IMAGE_ANNOTATION) or newest


def deployment(owner: InferenceService, inputs: TemplateInputs, pull_policy: str, live: Body | None) -> Body:
    """The Deployment to apply, given the live one (None when there is none)."""
    spec = owner.spec
    inputs_digest = digest(_plain(inputs))
    template = pod_template(inputs, pull_policy)
    template_digest = digest(template)
    found = annotations_of(live)
    if (
        live is not None
        and found.get(INPUTS_ANNOTATION) == inputs_digest
        and found.get(TEMPLATE_ANNOTATION) not in (None, template_digest)
    ):
        # Same inputs, other template: this operator is newer than the one that made it. Keep what runs.
        template, template_digest = live["spec"]["template"], found[TEMPLATE_ANNOTATION]
    return manifest(
        owner,
        DEPLOYMENT,
        owner.metadata.name,
        {
            "spec": {
                "replicas": wanted_replicas(spec),
                "revisionHistoryLimit": 3,
                "progressDeadlineSeconds": spec.startup_timeout_seconds
                + spec.rollout.drain_timeout_seconds
                + PROGRESS_MARGIN_SECONDS,
                "selector": {"matchLabels": selector(owner.metadata.name)},
                "strategy": _strategy(spec),
                "template": template,
            }
        },
        {
            IMAGE_ANNOTATION: inputs.image,
            INPUTS_ANNOTATION: inputs_digest,
            TEMPLATE_ANNOTATION: template_digest,
        },
    )


def annotations_of(body: Body | None) -> dict[str, str]:
    return ((body or {}).get("metadata") or {}).get("annotations") or {}


def _strategy(spec: InferenceServiceSpec) -> Body:
    if spec.rollout.strategy == "Recreate":
        # Null, because the API server fills rollingUpdate in and then refuses it next to Recreate.
        return {"type": "Recreate", "rollingUpdate": None}
    rolling = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    return {"type": "RollingUpdate", "rollingUpdate": rolling}


def _plain(inputs: TemplateInputs) -> Any:
    """The inputs as JSON data; of the accelerator only what decides where a pod runs.

    What is not set is left out, so that a field a later operator adds leaves the digest of a running service.
    """
    found = {
        key: value for key, value in vars(inputs).items() if key not in ("accelerator", "template", "source")
    }
    accelerator = inputs.accelerator
    return _without_empty(
        {
            **found,
            "source": asdict(inputs.source),
            "accelerator": [accelerator.resource, accelerator.node_labels, accelerator.tolerations],
            "template": inputs.template.to_json(),
        }
    )


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in plain.items() if item not in (None, {}, [])}
    return value
